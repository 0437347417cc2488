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
from functools import partial
from typing import TYPE_CHECKING, Final

import ray
import trio
from ray._private.state import actors
from ray.exceptions import RayError

from ..settings.sources import SettingSources
from ..supervisor.serve import command_line
from ..supervisor.starter import Starter, Template, roles_of_templates, templates_of
from .actors import ZONE, is_stand_in, name_of, place_of
from .owned_process import OwnedProcess, grace_of
from .stand_in import StandIn

MODULES: Final = ("transport.registrations",)
"""Further modules of templates: what every process on Ray needs to register or to find members."""

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from triolet.ids import Place

    from .actors import WorkerState


class RayWorker:
    """The actor of one process. It has no coroutines, or Ray would run it in its own event loop.

    Args:
      place: place of the process. If it runs in another zone, its label says so.
      number: its number there.
      settings: settings of the fleet as JSON, without addresses.
      command: command that runs `triolet`; empty for the installed one.
    """

    def __init__(self, place: Place, number: int, settings: bytes, command: Sequence[str]) -> None:
        sources = SettingSources()
        sources.add_document(settings, name_of(place, number))
        own = sources.settings()
        labels = ray.get_runtime_context().get_node_labels()
        zone = labels.get(ZONE, "") if place.zone else ""
        host, command = ray.util.get_node_ip_address(), command or command_line()
        stands_in = is_stand_in(place, number) and own.ray.max_stand_ins > 0
        roles = roles_of_templates(own, ()) if stands_in else ()
        templates = templates_of(
            roles, lambda modules: Template.spawn(command, (*modules, *MODULES))
        )
        starter = Starter(templates, command, own.supervisor.start_silence_s)

        def make(place: Place, number: int, suffix: str = "") -> OwnedProcess:
            name = f"{name_of(place, number)}{suffix}"
            return OwnedProcess(name, place.role, own, zone, host, command, starter)

        def stand_in(name: str) -> OwnedProcess:
            return make(*place_of(name), f"-stand-in{place.zone and '-'}{place.zone}")

        self._process = make(place, number)
        self._leave_s = grace_of(own, place.role) + own.ray.stop_margin_s
        started: Future[trio.lowlevel.TrioToken] = Future()

        async def run() -> None:
            started.set_result(trio.lowlevel.current_trio_token())
            async with trio.open_nursery() as nursery:
                if stands_in:
                    over = partial(is_over, within_s=own.ray.watch_s)
                    one = StandIn(place, own.ray, lost_actors, over, starter, stand_in)
                    nursery.start_soon(one.run, self._process.leaving)
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


def lost_actors() -> set[str]:
    """Return the names of the actors of this fleet that Ray restarts."""
    found = set()
    for key, actor in actors(actor_state_name="RESTARTING").items():
        # Other fleets may have actors of the same name; one of this fleet may have left.
        with suppress(ValueError, RayError):
            if ray.get_actor(actor["Name"])._actor_id.hex() == key:
                found.add(actor["Name"])
    return found


def is_over(name: str, *, within_s: float) -> bool:
    """Return whether an actor's process serves, or the actor has left.

    Args:
      name: name of the actor.
      within_s: time for its answer.
    """
    try:
        state: WorkerState = ray.get(ray.get_actor(name).state.remote(), timeout=within_s)
    except (ValueError, RayError) as error:
        return isinstance(error, ValueError)
    return state.is_ready
