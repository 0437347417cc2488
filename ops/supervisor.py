"""Keeps the processes of one machine's fleet alive, and ends them in order.

Starts, restarts by the policy, and stops: the server first, which lets its streams finish, then the
workers that those streams needed. Knows nothing of models, addresses or terminals; what happens is
told to a Watcher.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio

from triolet.ids import Role
from triolet.status import ServerReady, WorkerReady

from .child import Child
from .exit_codes import EXIT_FAILED
from .restart_policy import GiveUp, Restart, RestartPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config import SupervisorConfig
    from triolet.status import Report

    from .process_spec import ProcessSpec
    from .restart_policy import Ending, Verdict

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the polite request, and a terminal that was closed: all mean a clean shutdown."""


class Watcher(Protocol):
    """Who is told what happens. Called from the supervisor's tasks; must not block."""

    def started(self, name: str, pid: int) -> None: ...

    def reported(self, name: str, report: Report) -> None: ...

    def ended(self, name: str, ending: Ending, verdict: Verdict | None) -> None:
        """A process ended; the verdict is None if that was asked for."""
        ...

    def stopping(self) -> None: ...


class Supervisor:
    """A fleet of processes.

    Args:
      specs: what to run; names are unique.
      config: delays and deadlines.
      server_exit_s: how long a server may take to drain and leave after SIGTERM.
      watcher: who is told.
      on_log: called with a process's name and each line on its stderr; None lets those lines go to
        the supervisor's own stderr.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        config: SupervisorConfig,
        server_exit_s: float,
        watcher: Watcher,
        on_log: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self._specs = specs
        self._config = config
        self._server_exit_s = server_exit_s
        self._watcher = watcher
        self._on_log = on_log
        self._children: dict[str, Child] = {}
        self._not_yet_ready = {spec.name for spec in specs}
        self._all_ready = trio.Event()
        self._stop = trio.Event()
        self._failure: GiveUp | None = None

    async def run(self) -> GiveUp | None:
        """Run the fleet until `stop` has been called and every process is gone.

        Returns:
          Why it had to end, if not because that was asked for.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_in_order)
            for spec in self._specs:
                nursery.start_soon(self._keep_alive, spec)
        return self._failure

    async def wait_all_ready(self) -> None:
        """Wait until every process has been ready once."""
        await self._all_ready.wait()

    def stop(self) -> None:
        """Begin the shutdown in order; called again, kill what still runs."""
        if self._stop.is_set():
            self._signal_all(signal.SIGKILL)
            return
        self._watcher.stopping()
        self._stop.set()

    def fail(self, reason: GiveUp) -> None:
        """Begin the shutdown because of this; the first reason is the one that counts."""
        if self._failure is None and not self._stop.is_set():
            self._failure = reason
            self.stop()

    async def _keep_alive(self, spec: ProcessSpec) -> None:
        policy = RestartPolicy(spec.name, self._config)
        while not self._stop.is_set():
            try:
                ending = await self._run_once(spec, policy)
            except OSError as error:
                self.fail(GiveUp(f"cannot start {spec.argv[0]}: {error}", EXIT_FAILED))
                return
            if self._stop.is_set():
                self._watcher.ended(spec.name, ending, None)
                return
            verdict = policy.ended(trio.current_time(), ending)
            self._watcher.ended(spec.name, ending, verdict)
            match verdict:
                case GiveUp():
                    self.fail(verdict)
                case Restart(delay_s):
                    with trio.move_on_after(delay_s):
                        await self._stop.wait()

    async def _run_once(self, spec: ProcessSpec, policy: RestartPolicy) -> Ending:
        def take_report(report: Report) -> None:
            if isinstance(report, WorkerReady | ServerReady):
                policy.became_ready(trio.current_time())
                self._not_yet_ready.discard(spec.name)
                if not self._not_yet_ready:
                    self._all_ready.set()
            self._watcher.reported(spec.name, report)

        take_log = None if self._on_log is None else partial(self._on_log, spec.name)
        child = Child(spec, self._config, take_report, take_log)
        self._children[spec.name] = child
        self._watcher.started(spec.name, child.pid)
        try:
            return await child.run()
        finally:
            del self._children[spec.name]

    async def _end_in_order(self) -> None:
        await self._stop.wait()
        # While the server drains, its streams still need the workers.
        for roles, grace_s in (
            ((Role.SERVER,), self._server_exit_s),
            ((Role.PREFILL, Role.DECODE), self._config.worker_exit_s),
        ):
            names = {spec.name for spec in self._specs if spec.role in roles}
            leaving = [child for name, child in self._children.items() if name in names]
            for child in leaving:
                child.signal(signal.SIGTERM)
            with trio.move_on_after(grace_s):
                for child in leaving:
                    await child.wait_ended()
            for child in leaving:
                child.signal(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for child in self._children.values():
            child.signal(number)


async def stop_on_signals(
    supervisor: Supervisor, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Turn signals into `stop`, for as long as it runs; a second signal kills at once."""
    with trio.open_signal_receiver(*END_SIGNALS) as signals:
        task_status.started()
        async for _ in signals:
            supervisor.stop()
