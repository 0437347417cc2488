"""Runs the fault matrix (`python -m tests.faults`): every fault in every phase, against real
processes.

Prints one line per cell and a table at the end, and writes the figures to build/faults/. Exit code
1 if a cell failed or a time bound was exceeded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

import trio
from rich.console import Console

from .fleet import running_fleet
from .matrix import Bound, Cell, cells
from .report import broken_bounds, json_of, lines_of, markdown_of, summary_of, table_of
from .run_cell import CellResult, References, run_cell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .fleet import Fleet

ROOT = Path(__file__).parents[2]
TRIES = 3
"""Attempts per cell if its fault came too late or in another phase: on a busy machine an answer may
end, or a worker fall silent, before the injector acts."""
TABLE_WIDTH = 120
"""Applies even if the output is not a terminal."""


class Run:
    """One run over some cells, on one or several fleets.

    Attributes:
      results: results of finished cells.
    """

    def __init__(self, logs: Path, num_fleets: int, console: Console) -> None:
        self.results: list[CellResult] = []
        self._logs = logs
        self._num_fleets = num_fleets
        self._console = console
        self._references = References()
        self._number = 0

    async def run(self, timed: Sequence[Cell], others: Sequence[Cell]) -> None:
        """Run the cells with tight time bounds first and alone, then the rest on all fleets."""
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(running_fleet(self._logs / "fleet-0"))
            await self._drain(first, list(reversed(timed)))
            todo = list(reversed(others))
            fleets = [first]
            for index in range(1, self._num_fleets if todo else 1):
                fleets.append(
                    await stack.enter_async_context(running_fleet(self._logs / f"fleet-{index}"))
                )
            async with trio.open_nursery() as nursery:
                for fleet in fleets:
                    nursery.start_soon(self._drain, fleet, todo)

    async def _drain(self, fleet: Fleet, todo: list[Cell]) -> None:
        while todo:
            cell = todo.pop()
            for _ in range(TRIES):
                self._number += 1
                result = await run_cell(fleet, cell, self._references, self._number)
                if not result.was_missed:
                    break
                why = "; ".join(result.complaints)
                self._console.print(f"missed {cell.name}: {why}", soft_wrap=True, markup=False)
            self.results.append(result)
            verdict = "ok" if not result.complaints else "FAILED"
            times = " ".join(f"{value * 1000:.0f}" for value in sorted(result.free_s))
            self._console.print(
                f"{verdict:6} {cell.name}  ({result.took_s:.1f} s; free after ms: {times or '-'})",
                soft_wrap=True,
                markup=False,
            )
            for complaint in result.complaints:
                self._console.print(f"       {complaint}", soft_wrap=True, markup=False)
            if result.state:
                state = indent(result.state, " " * 9)
                self._console.print(state, soft_wrap=True, markup=False)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--only", default="", help="run only cells with a `PHASE: fault` that matches this"
    )
    parser.add_argument("--cancels", type=int, default=5, help="runs of each cancel cell (5)")
    parser.add_argument("--runs", type=int, default=1, help="runs of every other cell (1)")
    parser.add_argument("--fleets", type=int, default=2, help="concurrent fleets (2)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "faults")
    parser.add_argument("--list", action="store_true", help="list the cells and exit")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the matrix and return the exit code."""
    options = parse(arguments)
    console = Console(highlight=False, width=TABLE_WIDTH)
    chosen = [cell for cell in cells() if re.search(options.only, cell.name)]
    if options.list:
        for cell in chosen:
            console.print(f"{cell.name}  -> {cell.outcome.value}", markup=False)
        return 0
    timed = [cell for cell in chosen if cell.bound is Bound.CANCEL]
    others = [cell for cell in chosen if cell.bound is not Bound.CANCEL]
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out, options.fleets, console)
    began = time.monotonic()
    trio.run(run.run, timed * options.cancels, others * options.runs)
    lines = lines_of(run.results)
    broken = broken_bounds(lines)
    took_s = time.monotonic() - began
    report = json_of(lines, broken, took_s)
    (options.out / "faults.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (options.out / "faults.md").write_text(markdown_of(lines), encoding="utf-8")
    console.print(table_of(lines))
    console.print(summary_of(lines))
    for promise in broken:
        console.print(f"not kept: {promise}", markup=False)
    failed = sum(bool(line.complaints) for line in lines)
    console.print(f"{len(lines)} cells, {failed} failed, {took_s:.0f} s")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
