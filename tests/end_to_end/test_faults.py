"""A few cells of the fault matrix, chosen by reason; `make proofs` runs all of them."""

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
"""Every phase; every way of a client to close; the death of a server and of a worker, a stop, a cut
link, a corrupt frame, repeated ones, an exception in a step and a poisoned device. Frames are
repeated in a phase of few: the proxy is a Python program, and with those of 700 tokens it stands
still, on a machine that is busy with other tests, for longer than a worker may be silent."""

DECODING_TOKENS = 80
"""An answer of the whole matrix has 700. No answer is over before the fault comes that follows its
first tokens: a worker is at most a window of 16 ahead of what this process has passed on."""


def shortened(cell: Cell) -> Cell:
    """Return a cell whose answer goes on for a moment after the fault, not for seconds."""
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
