"""Frames on their way to workers, with credit of many streams merged into one frame per worker.

Knows order; sends nothing itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transport.frames import MAX_ROWS, CreditRow, TokenCredit

if TYPE_CHECKING:
    from transport.frames import AnyFrame
    from triolet.ids import AttemptKey

    from .workers import Worker


class Outgoing(NamedTuple):
    """A frame and who it is for."""

    worker: Worker
    frame: AnyFrame


class Outbox:
    """What Requests wants sent."""

    def __init__(self) -> None:
        self._frames: list[Outgoing] = []
        self._credit: dict[Worker, dict[AttemptKey, CreditRow]] = {}

    def send(self, worker: Worker, frame: AnyFrame) -> None:
        """Add a frame, unless there is nobody to take it."""
        if worker.is_connected:
            self._frames.append(Outgoing(worker, frame))

    def allow(self, worker: Worker, key: AttemptKey, allowed: int, received: int) -> None:
        """Add credit; of several amounts for one attempt the last counts."""
        self._credit.setdefault(worker, {})[key] = CreditRow(*key, allowed, received)

    @property
    def has_credit(self) -> bool:
        """Whether credit waits to be sent."""
        return bool(self._credit)

    def drain_frames(self) -> list[Outgoing]:
        """Take everything but credit."""
        frames, self._frames = self._frames, []
        return frames

    def drain_credit(self) -> list[Outgoing]:
        """Take all credit, one frame per worker."""
        frames = []
        for worker, credit in self._credit.items():
            rows = list(credit.values())
            frames += [
                Outgoing(worker, TokenCredit(tuple(rows[at : at + MAX_ROWS])))
                for at in range(0, len(rows), MAX_ROWS)
                if worker.is_connected
            ]
        self._credit = {}
        return frames
