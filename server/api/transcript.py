"""What has been said of one answer, frame by frame, so that it can be said again from any place.

Pure: knows positions and bytes; no generation, no client, no time. Its beginning may be forgotten,
then what is left keeps its positions.
"""

from __future__ import annotations

from collections import deque
from itertools import islice


class Transcript:
    """Numbered frames.

    Attributes:
      first: position of the oldest frame that is still here.
      num_bytes: of the frames that are here.
      is_over: nothing follows.
    """

    def __init__(self) -> None:
        self.first = 0
        self.num_bytes = 0
        self.is_over = False
        self._frames: deque[bytes] = deque()
        self._said_bytes = 0
        self._starts: deque[int] = deque()

    @property
    def end(self) -> int:
        """The position of the next frame."""
        return self.first + len(self._frames)

    def add(self, frame: bytes) -> None:
        """Say something."""
        assert not self.is_over, "nothing follows the end"
        self._starts.append(self._said_bytes)
        self._frames.append(frame)
        self._said_bytes += len(frame)
        self.num_bytes += len(frame)

    def since(self, position: int) -> list[bytes]:
        """Return the frames from a position on, which is here or the end."""
        assert self.first <= position <= self.end, "forgotten, or not said yet"
        return list(islice(self._frames, position - self.first, None))

    def bytes_since(self, position: int) -> int:
        """Return how many bytes there are from a position on."""
        if position >= self.end:
            return 0
        return self._said_bytes - self._starts[max(position, self.first) - self.first]

    def forget(self, until: int, max_bytes: int) -> None:
        """Forget the oldest frames before a position, until no more than so many bytes are left."""
        while self.num_bytes > max_bytes and self.first < min(until, self.end):
            self.num_bytes -= len(self._frames.popleft())
            self._starts.popleft()
            self.first += 1
