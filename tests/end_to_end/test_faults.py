"""Some cells of the fault matrix; `make faults` runs all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from rich.console import Console

from tests.faults.__main__ import Run
from tests.faults.matrix import cells

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CELLS = (
    "QUEUED: client leaves: RST",
    "RESERVED: client leaves: FIN",
    "PREFILLING: client leaves: WS close",
    "TRANSFER: client leaves: RST",
    "PAUSED: client leaves: FIN",
    "FINISHING: client leaves: RST",
    "TRANSFER: one chunk corrupt",
    "DECODING: every frame twice",
    "DECODING: exception in a step",
    "DECODING: poisoned device",
    "PREFILLING: poisoned device",
    "TRANSFER: partition prefill-decode",
    "DECODING: decode SIGSTOP long",
    "DECODING: decode SIGKILL",
    "PREFILLING: prefill SIGKILL",
    "RESERVED: server SIGKILL",
)


def test_faults_cost_what_they_may_and_nothing_else(tmp_path: Path) -> None:
    by_name = {cell.name: cell for cell in cells()}
    run = Run(tmp_path, num_fleets=1, console=Console(width=120, highlight=False))
    trio.run(run.run, [], [by_name[name] for name in CELLS])
    assert {result.cell.name for result in run.results} == set(CELLS)
    assert {r.cell.name: r.complaints for r in run.results if r.complaints} == {}
