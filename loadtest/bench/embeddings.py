"""`python -m loadtest.bench.embeddings`: what batching brings to vectors, over HTTP.

Two whole fleets stand beside one another, one that batches and one that computes input by input;
only one is asked at a time, and they take turns, so that whatever else the machine does strikes
both alike. Both must give the same vectors. Only vectors are asked for, so in both fleets whoever
computes has all cores.

What batches save is reading all weights once for each input. So they bring most where inputs are
short, and nothing once a single input keeps the processor's arithmetic busy: on a core with
AVX-512 from some 16 tokens on, on a GPU from some hundreds. Each shape of inputs has its own ratio;
only the shortest, for which batching on a CPU is worth anything, has a floor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import trio

from ..harness.progress import announce, progress
from ..harness.report import BENCH, Ratio, Report, describe, finish
from ..harness.servers import TAKES_ALL, running_server
from ..harness.statistics import percentile
from ..harness.streams import Clients, post

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..harness.streams import Stream

MOST_ADDED_MS: Final = 5.0
"""That a lone client waits longer than without batches: the wait for company, and a timer."""
CLIENTS: Final = 16
SEARCHES: Final = "searches"
SHAPES: Final = {
    SEARCHES: (4, 8, 6, 12, 5, 10),
    "questions": (16, 24, 32, 20, 28, 48),
    "passages": (64, 128, 96),
}
"""Tokens of inputs: words typed into a search box, sentences asked, paragraphs to be found."""
FLOORS: Final = {SEARCHES: 3.0}
"""Throughput with batches over that without, with `CLIENTS` of them."""
ONE_BY_ONE: Final = (
    "--set",
    "worker.engine.embedding.max_batch_tokens=1",
    "--set",
    "worker.engine.embedding.max_wait_s=0",
)
WARM_UP: Final = 4
FLEETS: Final = {"batched": (), "one by one": ONE_BY_ONE}


class Times:
    """What was found of one fleet, shape and number of clients.

    Attributes:
      rates: inputs per second of each round.
      waits_s: seconds of each answer.
    """

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.waits_s: list[float] = []


async def measure(
    url: str, num_clients: int, turns: int, lengths: Sequence[int], times: Times
) -> tuple[str, ...]:
    """Ask side by side, one vector after another each; note the times, and return the vectors."""
    found: dict[int, Stream] = {}

    async def client(clients: Clients, number: int) -> None:
        for at in range(number, CLIENTS * turns, CLIENTS):
            length = lengths[at % len(lengths)]
            ids = [10 + (at * 31 + offset * 7) % 800 for offset in range(length)]
            request = post("/v1/embeddings", {"input": ids, "encoding_format": "base64"})
            began_at = trio.current_time()
            answer = found[at] = await clients.ask(request)
            times.waits_s.append(trio.current_time() - began_at)
            answer.check()

    async with Clients(url).reading() as clients:
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(num_clients):
                nursery.start_soon(client, clients, number)
        times.rates.append(len(found) / (trio.current_time() - began_at))
    return tuple(json.loads(found[at].body)["data"][0]["embedding"] for at in sorted(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description="batched vectors beside vectors one by one")
    parser.add_argument("--model", default=str(BENCH / "model-150m"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args(arguments)
    announce(__doc__)
    log = BENCH / "embeddings"
    log.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str, int], Times] = {}
    with ExitStack() as stack:
        urls = {}
        for name, extra in FLEETS.items():
            command = [options.model, "--dtype", options.dtype, "--threads", str(options.threads)]
            path = log / f"{name.replace(' ', '-')}.log"
            urls[name] = stack.enter_context(running_server([*command, *TAKES_ALL, *extra], path))
        for url in urls.values():
            trio.run(measure, url, CLIENTS, WARM_UP, SHAPES[SEARCHES], Times())
        for round_number in range(options.rounds):
            names = list(urls) if round_number % 2 else list(reversed(urls))
            for shape, clients in product(options.shapes, (1, CLIENTS)):
                vectors = set()
                for name in names:
                    times = found.setdefault((shape, name, clients), Times())
                    asked = (urls[name], clients, options.turns, SHAPES[shape], times)
                    vectors.add(trio.run(measure, *asked))
                    progress(f"{shape}, {clients} clients, {name}: {times.rates[-1]:.0f} inputs/s")
                if len(vectors) != 1:
                    raise RuntimeError("a vector depends on who else is in its batch")
    report = report_of(found, options.threads)
    return finish(report)


def report_of(found: dict[tuple[str, str, int], Times], threads: int) -> Report:
    """Return the table and the ratios: medians over rounds, each of one moment."""
    rows: list[dict[str, Any]] = []
    for (shape, name, clients), times in found.items():
        mean_tokens = sum(SHAPES[shape]) / len(SHAPES[shape])
        rows.append(
            {
                "inputs": shape,
                "fleet": name,
                "clients": clients,
                "inputs/s": median(times.rates),
                "tokens/s": mean_tokens * median(times.rates),
                "p50 ms": 1e3 * median(times.waits_s),
                "p99 ms": 1e3 * percentile(times.waits_s, 99),
            }
        )
    ratios = {}
    for shape in dict.fromkeys(shape for shape, _, _ in found):
        pairs = zip(
            found[shape, "batched", CLIENTS].rates,
            found[shape, "one by one", CLIENTS].rates,
            strict=True,
        )
        gain = median(batched / alone for batched, alone in pairs)
        ratios[f"throughput of {shape} at {CLIENTS} clients, batched / one by one"] = Ratio(
            gain, FLOORS.get(shape)
        )
        added_s = median(found[shape, "batched", 1].waits_s) - median(
            found[shape, "one by one", 1].waits_s
        )
        ratios[f"wait that batching adds to a lone client's {shape}, ms"] = Ratio(
            1e3 * added_s, ceiling=MOST_ADDED_MS
        )
    return Report(
        "embeddings",
        describe(threads),
        rows,
        ratios,
        {},
        (("inputs", "fleet", "clients"), "inputs/s"),
    )


if __name__ == "__main__":
    sys.exit(main())
