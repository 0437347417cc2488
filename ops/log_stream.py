"""Where log lines go: stderr, without waiting for a reader that stands still.

Whoever logs is often the event loop, and a full pipe would hold it up: no heartbeat would leave,
and a fleet would fall apart because nobody reads its log. Knows pipes and patience; a line is text.
"""

from __future__ import annotations

import json
import select
from typing import IO, Final

PATIENCE_S: Final = 0.05
"""For a reader that is only busy. Once a line was dropped, the next ones do not wait at all."""
PIECE_CHARS: Final = 1024
"""At most 4096 bytes of UTF-8, which a pipe that is ready takes without waiting."""


class LogStream:
    """A text stream that drops what cannot be written now, and says how much that was.

    Args:
      out: has a file descriptor.
    """

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._ready = select.poll()
        self._ready.register(out.fileno(), select.POLLOUT)
        self._num_dropped = 0

    def write(self, line: str) -> int:
        """Write one line with its end, or drop it."""
        if not self._is_ready():
            self._num_dropped += 1
            return len(line)
        if self._num_dropped:
            gap = {"event": "log_lines_dropped", "level": "warning", "lines": self._num_dropped}
            self._num_dropped = 0
            line = json.dumps(gap) + "\n" + line
        for start in range(0, len(line), PIECE_CHARS):
            if start and not self._is_ready():
                self._out.write("\n")  # the next line begins at its beginning
                self._num_dropped += 1
                break
            self._out.write(line[start : start + PIECE_CHARS])
            self._out.flush()
        return len(line)

    def flush(self) -> None:
        """Nothing is held back."""

    def _is_ready(self) -> bool:
        patience_s = 0.0 if self._num_dropped else PATIENCE_S
        return bool(self._ready.poll(patience_s * 1000))
