"""`python -m loadtest.bench.routing`: measures the cost of accepting and routing one request, by
the size of the fleet.

Runs production servers and workers in memory, with simulated device times. All fleets run at once
and get the same requests in turn, so ratios compare times under the same load. Exits with 1 if a
request in the largest fleet costs too much more than in the smallest.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import AsyncExitStack
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import trio

from server.contract.generation import GenerationRequest
from simulation.campaign import keep_quiet
from simulation.deterministic import run
from simulation.fleet import FleetShape, running_fleet
from triolet.sampling import SamplingParams

from ..harness.progress import announce, progress
from ..harness.report import Ratio, Report, describe, finish

if TYPE_CHECKING:
    from server.contract.output_stream import OutputStream

SIZES: Final = (1, 4, 100)
"""Workers of each role."""
MOST_GROWTH: Final = 1.2
WARM: Final = 50
PROMPT_TOKENS: Final = 200
KINDS: Final = {"short": (0, 5), "own": (0, PROMPT_TOKENS), "shared": (PROMPT_TOKENS, 5)}
"""Shared and own tokens of the prompts of each kind."""


def request_of(rng: random.Random, kind: str) -> GenerationRequest:
    """Return a request with a random prompt."""
    num_common, num_own = KINDS[kind]
    return GenerationRequest(
        request_id=rng.randbytes(16),
        prompt_ids=(*range(1, num_common + 1), *rng.choices(range(1, 900), k=num_own)),
        sampling=SamplingParams(max_tokens=1, seed=1, ignore_eos=True),
        deadline_s=600.0,
    )


async def read(stream: OutputStream) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


async def costs(requests: int) -> list[dict[str, Any]]:
    """Return the cost for each kind of prompt and size of fleet."""
    rng, rows = random.Random(1), []
    async with AsyncExitStack() as stack:
        fleets = [
            await stack.enter_async_context(running_fleet(FleetShape(size, size), 1))
            for size in SIZES
        ]
        for kind in KINDS:
            taken_ns: list[list[int]] = [[] for _ in SIZES]
            for _ in range(WARM + requests):
                async with trio.open_nursery() as nursery:
                    # In random order, because the first fleet finds the processor's caches cold.
                    pairs = list(zip(fleets, taken_ns, strict=True))
                    for fleet, taken in rng.sample(pairs, len(pairs)):
                        request, began_at = request_of(rng, kind), perf_counter_ns()
                        stream = fleet.submit(request)
                        taken.append(perf_counter_ns() - began_at)
                        nursery.start_soon(read, stream)
            for size, taken in zip(SIZES, taken_ns, strict=True):
                p50_us = median(taken[WARM:]) / 1000
                rows.append({"prompts": kind, "of_each_role": size, "p50_us": p50_us})
                progress(f"{kind} prompts, {size} + {size} workers: {p50_us:.0f} us")
    return rows


def main() -> None:
    """Measure, print and write the results; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300, help="for each row")
    options = parser.parse_args()
    announce(__doc__)
    keep_quiet()
    rows = run(partial(costs, options.requests), 1)
    ratios = {}
    for kind in KINDS:
        of_kind = [row["p50_us"] for row in rows if row["prompts"] == kind]
        growth = Ratio(of_kind[-1] / of_kind[0], ceiling=MOST_GROWTH)
        ratios[f"cost in the largest fleet / the smallest ({kind} prompts)"] = growth
    sys.exit(finish(Report("routing", describe(1), rows, ratios, {})))


if __name__ == "__main__":
    main()
