"""What the shell asks of a core: take frames in, plan steps, say what to send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Sampled, StepRow
    from transport.frames import AnyFrame

    from .outbox import Outbox
    from .reception import Reception


class Stepper(Protocol):
    """From one step to the next."""

    @property
    def has_work(self) -> bool:
        """Whether somebody here waits for a step; `plan` finds nothing where nobody does."""
        ...

    def plan(self, now: float) -> list[StepRow]:
        """Begin the next step; an empty list means that there is nothing to compute."""
        ...

    def due_after(self, now: float) -> float | None:
        """Return when there will be something to plan although nothing happens; None if never."""
        ...

    def complete(self, results: Sequence[Sampled | None], now: float) -> None:
        """Take in what the step has computed."""
        ...

    def fail(self, message: str, now: float) -> None:
        """Take in that the step raised."""
        ...


class WorkerCore(Protocol):
    """The decisions of one worker. Every call is synchronous and does no I/O."""

    @property
    def outbox(self) -> Outbox:
        """Frames to send after each call."""
        ...

    @property
    def reception(self) -> Reception[Any]:
        """What servers see."""
        ...

    @property
    def stepper(self) -> Stepper:
        """Plans steps."""
        ...

    def wake(self, now: float) -> None:
        """Called before frames are handed in, and whenever a task of the shell comes round."""
        ...

    def on_control(self, sender: bytes, frame: AnyFrame, now: float) -> None:
        """Take in a frame of a server."""
        ...

    def sweep(self, now: float) -> None:
        """End what is over."""
        ...

    def say_goodbye(self) -> None:
        """Tell everybody that this worker leaves."""
        ...
