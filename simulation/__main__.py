"""`python -m simulation`: run seeds to find one that breaks the protocol, or replay one.

Exit code 0 if nothing was violated and every kind of fault occurred, else 1.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from .campaign import MAX_SHOWN, Campaign, keep_quiet, run_campaign
from .faults import Fault
from .scenario import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scenario import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    options = _parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    if options.replay is not None:
        return _replay(options.replay, console, with_story=options.story)
    seeds = range(options.first, options.first + options.seeds)
    with console.status("") as status:
        campaign = run_campaign(
            seeds,
            options.processes,
            lambda so_far: status.update(
                f"{so_far.num_seeds} of {options.seeds} seeds, {len(so_far.failed)} failed"
            ),
        )
    _show(campaign, console)
    return 0 if campaign.is_good else 1


def replay_command(seed: int) -> str:
    """Return the command that replays a seed."""
    return f"python -m simulation --replay {seed}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=300, help="seeds to run (default: %(default)s)"
    )
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--processes", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run only this seed")
    parser.add_argument(
        "--story", action="store_true", help="with --replay: print every frame and fault"
    )
    return parser.parse_args(arguments)


def _replay(seed: int, console: Console, *, with_story: bool) -> int:
    keep_quiet()
    report = simulate(seed, keeps_lines=with_story)
    for line in report.lines:
        console.print(line, markup=False)
    faults = ", ".join(f"{f.value} {n}" for f, n in report.tally.happened.items() if n)
    console.print(f"seed {seed}: trace {report.trace}, {report.virtual_s:.1f} virtual seconds")
    console.print(f"  endings: {_counts(report.endings)}", markup=False)
    console.print(f"  attempts restarted: {_counts(report.tally.causes)}", markup=False)
    console.print(f"  faults: {faults or 'none'}", markup=False)
    console.print(f"  guesses: {report.accepted} of {report.proposed} were correct")
    console.print(f"  KV bytes received: {_counts(report.shipped)}", markup=False)
    console.print(f"  found by prefix caches: {_counts(report.found)}", markup=False)
    for violation in report.violations:
        console.print(f"  VIOLATION {violation}", markup=False)
    return 1 if report.violations else 0


def _show(campaign: Campaign, console: Console) -> None:
    table = Table("fault", "seeds that had it", "happened")
    for column in table.columns[1:]:
        column.justify = "right"
    for fault in Fault:
        asked, happened = campaign.tally.asked[fault], campaign.tally.happened[fault]
        table.add_row(fault.value, f"{asked}", f"{happened}")
    console.print(table)
    console.print(f"endings: {_counts(campaign.endings)}", markup=False)
    console.print(f"attempts restarted: {_counts(campaign.tally.causes)}", markup=False)
    console.print(f"prompts computed by: {_counts(campaign.tally.routes)}", markup=False)
    rate = campaign.num_seeds / max(campaign.elapsed_s, 1e-9)
    console.print(
        f"{campaign.num_seeds} seeds in {campaign.elapsed_s:.1f} s: {rate:.1f} seeds/s, "
        f"{campaign.virtual_s:.0f} virtual seconds, {campaign.tally.happened.total()} faults, "
        f"{len(campaign.failed)} seeds with a violation"
    )
    for fault in campaign.missing:
        console.print(f"ERROR: {fault.value} was enabled but never occurred")
    for report in campaign.failed[:MAX_SHOWN]:
        _show_failure(report, console)


def _show_failure(report: Report, console: Console) -> None:
    console.print(f"seed {report.seed} (trace {report.trace[:8]}):", markup=False)
    for violation in report.violations[:3]:
        console.print(f"  {violation}", markup=False)
    console.print(f"  {replay_command(report.seed)}", markup=False)


def _counts(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name!s} {number}" for name, number in ordered) or "none"


if __name__ == "__main__":
    sys.exit(main())
