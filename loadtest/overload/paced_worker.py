"""`python -m loadtest.overload.paced_worker STEP ROW TOKEN ROLE …`: a worker that computes nothing.

The very `triolet ROLE …`, whose steps last what a formula says (modelled.py; seconds) while the
device thread sleeps. Everything else is real: the process, its sockets, frames, leases, blocks, and
the KV that travels, which is noise. The product itself has no such switch.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, ClassVar, Final

from ops.cli import main
from triolet.config import EngineConfig
from triolet.units import MILLISECONDS
from worker.local_engine import LocalEngine

from .modelled import StepCost, paced, sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import LayerWatch, Sampled, StepRow
    from engine.pace import Pace

FED_AHEAD_S: Final = 5 * MILLISECONDS
"""A step that is asked for so soon after the one before begins where that ended, as on a device
that is told its next step while it computes: what the host takes in between, which depends on who
else uses it, does not change what the fleet can do."""


class PacedEngine(LocalEngine):
    """The real engine's pool and ledger; its steps take time and compute nothing."""

    cost: ClassVar[StepCost]
    _busy_until = 0.0

    def step(
        self, rows: Sequence[StepRow], watch: LayerWatch | None = None
    ) -> list[Sampled | None]:
        """Sleep as long as the step takes."""
        del watch
        now = time.monotonic()
        began_at = self._busy_until if now - self._busy_until < FED_AHEAD_S else now
        self._busy_until = began_at + self.cost.of(rows)
        time.sleep(max(0.0, self._busy_until - time.monotonic()))
        return sampled(rows)

    @property
    def pace(self) -> Pace:
        """What the formula makes of the step that the real engine was timed with."""
        real = super().pace
        config = EngineConfig(
            target_step_s=real.target_s,
            max_num_batched_tokens=real.most_tokens,
            prompt_chunk_tokens=real.chunk_tokens,
        )
        return paced(self.cost, config)


def run() -> int:
    """Put the engine in and become the worker."""
    # Imported here by its entry point, which looks the engine up by this name.
    from worker import entry

    PacedEngine.cost = StepCost(*map(float, sys.argv[1:4]))
    setattr(entry, "LocalEngine", PacedEngine)  # noqa: B010
    return main(sys.argv[4:])


if __name__ == "__main__":
    sys.exit(run())
