"""Seeds that are run again with every change: those that once found something, and those that go
where few do.

What a number stands for changes with the code that draws from it; what it once found is held by an
ordinary test beside the code. Knows numbers and reasons.
"""

from __future__ import annotations

from typing import Final

CORPUS: Final[dict[int, str]] = {
    1: "a server that stood still begins everything anew; decode has no row for it",
    8: "a credit that was lost stopped its stream for good",
    44: "prefill forgets what it was asked for; a server dies with its clients",
    79: "a worker leaves because its device stands still, while it is drained",
    129: "no blocks: refusals, preemptions, and leases that run out",
    160: "prefill and decode lose one another; a reader stalls beyond the bound",
    185: "clients leave while workers drain",
    191: "late ENDED frames after the last heartbeat",
    192: "heartbeats that come seconds late",
    302: "blocks that a server counts twice until it hears better",
    312: "nobody grants; drains in the middle of prompts",
    1190: "KV that nobody takes stays in the ring until it is written off",
    1316: "the last rows of a window were lost in a short gap",
    1614: "the same for two streams at once, one way only",
    2293: "workers die just before peace comes",
    3003: "a server stands still while its pool is short",
}
