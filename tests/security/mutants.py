"""Mutation tests of security guards (`python -m tests.security.mutants`): removes each guard and
expects a test of its row to fail.

Works on copies of the tree, so that processes started by tests are mutants too. Exit code 0 if
every mutant was killed, 1 if one survived, 2 if its tests could not run.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from .guards import MUTANTS, Mutant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = Path(__file__).parents[2]
ROOMS: Final = ("decode", "docs", "engine", "loadtest", "ops", "prefill", "server", "simulation",
                "store", "tests", "tools", "transport", "triolet", "worker")  # fmt: skip
FILES: Final = ("pyproject.toml", "README.md", "CHANGES.md")
TIMEOUT_S: Final = 150.0
"""Timeout of one mutant. Tests that hang without their guard end by their own timeouts, after a
minute."""
PASSED, FAILED = 0, 1
"""pytest's exit codes; any other means that nothing was tested."""


class Verdict(NamedTuple):
    """The result for one mutant.

    Attributes:
      mutant: the mutant.
      outcome: `died`, `hung`, `SURVIVED` or `BROKEN`.
      seconds: duration.
      output: the tests' output.
    """

    mutant: Mutant
    outcome: str
    seconds: float
    output: str


def copy_tree(into: Path) -> None:
    """Copy what tests need."""
    skipped = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for room in ROOMS:
        shutil.copytree(ROOT / room, into / room, ignore=skipped)
    for file in FILES:
        shutil.copy(ROOT / file, into / file)


@contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Remove the guard for the duration of the context.

    Raises:
      LookupError: the guard is missing, or occurs more than once.
    """
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.guard) != 1:
        raise LookupError(f"{mutant}: occurs {text.count(mutant.guard)} times")
    path.write_text(text.replace(mutant.guard, mutant.instead), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def run_test(tree: Path, test: str) -> tuple[int | None, str]:
    """Run one test in a copy; return pytest's exit code, None if it hung, and the output."""
    # Without bytecode: if both were written within a second, it would be taken for the mutant's.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [*command, f"tests/{test}"],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, ""
    return process.returncode, output


def judge(tree: Path, mutant: Mutant) -> Verdict:
    """Run a mutant's test."""
    began_at = time.monotonic()
    with mutated(tree, mutant):
        code, output = run_test(tree, mutant.test)
    outcome = {None: "hung", PASSED: "SURVIVED", FAILED: "died"}.get(code, "BROKEN")
    return Verdict(mutant, outcome, time.monotonic() - began_at, output)


def hunt(mutants: Sequence[Mutant], num_processes: int, console: Console) -> list[Verdict]:
    """Judge mutants in parallel, each process with its own copy."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def judge_in_turn(mutant: Mutant) -> Verdict:
        tree = trees.get()
        try:
            verdict = judge(tree, mutant)
        finally:
            trees.put(tree)
        console.print(f"{verdict.outcome} {verdict.seconds:.0f} s {mutant}", markup=False)
        return verdict

    with TemporaryDirectory() as directory, ThreadPoolExecutor(num_processes) as threads:
        for number in range(num_processes):
            tree = Path(directory) / str(number)
            copy_tree(tree)
            trees.put(tree)
        return list(threads.map(judge_in_turn, mutants))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.security.mutants", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="attacks such as A1 (default: all)")
    parser.add_argument(
        "--processes", type=int, default=2, help="parallel processes (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not options.rows or mutant.attack in options.rows]
    verdicts = hunt(chosen, options.processes, Console(stderr=True, highlight=False))
    console = Console(highlight=False, soft_wrap=True)
    table = Table("row", "guard taken away", "test", "outcome", "seconds")
    for verdict in verdicts:
        mutant, guard = verdict.mutant, " ".join(verdict.mutant.guard.split())
        shown = f"{mutant.file}: {guard[:60]}".replace("[", r"\[")
        table.add_row(mutant.attack, shown, mutant.test, verdict.outcome, f"{verdict.seconds:.0f}")
    console.print(table)
    outcomes = [verdict.outcome for verdict in verdicts]
    for verdict in verdicts:
        if verdict.outcome == "BROKEN":
            console.print(verdict.output[-2000:], markup=False)
    console.print(f"{len(verdicts)} mutants, {outcomes.count('SURVIVED')} survived")
    return 2 if "BROKEN" in outcomes else int("SURVIVED" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
