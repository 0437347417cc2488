"""Where log lines go: stderr, without waiting for a reader that stands still or for a full disk.

Whoever logs is often the event loop, and a full pipe would hold it up: no heartbeat would leave,
and a fleet would fall apart because nobody reads its log. Several processes share one pipe, so that
asking for room first is not enough: another may take it. Writing itself must not wait, and so goes
through a description of our own, because the flag that says so is shared with whoever else has the
inherited one. Knows descriptors and patience; a line is text.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import time
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S: Final = 0.05
"""For a reader that is only busy."""
PATIENCE_EVERY_S: Final = 10.0
"""At most so often: a reader that is always a little slow costs half a percent of the time."""
PIECE_BYTES: Final = 4096
"""A pipe takes as much wholly or not at all, so that the lines of several processes stay whole."""


class LogStream:
    """A text stream that drops what cannot be written now, and says how much that was.

    Args:
      out: has a file descriptor.
    """

    def __init__(self, out: IO[str]) -> None:
        self._write, descriptor = _never_waiting(out.fileno())
        self._ready = select.poll()
        self._ready.register(descriptor, select.POLLOUT)
        self._num_dropped = 0
        self._is_cut = False
        self._patient_at = 0.0

    def write(self, line: str) -> int:
        """Write one line with its end, or drop it."""
        text = line
        if self._num_dropped:
            gap = {"event": "log_lines_dropped", "level": "warning", "lines": self._num_dropped}
            text = f"{json.dumps(gap)}\n{line}"
        if self._is_cut:
            text = f"\n{text}"  # begins at its beginning
        data = text.encode("utf-8", "backslashreplace")
        for start in range(0, len(data), PIECE_BYTES):
            if not self._put(data[start : start + PIECE_BYTES]):
                self._is_cut = self._is_cut or start > 0
                self._num_dropped += 1
                break
        else:
            self._num_dropped, self._is_cut = 0, False
        return len(line)

    def flush(self) -> None:
        """Nothing is held back."""

    def _put(self, piece: bytes) -> bool:
        try:
            if not self._is_ready():
                return False
            num_written = self._write(piece)
        except OSError:
            return False  # full, as disk or as pipe, or its reader is gone: nobody can be told
        if num_written < len(piece):
            self._is_cut = True
            return False
        return True

    def _is_ready(self) -> bool:
        if self._ready.poll(0):
            return True
        now = time.monotonic()
        if now < self._patient_at:
            return False
        self._patient_at = now + PATIENCE_EVERY_S
        return bool(self._ready.poll(PATIENCE_S * 1000))


def _never_waiting(descriptor: int) -> tuple[Callable[[bytes], int], int]:
    """Return a way to write there that does not wait, and the descriptor it uses."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        out = socket.socket(fileno=os.dup(descriptor))
        return lambda data: out.send(data, socket.MSG_DONTWAIT), out.fileno()
    own = -1
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        # Not on Linux, or not our own: then asking for room first has to do.
        with contextlib.suppress(OSError):
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
    if own < 0:
        own = os.dup(descriptor)
    return lambda data: os.write(own, data), own
