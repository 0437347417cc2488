"""A slot of the fleet, such as `decode-0`: starts its process, restarts it when it ends, and
replaces it by a successor. rolling.py has the order in which slots restart.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from triolet.errors import TrioletError
from triolet.status import SUCCESSOR_SIGNAL, ControlReady, ServerReady, WorkerReady

from ..exit_codes import EXIT_FAILED
from .child import Child
from .restart_policy import GiveUp, RestartPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config import SupervisorConfig
    from triolet.status import GpuMemory, Report

    from .process_spec import ProcessSpec
    from .restart_policy import Ending
    from .starter import Starter
    from .view import Watcher


class StartAbandoned(TrioletError):
    """The fleet or the model is being stopped, so no process was started."""


class RestartFailed(TrioletError):
    """A requested change failed; the message says why. Old processes keep running if possible."""


@dataclass(eq=False, slots=True)
class Life:
    """One process of a slot, from its start to its end.

    Attributes:
      child: the process.
      spec: the specification that it was started with.
      ready: set when it serves.
      over: set when it has ended.
      ending: how it ended; None while it runs.
      is_leaving: whether it was asked to exit, so that its end is not a crash.
      began_at: when it was started.
      gpu_memory: GPU memory that it held when it became ready; None on a CPU.
    """

    child: Child
    spec: ProcessSpec
    ready: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)
    ending: Ending | None = None
    is_leaving: bool = False
    began_at: float = field(default_factory=trio.current_time)
    gpu_memory: GpuMemory | None = None

    def ask_to_leave(self, number: int) -> None:
        """Ask the process to exit cleanly by sending a signal."""
        self.is_leaving = True
        self.child.signal(number)


class Slot:
    """A slot of the fleet, with one process at a time, or two during a replacement.

    Args:
      spec: specification of the process.
      starter: starts processes.
      config: delays and limits.
      watcher: is notified of starts, reports and ends.
      on_log: called with each line on stderr; None if processes inherit the supervisor's stderr.
      nursery: runs the processes.

    Attributes:
      spec: specification for the next start.
      lives: running processes, oldest first.
      current: the process that is kept alive; None before the first start.
      ended_s: total run time of ended processes [s].
    """

    def __init__(
        self,
        spec: ProcessSpec,
        starter: Starter,
        config: SupervisorConfig,
        watcher: Watcher,
        on_log: Callable[[str, bytes], None] | None,
        nursery: trio.Nursery,
    ) -> None:
        self.spec = spec
        self.lives: list[Life] = []
        self.current: Life | None = None
        self.ended_s = 0.0
        self._starter = starter
        self._config = config
        self._watcher = watcher
        self._on_log = on_log
        self._stop = trio.Event()
        self._nursery = nursery
        self._policy = RestartPolicy(spec.name, config)
        self._news = trio.Event()
        self._starts: set[trio.CancelScope] = set()
        self._is_doubtful = False

    @property
    def worker_seconds(self) -> float:
        """Total run time of its processes [s]."""
        now = trio.current_time()
        running = sum(now - life.began_at for life in self.lives if life.ending is None)
        return self.ended_s + running

    def end(self) -> None:
        """Stop starting processes. Running processes get no signal."""
        self._stop.set()
        for scope in self._starts:
            scope.cancel()
        self._tell()

    async def keep(self) -> GiveUp | None:
        """Start the process and restart it whenever it ends, until `end` is called.

        Returns:
          Why it cannot be kept alive, or None.
        """
        life: Life | None = None
        while not self._stop.is_set():
            if self.current is life:
                try:
                    new = await self._begin()
                except OSError as error:
                    return GiveUp(f"cannot start {self.spec.argv[0]}: {error}", EXIT_FAILED)
                except StartAbandoned:
                    return None
                if self.current is life:
                    self.current = new
                else:
                    # `replace` has started a successor in the meantime.
                    new.ask_to_leave(signal.SIGKILL)
            life = self.current
            assert life is not None
            await life.over.wait()
            if self._stop.is_set() or life.is_leaving or life is not self.current:
                continue
            assert life.ending is not None
            if self._is_doubtful and not life.ready.is_set():
                self._watcher.ended(self.spec.name, life.ending, None)
                while self._is_doubtful and not self._stop.is_set():
                    await self._news.wait()
                continue
            verdict = self._policy.ended(trio.current_time(), life.ending)
            self._watcher.ended(self.spec.name, life.ending, verdict)
            if isinstance(verdict, GiveUp):
                return verdict
            with trio.move_on_after(verdict.delay_s):
                await self._stop.wait()
        return None

    def use(self, spec: ProcessSpec) -> None:
        """Use this specification from the next start on, and end a doubtful restart."""
        self.spec, self._is_doubtful = spec, False
        self._tell()

    async def restart(self, within_s: float, *, is_doubtful: bool = False) -> None:
        """Let the current process exit, and wait until the next one is ready.

        Args:
          within_s: time after which the current process is killed.
          is_doubtful: if the new process ends before it is ready, do not restart it until `use`
            sets a specification.

        Raises:
          RestartFailed: the fleet or the model is being stopped, or a doubtful restart failed.
        """
        old, self._is_doubtful = self.current, is_doubtful
        if old is not None:
            await see_out([old], within_s)
        while self.current in (None, old) or not self.current.ready.is_set():
            if self._stop.is_set():
                raise RestartFailed(f"{self.spec.name} is being stopped")
            if is_doubtful and self.current is not old and self.current is not None:
                _require_alive(self.current)
            await self._news.wait()
        self._is_doubtful = False

    async def replace(self, within_s: float) -> None:
        """Start a successor beside the current process, and let the latter exit once the successor
        serves.

        Args:
          within_s: time after which the old process is killed.

        Raises:
          RestartFailed: the successor did not become ready; the current process keeps running.
        """
        new = await self.start_one()
        old, self.current = self.current, new
        self._policy.became_ready(trio.current_time())
        if old is not None:
            await see_out([old], within_s, SUCCESSOR_SIGNAL)

    async def start_one(self) -> Life:
        """Start a process that is not restarted, and wait until it is ready.

        Raises:
          RestartFailed: it ended before, or the fleet is being stopped.
        """
        name = self.spec.name
        if self._stop.is_set():
            raise RestartFailed(f"{name} is being stopped")
        try:
            life = await self._begin()
        except OSError as error:
            raise RestartFailed(f"cannot start {self.spec.argv[0]}: {error}") from error
        except StartAbandoned as error:
            raise RestartFailed(str(error)) from error
        while not life.ready.is_set():
            _require_alive(life)
            await self._news.wait()
        return life

    async def wait_ready(self) -> None:
        """Wait until the current process is ready.

        Raises:
          StartAbandoned: the fleet or the model is being stopped.
        """
        while self.current is None or not self.current.ready.is_set():
            if self._stop.is_set():
                raise StartAbandoned(f"{self.spec.name} is being stopped")
            await self._news.wait()

    async def _begin(self) -> Life:
        spec, name = self.spec, self.spec.name

        def take_report(report: Report) -> None:
            if isinstance(report, WorkerReady):
                life.gpu_memory = report.gpu_memory
            if isinstance(report, WorkerReady | ServerReady | ControlReady):
                life.ready.set()
                if life is self.current:
                    self._policy.became_ready(trio.current_time())
                self._tell()
            self._watcher.reported(name, report)

        take_log = None if self._on_log is None else partial(self._on_log, name)
        process = None
        with trio.CancelScope() as scope:
            self._starts.add(scope)
            try:
                process = await self._starter.start(spec, reads_log=take_log is not None)
            finally:
                self._starts.remove(scope)
        if process is None:
            raise StartAbandoned(f"{name} is being stopped")
        life = Life(Child(process, spec.settings, self._config, take_report, take_log), spec)
        self.lives.append(life)
        self._watcher.started(name, life.child.pid)
        self._nursery.start_soon(self._see_through, life)
        if self._stop.is_set():
            # The shutdown began during the start and does not know this process.
            life.ask_to_leave(signal.SIGKILL)
        self._tell()
        return life

    async def _see_through(self, life: Life) -> None:
        life.ending = await life.child.run()
        self.ended_s += trio.current_time() - life.began_at
        self._starter.ended(life.child.pid)
        self.lives.remove(life)
        if self._stop.is_set() or life.is_leaving or life is not self.current:
            self._watcher.ended(self.spec.name, life.ending, None)
        life.over.set()
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()


def _require_alive(life: Life) -> None:
    """Check that a starting process has not ended.

    Raises:
      RestartFailed: it has ended.
    """
    if life.ending is not None:
        raise RestartFailed(
            f"a new {life.spec.name} {life.ending} before it was ready"
            + (f": {life.ending.failure}" if life.ending.failure else "; see its log lines")
        )


async def see_out(lives: Sequence[Life], grace_s: float, number: int = signal.SIGTERM) -> None:
    """Ask processes to exit, and kill those that still run after `grace_s`.

    Args:
      lives: the processes.
      grace_s: time for all of them to exit.
      number: signal to send.
    """
    for life in lives:
        # Do not signal twice: a process takes a second signal for "exit now".
        if not life.is_leaving:
            life.ask_to_leave(number)
    with trio.move_on_after(grace_s):
        for life in lives:
            await life.over.wait()
    for life in lives:
        life.child.signal(signal.SIGKILL)
    for life in lives:
        await life.over.wait()
