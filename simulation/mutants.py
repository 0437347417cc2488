"""`python -m simulation.mutants`: remove guards, alone and together; each loss must be noticed.

Redundant guards, which replace one another, are removed together. Exit code 0 if every mutant was
caught within its number of seeds, 1 if one survived.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from .campaign import keep_quiet
from .guards import without
from .scenario import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence


class Mutant(NamedTuple):
    """A product without some of its guards.

    Attributes:
      removed: names of the removed guards.
      within: number of seeds within which it must be caught.
    """

    removed: tuple[str, ...]
    within: int

    def __str__(self) -> str:
        return " + ".join(self.removed)


MUTANTS: Final = (
    Mutant(("digest",), 30),
    Mutant(("positions",), 10),
    Mutant(("lease expiry",), 60),
    Mutant(("live lease",), 100),
    Mutant(("running step",), 30),
    Mutant(("gaps",), 100),
    Mutant(("tombstones",), 100),
    Mutant(("stalled receivers",), 60),
    Mutant(("word of the unknown",), 200),
    Mutant(("reference counts",), 30),
    Mutant(("tokens of a hit",), 30),
    Mutant(("finished KV",), 30),
    Mutant(("right guesses",), 30),
    Mutant(("living processes",), 60),
    Mutant(("bound zones",), 10),
    Mutant(("half of a pool",), 60),
    Mutant(("zone breakers",), 200),
    Mutant(("zone shares",), 200),
    Mutant(("roster changes",), 60),
    Mutant(("restricted candidates",), 200),
    Mutant(("epochs", "tombstones"), 100),
    Mutant(("epochs", "greetings", "broken links"), 200),
    Mutant(("epochs", "self-fence"), 250),
    Mutant(("tombstones", "renewal by name"), 200),
    Mutant(("END", "renewal by name"), 30),
    Mutant(("self-fence", "lease expiry"), 60),
)


class MutantVerdict(NamedTuple):
    """Result for one mutant.

    Attributes:
      mutant: the mutant.
      seed: first seed that caught it; None if none did.
      violation: the violation found.
      seconds: time taken.
    """

    mutant: Mutant
    seed: int | None
    violation: str
    seconds: float


def hunt(mutant: Mutant) -> MutantVerdict:
    """Run seeds from 0 until one catches the mutant."""
    began_at = time.monotonic()
    with without(*mutant.removed):
        for seed in range(mutant.within):
            report = simulate(seed)
            if report.violations:
                elapsed_s = time.monotonic() - began_at
                return MutantVerdict(mutant, seed, report.violations[0], elapsed_s)
    return MutantVerdict(mutant, None, "", time.monotonic() - began_at)


def main(arguments: Sequence[str] | None = None) -> int:
    """Hunt every mutant; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation.mutants", description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, initializer=keep_quiet) as pool:
        verdicts = pool.map(hunt, MUTANTS, chunksize=1)
    table = Table("removed", "caught by seed", "of at most", "seconds", "by")
    for verdict in verdicts:
        caught = "SURVIVED" if verdict.seed is None else str(verdict.seed)
        within = str(verdict.mutant.within)
        table.add_row(
            str(verdict.mutant), caught, within, f"{verdict.seconds:.1f}", verdict.violation
        )
    console.print(table)
    num_survivors = sum(verdict.seed is None for verdict in verdicts)
    console.print(f"{len(verdicts)} mutants, {num_survivors} survived")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
