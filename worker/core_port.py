"""What the shell asks of a core: take frames in, plan steps, say what to send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Sampled, StepRow
    from transport.frames import AnyFrame

    from .outbox import Outbox


class WorkerCore(Protocol):
    """The decisions of one worker. Every call is synchronous and does no I/O."""

    @property
    def outbox(self) -> Outbox:
        """Frames to send after each call."""
        ...

    @property
    def is_drained(self) -> bool:
        """Whether the worker may leave."""
        ...

    def wake(self, now: float) -> None:
        """Called before frames are handed in and at every sweep."""
        ...

    def on_control(self, sender: bytes, frame: AnyFrame, now: float) -> None:
        """Take in a frame of a server."""
        ...

    def on_server_gone(self, sender: bytes, now: float) -> None:
        """Note that a frame did not reach a server."""
        ...

    def plan_step(self, now: float) -> list[StepRow]:
        """Begin the next step; an empty list means that there is nothing to compute."""
        ...

    def complete_step(self, results: Sequence[Sampled | None], now: float) -> None:
        """Take in what the step has computed."""
        ...

    def fail_step(self, message: str, now: float) -> None:
        """Take in that the step raised."""
        ...

    def sweep(self, now: float) -> None:
        """End what is over."""
        ...

    def beat(self) -> None:
        """Tell every server how things stand."""
        ...

    def drain(self, now: float, deadline_s: float) -> None:
        """Take nothing new and end what is left after `deadline_s`."""
        ...

    def say_goodbye(self) -> None:
        """Tell everybody that this worker leaves."""
        ...
