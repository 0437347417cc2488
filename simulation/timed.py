"""The timed engine: real pool, ledger and prefix cache, on a device with steps of a given duration.

Tests and benchmarks use it instead of `worker.entry.LocalEngine`. Steps are computed unless tokens
are given, and can be held before they start. Loads torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

from triolet.config import EngineConfig
from triolet.units import MILLISECONDS
from worker.local_engine import LocalEngine

from .modelled import paced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.batch import Sampled, StepRow
    from engine.load import Engine
    from engine.pace import Pace
    from worker.local_engine import Cores

    from .modelled import StepCost

    Tokens = Callable[[Sequence[StepRow]], list[Sampled | None]]

FED_AHEAD_S: Final = 5 * MILLISECONDS
"""A step requested this soon after the previous one starts at the end of that one, as on a device
that gets its next step while it computes. The host's time in between, which depends on other users,
therefore does not affect the fleet's capacity."""


class Gate(Protocol):
    """Controls steps before they reach the device."""

    def pass_step(self, num_rows: int) -> None:
        """Let a step pass, hold it, or raise instead."""
        ...

    def check_device(self) -> None:
        """Raise if the device accepts no more work."""
        ...


class TimedEngine(LocalEngine):
    """An engine with steps of a given duration.

    Args:
      loaded: the model.
      cores: see LocalEngine.
      cost: minimum duration of a step; None for the time of computing.
      tokens: returns tokens for rows, which are then not computed; vectors always are. None
        computes everything.
      gate: gate before the device.
    """

    def __init__(
        self,
        loaded: Engine,
        cores: Cores | None = None,
        *,
        cost: StepCost | None = None,
        tokens: Tokens | None = None,
        gate: Gate | None = None,
    ) -> None:
        super().__init__(loaded, cores)
        self._cost = cost
        self._tokens = tokens
        self._gate = gate
        self._busy_until = 0.0

    @property
    def pace(self) -> Pace:
        """The measured pace, or one derived from the cost if nothing is computed."""
        real = super().pace
        if self._cost is None or self._tokens is None:
            return real
        config = EngineConfig(
            target_step_s=real.target_s,
            max_num_batched_tokens=real.most_tokens,
            prompt_chunk_tokens=real.chunk_tokens,
        )
        return paced(self._cost, config)

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Return a step's results at its due time."""
        if self._gate is not None:
            self._gate.pass_step(len(rows))
        if self._cost is not None:
            now = time.monotonic()
            began_at = self._busy_until if now - self._busy_until < FED_AHEAD_S else now
            self._busy_until = began_at + self._cost.of(rows)
        sampled = self._compute(rows)
        time.sleep(max(0.0, self._busy_until - time.monotonic()))
        return sampled

    def check_device(self) -> None:
        """Wait for the device, and raise if it is lost."""
        if self._gate is not None:
            self._gate.check_device()
        super().check_device()

    def _compute(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        if self._tokens is None:
            return super().step(rows)
        pooled = [row for row in rows if row.pool is not None]
        if pooled:
            super().step(pooled)
        return self._tokens(rows)
