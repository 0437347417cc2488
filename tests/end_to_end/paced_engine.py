"""The real engine on a device that takes its time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from worker.local_engine import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Sampled, StepRow

STEP_S: Final = 0.05
"""Twenty tokens a second of each stream, of which the demo model computes a tenth of the time."""


class PacedEngine(LocalEngine):
    """An engine that returns what each step computed when the step is due."""

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Compute one step; wait as for a kernel of the device."""
        due = time.monotonic() + STEP_S
        sampled = super().step(rows)
        time.sleep(max(0.0, due - time.monotonic()))
        return sampled
