"""Runs one supervised process: writes its settings, reads its reports and log lines, sends signals,
and waits for its end.

The process has its own session, so that Ctrl-C reaches only the supervisor, which then stops the
fleet in order.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import trio

from triolet.status import (
    ControlReady,
    ProcessFailed,
    Progress,
    ServerReady,
    WorkerReady,
    parse_report,
)

from ..logs import never_waiting
from .restart_policy import Ending

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, TextIO

    from triolet.config import SupervisorConfig
    from triolet.status import Report

    from ..log_stream import LogStream
    from .starter import Process


@cache
def stray_lines() -> LogStream | TextIO:
    """Return the stream for stdout lines that are not reports, if no view shows them."""
    return never_waiting(sys.stderr)


class Child:
    """A running process.

    Args:
      process: the started process.
      settings: bytes to write to its standard input.
      config: limits of silence and output.
      on_report: called with each report of the process.
      on_log: called with each line on its stderr; None if it inherits the supervisor's stderr.

    Raises:
      OSError: the program cannot be started.
    """

    def __init__(
        self,
        process: Process,
        settings: bytes,
        config: SupervisorConfig,
        on_report: Callable[[Report], None],
        on_log: Callable[[bytes], None] | None,
    ) -> None:
        self._config = config
        self._process = process
        self._settings = settings
        self._on_report = on_report
        self._on_log = on_log
        self._news = trio.Event()
        self._is_starting = True
        self._was_silent = False
        self._failure: str | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process has ended."""
        self._process.send_signal(number)

    async def run(self) -> Ending:
        """Read output until the process ends and return how it ended. Kills it when cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_lines, self._process.stdout, self._take_output)
                if self._on_log is not None:
                    nursery.start_soon(self._read_lines, self._process.stderr, self._on_log)
                nursery.start_soon(self._expect_news)
                nursery.start_soon(self._write_settings)
                code = await trio.to_thread.run_sync(
                    self._process.wait, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
                )
                self._is_starting = False
                self._news.set()
                nursery.cancel_scope.deadline = trio.current_time() + self._config.output_drain_s
        finally:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
        return Ending(code, self._failure, self._was_silent)

    async def _write_settings(self) -> None:
        """Write the settings. The pipe stays open: its EOF tells the process that the supervisor
        ended. A process that does not read is killed by `_expect_news`."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(trio.BrokenResourceError):
            async with trio.lowlevel.FdStream(os.dup(pipe.fileno())) as stream:
                await stream.send_all(self._settings)

    async def _expect_news(self) -> None:
        """Kill the process if it reports nothing for too long while it starts."""
        while self._is_starting:
            with trio.move_on_after(self._config.start_silence_s) as scope:
                await self._news.wait()
            if scope.cancelled_caught:
                self._was_silent = True
                self.signal(signal.SIGKILL)
                return

    def _take_output(self, line: bytes) -> None:
        what = parse_report(line)
        if what is None:
            # Output of a library. Show it, but not on our stdout, which is for reports.
            if self._on_log is not None:
                self._on_log(line)
            else:
                stray_lines().write(line.decode(errors="backslashreplace") + "\n")
            return
        match what:
            case WorkerReady() | ServerReady() | ControlReady():
                self._is_starting = False
            case ProcessFailed():
                self._failure = what.message
            case Progress():
                pass
        self._news.set()
        self._news = trio.Event()
        self._on_report(what)

    async def _read_lines(self, pipe: IO[bytes] | None, on_line: Callable[[bytes], None]) -> None:
        assert pipe is not None
        longest = self._config.max_line_bytes
        unfinished = b""
        # Duplicate the descriptor: both the stream and `run` close theirs.
        async with trio.lowlevel.FdStream(os.dup(pipe.fileno())) as stream:
            async for data in stream:
                *lines, unfinished = (unfinished + data).split(b"\n")
                for line in lines:
                    on_line(line[:longest])
                unfinished = unfinished[:longest]
        if unfinished:
            on_line(unfinished)
