"""A fake CUDA stream for tests: it runs its work as late as allowed, when something waits for
it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine.gpu.copy_streams import CopyMark


class LateMark:
    """A point in a LateStream. See CopyMark."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self.is_reached = False

    def reach(self) -> None:
        self.is_reached = True

    def hold_back(self) -> None:
        """Run the stream up to this mark, because the caller's work runs at once."""
        while not self.is_reached:
            self._stream.run_one()


class LateStream:
    """See CopyStream. Runs its work in order, only when a wait requires it."""

    def __init__(self, device: torch.device) -> None:
        del device
        self._queued: deque[Callable[[], object]] = deque()

    def queue(self, work: Callable[[], object]) -> None:
        self._queued.append(work)

    def record(self) -> LateMark:
        mark = LateMark(self)
        self._queued.append(mark.reach)
        return mark

    def wait_for(self, mark: CopyMark) -> None:
        self._queued.append(mark.hold_back)

    def synchronize(self) -> None:
        while self._queued:
            self.run_one()

    def run_one(self) -> None:
        self._queued.popleft()()
