"""Writes log lines to stderr without blocking on a slow reader or a full disk; drops lines instead.

The event loop writes most log lines, and a full pipe would block it and its heartbeats. Several
processes share the pipe, so checking for space first does not help. Writes are therefore
non-blocking, through a new open file description: O_NONBLOCK applies to all processes that share a
description.
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
"""Wait for a reader that is briefly busy."""
PATIENCE_EVERY_S: Final = 10.0
"""Minimum interval of such waits: a reader that is always slow costs half a percent of the time."""
PIECE_BYTES: Final = 4096
"""PIPE_BUF: writes up to this size are atomic, so that lines of several processes do not mix."""


class LogStream:
    """A text stream that drops lines that cannot be written now, and logs how many.

    Readers see only complete lines. If a full disk accepts part of a line, that part is truncated
    again; if that is impossible, as on a socket, the rest is written before the next line.

    Args:
      out: stream with a file descriptor.
    """

    def __init__(self, out: IO[str]) -> None:
        self._write, self._descriptor = _never_waiting(out.fileno())
        self._is_file = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        self._ready = select.poll()
        self._ready.register(self._descriptor, select.POLLOUT)
        self._num_dropped = 0
        self._rest = b""  # the rest of a partly written line
        self._patient_at = 0.0

    def write(self, line: str) -> int:
        """Write one line, including its newline, or drop it."""
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
        """Do nothing: the stream has no buffer."""

    def _left_of(self, data: bytes) -> bytes:
        """Write as much as possible now and return the rest."""
        # Write a line to a file at once: other processes may write between two calls.
        most = len(data) if self._is_file else PIECE_BYTES
        while data:
            piece = data[:most]
            try:
                num_written = self._write(piece) if self._is_ready() else 0
            except OSError:
                break  # the disk or pipe is full, or the reader is gone: there is nowhere to report
            if num_written < len(piece):
                return data if self._take_back(num_written) else data[num_written:]
            data = data[num_written:]
        return data

    def _take_back(self, num_bytes: int) -> bool:
        """Truncate the last bytes of a file, if nothing was written after them."""
        if not (self._is_file and num_bytes):
            return False
        try:
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            if os.fstat(self._descriptor).st_size != end:
                return False
            os.ftruncate(self._descriptor, end - num_bytes)
            os.lseek(self._descriptor, end - num_bytes, os.SEEK_SET)
        except OSError:  # for example an append-only file
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
    """Return a non-blocking write function for a descriptor, and the descriptor that it uses."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        out = socket.socket(fileno=os.dup(descriptor))
        return lambda data: out.send(data, socket.MSG_DONTWAIT), out.fileno()
    own = -1
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        # Fails on other systems, or for another user's terminal: then rely on poll before a write.
        with contextlib.suppress(OSError):
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
    if own < 0:
        own = os.dup(descriptor)
    return lambda data: os.write(own, data), own
