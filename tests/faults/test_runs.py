"""Tests of repeated runs in the fault matrix: an inconclusive cell is run again, and a failed one
is not."""

from __future__ import annotations

from contextlib import asynccontextmanager
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.faults import __main__ as program
from tests.faults.matrix import cells
from tests.faults.run_cell import CellResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.faults.matrix import Cell

CELL = next(cells())
MISSED = CellResult(CELL, ["the fault did not come"], was_missed=True)
WRONG = CellResult(CELL, ["another token"])
WELL = CellResult(CELL)


@pytest.mark.parametrize(
    ("outcomes", "kept"),
    [
        ([WELL], WELL),
        ([MISSED, WELL], WELL),
        ([MISSED, MISSED, WRONG], WRONG),
        ([WRONG], WRONG),
        ([MISSED] * program.TRIES, MISSED),
    ],
    ids=["well", "missed once", "missed twice", "wrong", "always missed"],
)
async def test_only_what_showed_nothing_is_tried_again(
    outcomes: list[CellResult], kept: CellResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(outcomes)

    async def run_cell(fleet: object, cell: Cell, references: object, number: int) -> CellResult:
        assert number == 1 + len(outcomes) - len(left)
        return left.pop(0)

    @asynccontextmanager
    async def running_fleet(logs: Path) -> AsyncIterator[object]:
        yield None

    monkeypatch.setattr(program, "run_cell", run_cell)
    monkeypatch.setattr(program, "running_fleet", running_fleet)
    printed = StringIO()
    run = program.Run(tmp_path, num_fleets=1, console=Console(file=printed))
    await run.run([], [CELL])
    assert run.results == [kept]
    assert left == []
    assert printed.getvalue().count("missed") == outcomes.count(MISSED), "each attempt is printed"
