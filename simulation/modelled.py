"""A device with modelled time: each step computes nothing and takes the time of a formula.

A fleet on a small shared machine has no reproducible capacity. With this device a step takes
`step + rows x row + prompt tokens x token` seconds on any machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

import trio

from engine.pace import MEASURED_TOKENS, pace_of
from triolet.units import MILLISECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar, TypeVarTuple

    from engine.batch import StepRow
    from engine.pace import Pace
    from triolet.config import EngineConfig

    T = TypeVar("T")
    Ts = TypeVarTuple("Ts")


class StepCost(NamedTuple):
    """Duration of a step.

    Attributes:
      step_s: fixed part.
      row_s: additional time per decode row.
      token_s: additional time per prompt token.
    """

    step_s: float
    row_s: float
    token_s: float

    def of(self, rows: Sequence[StepRow]) -> float:
        """Return the duration of a step in seconds."""
        prompt_tokens = sum(len(row.token_ids) for row in rows if not row.is_decode)
        num_decoding = sum(row.is_decode for row in rows)
        return self.step_s + num_decoding * self.row_s + prompt_tokens * self.token_s


COST: Final = StepCost(10 * MILLISECONDS, 2 * MILLISECONDS, 1 * MILLISECONDS)
"""About 800 prompt tokens per second: even ten times the fleet's capacity is little work for the
server and the clients on the same two cores, and a request takes long compared with pauses of the
machine."""


def paced(cost: StepCost, config: EngineConfig) -> Pace:
    """Return the pace that a worker would measure with this device at its start."""
    return pace_of(MEASURED_TOKENS, cost.step_s + MEASURED_TOKENS * cost.token_s, config)


class ModelledDevice:
    """A device that takes modelled time for each step.

    Args:
      cost: cost of a step.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a step after its modelled time."""
        await trio.sleep(self._cost.of(_rows(args)))
        return fn(*args)


def _rows(args: tuple[object, ...]) -> Sequence[StepRow]:
    """Return the rows of a step. The device runs no other calls."""
    (rows,) = args
    return cast("Sequence[StepRow]", rows)
