"""Tests of selected cells of the fault matrix; `make proofs` runs all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
from rich.console import Console

from tests.faults.__main__ import Run
from tests.faults.matrix import Cell, cells
from tests.faults.phases import QUESTIONS, Phase

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

CELLS = (
    "QUEUED: client leaves: WS close",
    "RESERVED: server SIGKILL",
    "PREFILLING: poisoned device",
    "TRANSFER: one chunk corrupt",
    "TRANSFER: every frame twice",
    "TRANSFER: partition prefill-decode",
    "DECODING: exception in a step",
    "DECODING: decode SIGSTOP long",
    "DECODING: decode SIGKILL",
    "PAUSED: client leaves: FIN",
    "FINISHING: client leaves: RST",
)
"""Covers every phase, every way of closing a client, crashes of a server and a worker, a stop, a
cut link, corrupt and repeated frames, an exception in a step and a poisoned device. Frames are
repeated in a phase with few of them: with the frames of 700 tokens, the proxy (a Python program)
would pause on a busy machine for longer than a worker may be silent."""

DECODING_TOKENS = 80
"""Tokens of an answer; the whole matrix uses 700. The fault after the first tokens always comes
before the end, because a worker is at most a window of 16 tokens ahead of this process."""


def shortened(cell: Cell) -> Cell:
    """Return a cell in which the answer ends shortly after the fault."""
    if cell.question != QUESTIONS[Phase.DECODING]:
        return cell
    return replace(cell, question=replace(cell.question, max_tokens=DECODING_TOKENS))


def test_faults_cost_what_they_may_and_nothing_else(tmp_path: Path) -> None:
    by_name = {cell.name: cell for cell in cells()}
    run = Run(tmp_path, num_fleets=1, console=Console(width=120, highlight=False))
    trio.run(run.run, [], [shortened(by_name[name]) for name in CELLS])
    assert {result.cell.name for result in run.results} == set(CELLS)
    assert {result.cell.phase for result in run.results} == set(Phase)
    assert {r.cell.name: r.complaints for r in run.results if r.complaints} == {}
