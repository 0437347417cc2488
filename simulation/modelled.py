"""A device of modelled time: a step takes what a formula says, whatever the machine is doing.

A fleet on a small shared machine has no capacity that two measurements agree on. So only what
computes is replaced: nothing is computed, and a step lasts
`step + rows x row + prompt tokens x token`.
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
    """What a step takes.

    Attributes:
      step_s: at least.
      row_s: each decode row, on top.
      token_s: each prompt token, on top.
    """

    step_s: float
    row_s: float
    token_s: float

    def of(self, rows: Sequence[StepRow]) -> float:
        """Return seconds for a step."""
        prompt_tokens = sum(len(row.token_ids) for row in rows if not row.is_decode)
        num_decoding = sum(row.is_decode for row in rows)
        return self.step_s + num_decoding * self.row_s + prompt_tokens * self.token_s


COST: Final = StepCost(10 * MILLISECONDS, 2 * MILLISECONDS, 1 * MILLISECONDS)
"""Some 800 prompt tokens a second, so that ten times what the fleet can do is still little to its
server and to clients on the same two cores, and a request takes so long that the machine's own
hiccups are small beside it."""


def paced(cost: StepCost, config: EngineConfig) -> Pace:
    """Return what a worker finds out about such a device when it times a step at its start."""
    return pace_of(MEASURED_TOKENS, cost.step_s + MEASURED_TOKENS * cost.token_s, config)


class ModelledDevice:
    """Takes virtual time for each step.

    Args:
      cost: of a step.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a step after the time that it takes."""
        await trio.sleep(self._cost.of(_rows(args)))
        return fn(*args)


def _rows(args: tuple[object, ...]) -> Sequence[StepRow]:
    """Return what a device is asked for; nothing but steps is run on this one."""
    (rows,) = args
    return cast("Sequence[StepRow]", rows)
