"""The Ray actor that owns one process of a fleet. Runs in the cluster. Ray restarts it, on another
node if its own is gone.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

import ray
import trio

from ..settings.sources import SettingSources
from ..supervisor.serve import command_line
from .actors import ZONE
from .owned_process import OwnedProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from triolet.ids import Role

    from .actors import WorkerState


class RayWorker:
    """The actor of one process. It has no coroutines, or Ray would run it in its own event loop.

    Args:
      name: the process's name in the fleet.
      role: server, prefill or decode.
      settings: settings of the fleet as JSON, without addresses.
      zone: its zone; empty for a fleet without zones. If it runs elsewhere, its label says so.
      command: command that runs `triolet`; empty for the installed one.
      grace_s: time for the process to drain, after which it is killed.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        settings: bytes,
        zone: str,
        command: Sequence[str],
        grace_s: float,
    ) -> None:
        sources = SettingSources()
        sources.add_document(settings, name)
        own = sources.settings()
        labels = ray.get_runtime_context().get_node_labels()
        zone = labels.get(ZONE, "") if zone else ""
        host, command = ray.util.get_node_ip_address(), command or command_line()
        self._process = OwnedProcess(name, role, own, zone, host, command, grace_s)
        self._leave_s = grace_s + own.ray.stop_margin_s
        started: Future[trio.lowlevel.TrioToken] = Future()

        async def run() -> None:
            started.set_result(trio.lowlevel.current_trio_token())
            await self._process.run()

        def live() -> None:
            try:
                trio.run(run)
            except BaseException:  # noqa: BLE001 (Ray restarts an actor, and sees no dead thread)
                traceback.print_exc()
                os._exit(1)

        # The thread that starts the process must live as long as this actor: Linux sends the
        # parent-death signal when the starting thread ends.
        self._thread = threading.Thread(target=live, daemon=True)
        self._thread.start()
        self._token = started.result()
        signal.signal(signal.SIGTERM, self._end)

    def state(self) -> WorkerState:
        """Return the state of the process."""
        return self._process.state

    def leave(self) -> None:
        """Let the process drain and exit, then end this actor for good."""
        self._drain()
        ray.actor.exit_actor()

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Let the process drain at SIGTERM, then exit; Ray starts the actor elsewhere."""
        self._drain()
        os._exit(128 + number)

    def _drain(self) -> None:
        with suppress(trio.RunFinishedError):  # the process has left
            self._token.run_sync_soon(self._process.leaving.set)
        self._thread.join(self._leave_s)
