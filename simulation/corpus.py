"""Seeds that run with every change: those that once found a bug, and those with rare paths.

A seed's meaning changes with the code that draws from it; what it once found is also covered by an
ordinary test.
"""

from __future__ import annotations

from typing import Final

CORPUS: Final[dict[int, str]] = {
    # Rare paths; chosen so that together they meet every fault, cause and ending.
    9: "preemptions, and workers that leave while prompts are on their way to them",
    23: "prefill and decode lose one another while clients leave",
    134: "a step raises, a server dies, frames outlive their links",
    160: "short pool, partitions, wedged devices, readers beyond the bound",
    194: "no worker grants, leases run out, answers go one way only",
    203: "standstills of workers and server among drains and losses",
    # Several, so that one is left when draws change: one seed in fifty restores blocks.
    **dict.fromkeys((12, 33, 37, 89, 379, 489), "blocks come back from host memory"),
    # Seeds that once found a bug.
    5: "prompts that met workers on their way out were taken for their killers",
    8: "a credit that was lost stopped its stream for good",
    230: "GOODBYEs that come again seconds later",
    1316: "the last rows of a window were lost in a short gap",
    1614: "the same for two streams at once, one way only",
    368743073: "a prompt that came to a wedged worker was taken for what had wedged it",
    1277: "the only worker, still wedged, got a request again, which was taken for the cause",
    2464: "another completion of a prompt came after that had been quarantined",
    82: "a returning zone got everything while a request waited for the other zone",
    # Prompts on rare routes: to decode because there is no prefill worker, and not to decode
    # because they may have killed a worker.
    **dict.fromkeys((26, 173, 310, 449), "no prefill worker is left for a while"),
    **dict.fromkeys((648, 833), "suspects wait for prefill"),
    # Some others, so that each fault occurs more than once, whatever changes.
    **dict.fromkeys(range(100, 114), "nothing special"),
}
