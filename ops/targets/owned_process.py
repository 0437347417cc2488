"""`OwnedProcess`: one server or worker that a Ray actor starts on its machine, restarts and drains.

The process reads a pipe from its owner and exits when the pipe closes, so no death of the owner or
the node leaves an orphan.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from triolet.ids import Role
from triolet.status import ServerReady, WorkerReady

from ..settings.form import STDIN, document, of_role
from ..supervisor.process_spec import ProcessSpec
from ..supervisor.restart_policy import GiveUp
from ..supervisor.slot import Slot, see_out
from .actors import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.status import Report

    from ..settings.form import Settings
    from ..supervisor.restart_policy import Ending, Verdict
    from ..supervisor.starter import Starter


class OwnedProcess:
    """Runs one process and restarts it until `leaving` is set. A `Watcher` of its slot.

    Args:
      name: the process's name in the fleet.
      role: server, prefill or decode.
      settings: its settings, without addresses.
      zone: zone of this machine.
      host: its address.
      command: command that runs `triolet`.
      starter: starts it.

    Attributes:
      state: the process's state.
      leaving: set it to drain the process; `run` then returns.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        settings: Settings,
        zone: str,
        host: str,
        command: Sequence[str],
        starter: Starter,
    ) -> None:
        self._name, self._role, self._settings = name, role, settings
        self._zone, self._host = zone, host
        self._command, self._starter = command, starter
        self._parent = os.getppid()
        self.state = WorkerState(zone=zone)
        self.leaving = trio.Event()

    async def run(self) -> None:
        """Keep the process alive."""
        config = self._settings
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_with_parent)
            while not self.leaving.is_set():
                try:
                    spec = self._spec()
                except OSError as error:
                    trouble = f"no port of {self._host} can be opened: {error}; correct the address"
                    await self._pause(GiveUp(f"{trouble} of `ray start --node-ip-address`", 1))
                    continue
                await self._keep(Slot(spec, self._starter, config.supervisor, self, None, nursery))
            nursery.cancel_scope.cancel()

    async def _keep(self, slot: Slot) -> None:
        """Run a slot until its process keeps failing, or `leaving` is set."""
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                await self.leaving.wait()
                slot.end()
                await see_out(tuple(slot.lives), grace_of(self._settings, self._role))

            nursery.start_soon(leave)
            if (verdict := await slot.keep()) is not None:
                await self._pause(verdict)
            nursery.cancel_scope.cancel()

    async def _pause(self, reason: GiveUp) -> None:
        """Record why the process is not running, and wait until the next attempt."""
        self.failed(self._name, reason)
        with trio.move_on_after(self._settings.ray.retry_s):
            await self.leaving.wait()

    async def _end_with_parent(self) -> None:
        while os.getppid() == self._parent:  # noqa: ASYNC110 (there is no event)
            await trio.sleep(self._settings.ray.parent_poll_s)
        os._exit(1)

    def _spec(self) -> ProcessSpec:
        """Return the process, with ports that are free now."""
        arguments = (self._role.value, "--config", STDIN)
        argv = (*self._command, *arguments)
        own = placed(self._settings, self._role, self._name, self._zone, self._host)
        own = replace(own, process=replace(own.process, supervisor_pid=os.getpid()))
        text = document(own, self._role)
        return ProcessSpec(self._name, self._role, argv, settings=text, arguments=arguments)

    def started(self, name: str, pid: int) -> None:
        """See `Watcher`."""
        self.state = self.state._replace(pid=pid, is_stuck=False)

    def reported(self, name: str, report: Report) -> None:
        """See `Watcher`."""
        if isinstance(report, WorkerReady | ServerReady):
            url = report.url if isinstance(report, ServerReady) else ""
            self.state = self.state._replace(is_ready=True, url=url, trouble="")

    def ended(self, name: str, ending: Ending, verdict: Verdict | None) -> None:
        """See `Watcher`."""
        trouble = f"it {ending}" if verdict is not None else ""
        self.state = WorkerState(zone=self._zone, trouble=trouble)

    def failed(self, model: str, reason: GiveUp) -> None:
        """See `Watcher`."""
        self.state = self.state._replace(
            trouble=reason.message.removeprefix(f"{self._name}: "), is_stuck=True
        )

    def stopping(self) -> None:
        """See `Watcher`."""


def placed(settings: Settings, role: Role, name: str, zone: str, host: str) -> Settings:
    """Return the settings of a process on this machine.

    Args:
      settings: its settings without addresses and zone.
      role: its role.
      name: its name in the fleet.
      zone: zone of this machine; empty to keep the labels of the settings.
      host: address of this machine.
    """
    if role is Role.SERVER:
        return of_role(settings, role, zone=zone or settings.server.zone)
    own = settings.worker(role)
    control, kv = (f"tcp://{host}:{port}" for port in free_ports(host, 2))
    return of_role(
        settings,
        role,
        name=name,
        control_address=control,
        kv_address=kv if role is Role.DECODE else None,
        engine=replace(own.engine, threads=own.engine.threads or max(1, int(settings.ray.cpus))),
        labels=replace(own.labels, zone=zone or own.labels.zone),
    )


def grace_of(settings: Settings, role: Role) -> float:
    """Return the time for a process to drain, after which it is killed [s]."""
    if role is Role.SERVER:
        return settings.server.drain_timeout_s + settings.server.exit_grace_s
    return settings.worker(role).drain_timeout_s


def free_ports(host: str, count: int) -> list[int]:
    """Return ports of an address that no socket is bound to."""
    bound = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in bound]
    for one in bound:
        one.close()
    return ports
