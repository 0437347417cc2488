"""Runs the processes of a fleet for the fault matrix, and waits with deadlines for log lines and
conditions."""

from __future__ import annotations

import inspect
import json
import os
import resource
import signal
import subprocess
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio

from tests import forked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence


T = TypeVar("T")

MAX_ENTRIES = 500_000
"""Maximum entries between two calls of `clear`; far more than the busiest cell writes."""


class Journal(Generic[T]):
    """Entries in order of arrival.

    Attributes:
      entries: entries since the last `clear`.
    """

    def __init__(self) -> None:
        self.entries: list[T] = []
        self._changed = trio.Event()

    def add(self, entry: T) -> None:
        """Add an entry and wake waiting tasks."""
        assert len(self.entries) < MAX_ENTRIES, "clear() between cells"
        self.entries.append(entry)
        self._changed.set()
        self._changed = trio.Event()

    def clear(self) -> None:
        """Remove all entries."""
        self.entries.clear()

    async def wait_for(self, wants: Callable[[T], bool]) -> T:
        """Return the first matching entry, waiting for it if necessary; use inside `within`."""
        looked_at = 0
        while True:
            looked_at = min(looked_at, len(self.entries))
            for entry in self.entries[looked_at:]:
                if wants(entry):
                    return entry
            looked_at = len(self.entries)
            await self._changed.wait()


class OverdueError(Exception):
    """Something did not happen in time.

    Args:
      what: what was waited for.
      waited_s: the time waited.
      state: the fleet's state at the timeout, before anything was undone; empty if unknown.
    """

    def __init__(self, what: str, waited_s: float, state: str = "") -> None:
        super().__init__(f"waited {waited_s:g} s for {what}")
        self.state = state


@asynccontextmanager
async def within(
    limit_s: float, what: str, state: Callable[[], Awaitable[str]]
) -> AsyncIterator[None]:
    """Limit the time of the body. The state is read before the body is cancelled, which lifts rules
    and closes clients.

    Raises:
      OverdueError: the body took too long; in a group, like everything that the body raises.
    """

    async def expire() -> None:
        await trio.sleep(limit_s)
        raise OverdueError(what, limit_s, await state())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expire)
        yield
        nursery.cancel_scope.cancel()


POLL_S = 0.005


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until the condition holds; use inside `within`."""
    while True:
        held = condition()
        if inspect.isawaitable(held):
            held = await held
        if held:
            return
        await trio.sleep(POLL_S)


READ_BYTES = 65536
EXIT_DEADLINE_S = 60.0
POLITE_S = 2.0
"""Time at the end until a process that was asked to exit is killed."""
STATE_DEADLINE_S = 30.0
LAST_CHARACTERS = 1500


class FaultNotInjectedError(Exception):
    """The injector could not prove that its fault happened."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One structured log line.

    Attributes:
      at: Unix time by this machine's clock; 0.0 if missing.
      event: name of the event.
      fields: all other fields.
    """

    at: float
    event: str
    fields: Mapping[str, Any]


class RoleProcess:
    """One role of the fleet, across restarts.

    Args:
      name: name in the fleet.
      command: program and arguments.
      environment: environment variables.
      log_path: receives the output of all its processes.

    Attributes:
      lines: its log lines.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        self.name = name
        self.lines: Journal[LogLine] = Journal()
        self._command = command
        self._environment = environment
        self._log_path = log_path
        self._process: forked.Popen | None = None
        self._was_killed = False

    @property
    def pid(self) -> int:
        """Pid of the current or the last process."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def fell_by_itself(self) -> bool:
        """Whether it exited by itself."""
        has_ended = self._process is not None and self._process.poll() is not None
        return has_ended and not self._was_killed

    @property
    def state(self) -> str:
        """The kernel's state letter (R, S, D, T or Z), or a word if there is no process."""
        if self._process is None:
            return "never started"
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "gone"
        return text.rpartition(")")[2].split()[0]

    def last_words(self) -> str:
        """Return its exit code and the end of its output."""
        assert self._process is not None
        text = self._log_path.read_text(encoding="utf-8", errors="replace")
        return f"exit code {self._process.returncode}; {text[-LAST_CHARACTERS:]}"

    def start(self, nursery: trio.Nursery) -> None:
        """Start a process; the nursery reads its output."""
        assert not self.is_running, f"{self.name} is already running"
        self._was_killed = False
        # Fork from the main thread: a role that dies with its parent follows the forking thread,
        # and Trio's other threads come and go.
        self._process = forked.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(self._environment),
        )
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            # A separate descriptor, because Popen closes its files when it is freed.
            nursery.start_soon(self._read, trio.lowlevel.FdStream(os.dup(pipe.fileno())))
            pipe.close()

    async def wait_line(self, wants: Callable[[LogLine], bool]) -> LogLine:
        """Return the first matching log line since the journal was cleared."""
        return await self.lines.wait_for(wants)

    async def wait_ended(self, wanted: int | None = None) -> int:
        """Return the exit code once the process has exited.

        Args:
          wanted: the exit code that the fault should cause.

        Raises:
          FaultNotInjectedError: it exited with another code.
          OverdueError: it does not exit.
        """
        if wanted is not None:
            self._was_killed = True
        with trio.move_on_after(EXIT_DEADLINE_S) as waiting:
            code = await self._wait()
        if waiting.cancelled_caught:
            raise OverdueError(f"{self.name} to end", EXIT_DEADLINE_S)
        if wanted not in (None, code):
            raise FaultNotInjectedError(f"{self.name} exited with {code}, not with {wanted}")
        return code

    async def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self._was_killed = True
        os.kill(self.pid, signal.SIGKILL)
        is_killed = await self.wait_ended() == -signal.SIGKILL
        if not is_killed or await trio.Path(f"/proc/{self.pid}").exists():
            raise FaultNotInjectedError(f"{self.name} was not killed")

    async def terminate(self) -> None:
        """Stop it for good: politely, then by SIGKILL."""
        if self._process is None:
            return
        if not self.is_running:
            await self._wait()
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(signal.SIGINT)
        with trio.move_on_after(POLITE_S):
            await self._wait()
        if self.is_running:
            self._process.send_signal(signal.SIGKILL)
            await self._wait()

    async def freeze(self) -> None:
        """Send SIGSTOP, and wait until the kernel reports it stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        await self._wait_state("T")

    async def thaw(self) -> None:
        """Send SIGCONT, and wait until the kernel reports it running. Idempotent."""
        os.kill(self.pid, signal.SIGCONT)
        await self._wait_state("RSD")

    def order(self, line: str) -> None:
        """Write a line to the process's stdin, which a worker's gate reads. A dead process ignores
        it."""
        if not self.is_running:
            return
        assert self._process is not None
        assert self._process.stdin is not None
        # A line is far smaller than a pipe, so this cannot block.
        os.write(self._process.stdin.fileno(), line.encode() + b"\n")

    def next_file(self) -> int:
        """Return the descriptor of the next file; as a limit it prevents opening any."""
        taken = {int(name) for name in os.listdir(f"/proc/{self.pid}/fd")}
        return min(set(range(len(taken) + 1)) - taken)

    def limit_files(self, soft: int) -> int:
        """Set the limit of file descriptors; return the previous one."""
        before, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (soft, hard))
        return before

    async def _wait(self) -> int:
        assert self._process is not None
        if self._process.poll() is None:
            ended = os.dup(self._process.ended)  # another task's `poll` closes the original
            try:
                await trio.lowlevel.wait_readable(ended)
            finally:
                os.close(ended)
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    async def _wait_state(self, allowed: str) -> None:
        with trio.move_on_after(STATE_DEADLINE_S):
            await until(lambda: self.state in allowed)
            return
        raise FaultNotInjectedError(f"{self.name} is in state {self.state}, not in {allowed}")

    async def _read(self, stream: trio.abc.ReceiveStream) -> None:
        rest = b""
        with self._log_path.open("ab") as copy:
            async with stream:
                while data := await stream.receive_some(READ_BYTES):
                    copy.write(data)
                    copy.flush()
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._note(line)

    def _note(self, line: bytes) -> None:
        if not line.startswith(b"{"):
            return  # a traceback or library output; the log file has it
        fields = json.loads(line)
        stamp = fields.get("timestamp")
        at = 0.0 if stamp is None else datetime.fromisoformat(stamp).timestamp()
        self.lines.add(LogLine(at, str(fields.get("event")), fields))
