"""`python -m loadtest.rollouts`: simulate rollouts of equal and of worse versions.

Generated traffic goes through the production assignment and the production judge, in virtual time;
in some rollouts also through production servers and workers, which must end alike.
Checks that equal versions are hardly ever rolled back, that none is promoted without the minimum
evidence, and that regressions are found as often and as soon as docs/architecture/judge.md says.
Exit code 0 if so, else 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from simulation.campaign import keep_quiet

from ..harness.progress import announce, progress
from .expectations import EQUAL, EVENTS, FLEETS, UNSEEN, WORSE, Summary, judged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .expectations import Expectation

CHUNK: Final = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign and show it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.rollouts", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the runs of each scenario")
    parser.add_argument("--only", default="", help="scenarios whose names contain this")
    parser.add_argument("--processes", type=int, default=1, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    announce(__doc__)
    console = Console(highlight=False, soft_wrap=True, width=160)
    began_at = time.monotonic()
    wanted = [
        one
        for one in (*EQUAL, *WORSE, *EVENTS, *FLEETS, *UNSEEN)
        if options.only in one.scenario.name
    ]
    with multiprocessing.get_context("spawn").Pool(
        options.processes, initializer=keep_quiet
    ) as pool:
        summaries = [_summary(pool, expected, options.share) for expected in wanted]
    console.print(_table(summaries))
    failures = judged(summaries)
    for failure in failures:
        console.print(f"WRONG: {failure}", markup=False)
    number = sum(len(one.results) for one in summaries)
    console.print(f"{number} rollouts in {time.monotonic() - began_at:.0f} s")
    return 1 if failures else 0


def _summary(pool: multiprocessing.pool.Pool, expected: Expectation, share: float) -> Summary:
    seeds = range(max(1, round(expected.runs * share)))
    results = pool.map(expected.roll_out, seeds, CHUNK)
    summary = Summary(expected, tuple(results))
    progress(f"{expected.scenario.name}: {dict(summary.actions)}")
    return summary


def _table(summaries: Sequence[Summary]) -> Table:
    table = Table(
        "scenario",
        "runs",
        "promoted",
        "rolled back",
        "step back",
        "paused",
        "by",
        "median s",
        "canary requests",
    )
    for one in summaries:
        numbers = (f"{one.actions[end] / len(one.results):.1%}" for end in ENDS)
        reasons = ", ".join(f"{reason} {count}" for reason, count in one.reasons.most_common(4))
        table.add_row(
            one.expected.scenario.name,
            str(len(one.results)),
            *numbers,
            reasons,
            f"{one.median_s:.0f}",
            f"{one.median_requests:.0f}",
        )
    return table


ENDS: Final = ("promoted", "rollback", "step back", "pause")

if __name__ == "__main__":
    sys.exit(main())
