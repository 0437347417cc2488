"""Log lines to stderr that never wait for a slow reader or a full disk.

The event loop writes most log lines, and a full pipe would stop it and its heartbeats. Several
processes share the pipe, so a check for room does not help: another process may take the room.
Writes are therefore non-blocking, through an open file description of this process alone, because
O_NONBLOCK is shared by all that inherit a description.
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

    Every line that a reader finds is whole. What a full disk has taken of a line is cut off again;
    where that cannot be done, as on a socket, its rest is written before anything else.

    Args:
      out: has a file descriptor.
    """

    def __init__(self, out: IO[str]) -> None:
        self._write, self._descriptor = _never_waiting(out.fileno())
        self._is_file = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        self._ready = select.poll()
        self._ready.register(self._descriptor, select.POLLOUT)
        self._num_dropped = 0
        self._rest = b""  # of a line that is written in part
        self._patient_at = 0.0

    def write(self, line: str) -> int:
        """Write one line with its end, or drop it."""
        self._rest = self._left_of(self._rest)
        if self._rest:
            self._num_dropped += 1
            return len(line)
        text = line
        if self._num_dropped:
            gap = {"event": "log_lines_dropped", "level": "warning", "lines": self._num_dropped}
            text = f"{json.dumps(gap)}\n{line}"
        data = text.encode("utf-8", "backslashreplace")
        left = self._left_of(data)
        if len(left) == len(data):
            self._num_dropped += 1
        else:
            self._num_dropped, self._rest = 0, left
        return len(line)

    def flush(self) -> None:
        """Nothing is held back."""

    def _left_of(self, data: bytes) -> bytes:
        """Write what can be written now; return the rest, which is all of it if none was."""
        # A file takes a line by one write, between which and the next other processes have theirs.
        most = len(data) if self._is_file else PIECE_BYTES
        while data:
            piece = data[:most]
            try:
                num_written = self._write(piece) if self._is_ready() else 0
            except OSError:
                break  # full, as disk or as pipe, or its reader is gone: there is no place to tell
            if num_written < len(piece):
                return data if self._take_back(num_written) else data[num_written:]
            data = data[num_written:]
        return data

    def _take_back(self, num_bytes: int) -> bool:
        """Cut the last bytes off a file, if nothing has been written behind them."""
        if not (self._is_file and num_bytes):
            return False
        try:
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            if os.fstat(self._descriptor).st_size != end:
                return False
            os.ftruncate(self._descriptor, end - num_bytes)
            os.lseek(self._descriptor, end - num_bytes, os.SEEK_SET)
        except OSError:  # a file that can only grow, say
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
