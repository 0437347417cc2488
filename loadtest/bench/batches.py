"""`python -m loadtest.bench.batches`: a batch that survives everything, and that nobody notices.

First a batch runs while every process of its fleet is killed once, the supervisor included, for
each number of servers; then interactive requests are asked in turns with and without a batch behind
them. Exit code 0 if every line was answered exactly once, with what it is answered directly, and
interactive requests waited hardly longer for their first token; 1 if not; 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import os
import sys
from shutil import rmtree
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import trio
from rich.console import Console

from ..campaign.batches import BatchTookTooLongError, BatchVerdict, Load, Side, compare, run_batch
from ..harness.progress import announce, progress
from ..harness.report import BENCH, Ratio, Report, describe, finish
from ..harness.servers import HasNotHappenedError, ServerDidNotStartError
from ..harness.statistics import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_WAIT: Final = 1.1
"""The 99th percentile of interactive requests' time to the first token, with a batch over
without."""
WIDTH: Final = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write; return the exit code."""
    options = parse(arguments)
    announce(__doc__)
    out = BENCH / "batches"
    rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    console = Console(highlight=False)
    console = Console(highlight=False, width=max(console.width, WIDTH))
    serve = options.serve
    verdicts: list[BatchVerdict] = []
    sides: tuple[Side, Side] | None = None
    try:
        for num_servers in options.servers:
            progress(f"{options.lines} lines, {num_servers} server(s); each process is killed once")
            args = (options.lines, options.max_tokens, num_servers, options.seed, out, serve)
            verdicts.append(trio.run(run_batch, *args))
            console.print(*verdicts[-1].wrongs, sep="\n")
        if options.turns:
            progress(f"{options.turns} turns of requests without a batch and with one")
            load = Load(options.turns, options.requests, options.rate, options.seed)
            sides = trio.run(compare, load, out, serve)
            console.print(*sides[0].failures, *sides[1].failures, sep="\n")
    except (ServerDidNotStartError, HasNotHappenedError, BatchTookTooLongError) as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        return 2
    report = report_of(verdicts, sides)
    return finish(report, console)


def report_of(verdicts: Sequence[BatchVerdict], sides: tuple[Side, Side] | None) -> Report:
    """Return tables and ratios."""
    ratios: dict[str, Ratio] = {}
    for verdict in verdicts:
        name = f"what is wrong with {verdict.num_lines} lines, {verdict.num_servers} server(s)"
        ratios[name] = Ratio(float(len(verdict.wrongs)), ceiling=0.0)
    batches, rows = _batches(verdicts), _deaths(verdicts)
    more = {"deaths": rows, "batches": batches} if verdicts else {}
    interactive: list[dict[str, Any]] = []
    if sides is not None:
        for name, side in zip(("without", "with"), sides, strict=True):
            interactive.append(_row(name, side))
        p99s = [percentile(side.ttfts_s, 99) for side in sides]
        ratios["interactive p99 time to the first token, with a batch / without"] = Ratio(
            p99s[1] / p99s[0], ceiling=MOST_WAIT
        )
        failed = sum(len(side.failures) for side in sides)
        ratios["interactive requests that failed"] = Ratio(float(failed), ceiling=0.0)
    first = interactive or batches
    length = "p99 ms" if interactive else "seconds"
    label = "batch" if interactive else "servers"
    machine = describe(len(os.sched_getaffinity(0)))
    return Report("batches", machine, first, ratios, {}, ((label,), length), more)


def _deaths(verdicts: Sequence[BatchVerdict]) -> list[dict[str, Any]]:
    return [
        {
            "servers": verdict.num_servers,
            "victim": death.fault.victim,
            "lines done": death.num_done,
            "ready again s": death.back_s,
            "proof": death.fault.proof,
        }
        for verdict in verdicts
        for death in verdict.deaths
    ]


def _batches(verdicts: Sequence[BatchVerdict]) -> list[dict[str, Any]]:
    return [
        {
            "servers": verdict.num_servers,
            "lines": verdict.num_lines,
            "deaths": len(verdict.deaths),
            "computed": verdict.num_computed,
            "wrong": len(verdict.wrongs),
            "seconds": verdict.elapsed_s,
        }
        for verdict in verdicts
    ]


def _row(name: str, side: Side) -> dict[str, Any]:
    return {
        "batch": name,
        "requests": len(side.ttfts_s),
        "p50 ms": 1e3 * median(side.ttfts_s),
        "p90 ms": 1e3 * percentile(side.ttfts_s, 90),
        "p99 ms": 1e3 * percentile(side.ttfts_s, 99),
        "max ms": 1e3 * max(side.ttfts_s),
        "longest gap p99 ms": 1e3 * percentile(side.gaps_s, 99),
        "lines/s": side.num_lines / side.elapsed_s,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.batches",
        description="A batch under the death of every process, and interactive requests beside it.",
        epilog="Options after -- go to `triolet serve`, for example: -- path/to/model",
    )
    parser.add_argument("--lines", type=int, default=500, help="of the batch that survives (500)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each of its answers (96)")
    parser.add_argument("--servers", type=int, nargs="*", default=[1, 2], help="fleets (1 2)")
    parser.add_argument("--turns", type=int, default=8, help="of each side (8); 0 for none")
    parser.add_argument("--requests", type=int, default=100, help="interactive ones a turn (100)")
    parser.add_argument("--rate", type=float, default=8.0, help="of them a second (8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("serve", nargs="*", metavar="SERVE-OPTION", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
