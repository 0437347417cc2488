"""One place in the fleet: its processes run one after another, or two at a time while a successor
takes over. The order in which places restart is in rolling.py.
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
    """The fleet or the model is being stopped; there is no process."""


class RestartFailed(TrioletError):
    """A restart that was asked for did not come about; what ran before still runs where it can."""


@dataclass(eq=False, slots=True)
class Life:
    """One process, from its start to its end.

    Attributes:
      child: the process.
      spec: that it was started with.
      ready: set once it serves.
      over: set once it is gone; `ending` says how.
      ending: None while it runs.
      is_leaving: it was asked to; its end is no death.
      began_at: when it was started.
      gpu_memory: that it held when it became ready; None where it computes on a CPU.
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
        """Send the signal by which this kind of process leaves in order."""
        self.is_leaving = True
        self.child.signal(number)


class Slot:
    """A place in the fleet.

    Args:
      spec: what runs there.
      starter: starts the processes.
      config: delays and bounds.
      watcher: who is told.
      on_log: called with each line on stderr; None lets it go where the supervisor's goes.
      nursery: for the lives.

    Attributes:
      spec: of the next start.
      lives: those that run, oldest first.
      current: the one that counts; None before the first.
      ended_s: how long its processes ran that have ended [s].
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
        """How long its processes have run together [s]."""
        now = trio.current_time()
        running = sum(now - life.began_at for life in self.lives if life.ending is None)
        return self.ended_s + running

    def end(self) -> None:
        """Start nothing any more. What runs is not signalled."""
        self._stop.set()
        for scope in self._starts:
            scope.cancel()
        self._tell()

    async def keep(self) -> GiveUp | None:
        """Start the process, and again whenever it ends, until `end` was called.

        Returns:
          Why it cannot be kept alive, if so.
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
                    # `replace` has put a successor there meanwhile.
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
        """Start with these settings from now on, also what was doubted."""
        self.spec, self._is_doubtful = spec, False
        self._tell()

    async def restart(self, within_s: float, *, is_doubtful: bool = False) -> None:
        """Let the present life leave, and wait until the next one is ready.

        Args:
          within_s: after which it is killed.
          is_doubtful: where the next life ends before it is ready nothing is started again until
            `use` says with which settings.

        Raises:
          RestartFailed: the fleet or the model ends, or what was doubted has failed.
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
        """Start a successor beside the present life, and let that one leave once the other serves.

        Args:
          within_s: after which the old life is killed.

        Raises:
          RestartFailed: the successor did not become ready; the present life goes on.
        """
        new = await self.start_one()
        old, self.current = self.current, new
        self._policy.became_ready(trio.current_time())
        if old is not None:
            await see_out([old], within_s, SUCCESSOR_SIGNAL)

    async def start_one(self) -> Life:
        """Start a life that nothing starts again, and wait until it is ready.

        Raises:
          RestartFailed: it ended before, or the fleet ends.
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
        """Wait until a life is ready.

        Raises:
          StartAbandoned: the fleet or the model ends before.
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
            # It began meanwhile, and the shutdown does not know this process.
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
    """Look whether a process that starts has not ended.

    Raises:
      RestartFailed: it has.
    """
    if life.ending is not None:
        raise RestartFailed(
            f"a new {life.spec.name} {life.ending} before it was ready"
            + (f": {life.ending.failure}" if life.ending.failure else "; see its log lines")
        )


async def see_out(lives: Sequence[Life], grace_s: float, number: int = signal.SIGTERM) -> None:
    """Ask processes to leave; kill those that are still there after a time.

    Args:
      lives: the processes.
      grace_s: how long each may take.
      number: of the signal.
    """
    for life in lives:
        # One that leaves already would take a second request for "at once".
        if not life.is_leaving:
            life.ask_to_leave(number)
    with trio.move_on_after(grace_s):
        for life in lives:
            await life.over.wait()
    for life in lives:
        life.child.signal(signal.SIGKILL)
    for life in lives:
        await life.over.wait()
