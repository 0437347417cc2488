"""Seeds that tests run with every change: some once found a bug, others have rare paths.

Each seed is one simulated run of a fleet with faults. After a change of the code a seed may no
longer reproduce its bug, so each bug also has an ordinary test.
"""

from __future__ import annotations

from typing import Final

CORPUS: Final[dict[int, str]] = {
    # Rare paths. Together they cover every fault, cause and ending.
    9: "preemptions, and workers that leave while prompts are on their way to them",
    23: "prefill and decode lose contact while clients disconnect",
    134: "a step raises, a server dies, frames outlive their links",
    160: "short pool, partitions, wedged devices, readers beyond the bound",
    194: "no worker grants, leases run out, answers go one way only",
    203: "stalls of workers and server among drains and losses",
    # Several, because one seed in fifty restores blocks and draws change.
    **dict.fromkeys((12, 33, 37, 89, 379, 489), "blocks are restored from host memory"),
    # Seeds that once found a bug.
    5: "prompts on exiting workers were blamed for a crash",
    8: "a lost credit stopped its stream forever",
    230: "GOODBYEs that are repeated seconds later",
    1316: "the last rows of a window were lost in a short gap",
    1614: "the same for two streams at once, one way only",
    368743073: "a prompt sent to a wedged worker was blamed for wedging it",
    1277: "the only worker, still wedged, got a request, which was blamed",
    2464: "another completion of a prompt came after its quarantine",
    82: "a returning zone got everything while a request waited for the other zone",
    # Prompts on rare routes: to decode because there is no prefill worker, and not to decode
    # because they are suspected of a crash.
    **dict.fromkeys((26, 173, 310, 449), "no prefill worker is left for a while"),
    **dict.fromkeys((648, 833), "suspects wait for prefill"),
    # Further seeds, so that each fault occurs more than once even if draws change.
    **dict.fromkeys(range(100, 114), "nothing special"),
}
