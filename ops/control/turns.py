"""Prevents starvation of loads that wait for memory. No I/O, no clock.

Without turns, smaller loads could take the memory that a large one needs again and again. A load
that has waited for `turn_after_s` gets a turn: other loads wait for it, and idle models are evicted
for it one by one. A turn ends after `turn_s`, in case a model that is never idle blocks it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .model_states import RESTING
from .operations import WantedState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.config import ControlConfig

    from .models import Model


class OperationTurns:
    """The turns of one fleet's loads.

    Args:
      config: timeouts.

    Attributes:
      first: model that has the turn now, or None.
    """

    def __init__(self, config: ControlConfig) -> None:
        self.first: Model | None = None
        self._config = config
        self._began_at: dict[str, float] = {}

    def choose(self, waiting: Sequence[Model], now: float) -> None:
        """Choose the load that has its turn.

        Args:
          waiting: models with an operation that may begin, oldest operation first.
          now: current time.
        """
        loads = {
            model.waiting.id: model
            for model in waiting
            if model.waiting is not None
            and model.waiting.wanted is WantedState.LOAD
            and model.state in RESTING
        }
        self._began_at = {one: at for one, at in self._began_at.items() if one in loads}
        turns = (one for one, at in self._began_at.items() if now - at < self._config.turn_s)
        first = next(turns, None)
        if first is None:
            after_s = self._config.turn_after_s
            old = (one for one, model in loads.items() if now - model.waits_since >= after_s)
            first = next((one for one in old if one not in self._began_at), None)
            if first is not None:
                self._began_at[first] = now
        self.first = None if first is None else loads[first]
