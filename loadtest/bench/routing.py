"""`python -m loadtest.bench.routing`: cost of accepting and routing one request by the size of the
fleet, and how evenly requests are spread.

Production servers and workers run in memory, with devices of modelled time. All fleets run at once
and get the same requests in turn, so that a ratio compares times under the same load. Exits with 1
if a request costs too much more in the largest fleet than in the smallest.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from statistics import mean, median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import trio

from server.contract.generation import GenerationRequest
from server.scheduling.routing import streams_on
from simulation.campaign import keep_quiet
from simulation.deterministic import run
from simulation.fleet import FleetShape, running_fleet
from triolet.config import RoutingConfig
from triolet.ids import Role
from triolet.sampling import SamplingParams
from triolet.units import MILLISECONDS

from ..harness.progress import announce, progress
from ..harness.report import Ratio, Report, describe, finish

if TYPE_CHECKING:
    from server.scheduling.links import Links

SIZES: Final = (1, 4, 25, 100)
"""Workers of each role."""
MOST_GROWTH: Final = 1.2
MOST_UNEVEN: Final = 1.25
WARM: Final = 50
PROMPT_TOKENS: Final = 200
KINDS: Final = {"short": (0, 5), "own": (0, PROMPT_TOKENS), "shared": (PROMPT_TOKENS, 5)}
"""Tokens of a common beginning, and tokens of its own, of the prompts of each kind."""
ROWS: Final = 64
TURNS: Final = 60


def request_of(rng: random.Random, kind: str, max_tokens: int) -> GenerationRequest:
    """Return a request with a random prompt."""
    num_common, num_own = KINDS[kind]
    return GenerationRequest(
        request_id=rng.randbytes(16),
        prompt_ids=(*range(1, num_common + 1), *rng.choices(range(1, 900), k=num_own)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
        deadline_s=600.0,
    )


async def read(fleet: Links, request: GenerationRequest) -> int:
    """Run a request to its end; return the nanoseconds that it took to begin."""
    began_at = perf_counter_ns()
    stream = fleet.submit(request)
    taken_ns = perf_counter_ns() - began_at
    async for _ in stream:
        pass
    return taken_ns


async def costs(requests: int) -> list[dict[str, Any]]:
    """Return a row for each kind of prompt and size of a fleet."""
    rng, rows = random.Random(1), []
    async with AsyncExitStack() as stack:
        fleets = [
            await stack.enter_async_context(running_fleet(FleetShape(size, size), 1))
            for size in SIZES
        ]
        for kind in KINDS:
            taken_ns: list[list[int]] = [[] for _ in SIZES]
            for _ in range(WARM + requests):
                for fleet, taken in zip(fleets, taken_ns, strict=True):
                    taken.append(await read(fleet, request_of(rng, kind, 1)))
            for size, taken in zip(SIZES, taken_ns, strict=True):
                p50_us = median(taken[WARM:]) / 1000
                rows.append({"prompts": kind, "of_each_role": size, "p50_us": p50_us})
                progress(f"{kind} prompts, {size} + {size} workers: {p50_us:.0f} us")
    return rows


async def unevenness(candidates: int) -> float:
    """Return the streams on the fullest decode worker / their mean, averaged over time, while
    streams of random lengths begin and end."""
    rng, shape, found = random.Random(1), FleetShape(SIZES[-1], SIZES[-1], ROWS), []
    server = replace(shape.server, routing=RoutingConfig(candidates=candidates))
    async with (
        running_fleet(replace(shape, server=server), 1) as fleet,
        trio.open_nursery() as nursery,
    ):
        for turn in range(TURNS):
            for _ in range(SIZES[-1]):
                nursery.start_soon(read, fleet, request_of(rng, "short", rng.randint(1, 80)))
            await trio.sleep(100 * MILLISECONDS)
            decodes = [one for one in fleet._workers if one.role is Role.DECODE]
            streams = [streams_on(one) for one in decodes]
            if turn >= TURNS // 2:
                found.append(max(streams) / mean(streams))
        nursery.cancel_scope.cancel()
    progress(f"{candidates} candidates: fullest / mean {mean(found):.2f}")
    return mean(found)


def main() -> None:
    """Measure, write and show it."""
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
    few, most = RoutingConfig().candidates, SIZES[-1]
    uneven = {count: run(partial(unevenness, count), 1) for count in (few, most)}
    ratios[f"fullest decode worker / mean, {few} candidates"] = Ratio(
        uneven[few], ceiling=MOST_UNEVEN
    )
    ratios["the same, all workers compared"] = Ratio(uneven[most])
    sys.exit(finish(Report("routing", describe(1), rows, ratios, {})))


if __name__ == "__main__":
    main()
