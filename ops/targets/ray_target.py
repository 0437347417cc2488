"""A fleet on a Ray cluster: one detached, named actor for each process. Ray is not on the path of
requests: workers find their servers by Redis, and serve on while Ray is away.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import asynccontextmanager, chdir, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
import ray
import trio
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import In, NodeLabelSchedulingStrategy

from triolet.errors import said_by
from triolet.ids import Place, Role
from triolet.plain_text import one_line

from ..exit_codes import CommandFailed
from ..settings.form import document
from .actors import (
    ZONE,
    WorkerState,
    actor_name,
    lacking,
    name_of,
    observed,
    place_of,
    require_place,
    trouble_of,
)
from .owned_process import grace_of
from .ray_worker import RayWorker
from .target import together

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from ..settings.form import Settings
    from .desired import DesiredStore
    from .target import Observed

POLL_S: Final = 0.2
"""Interval of looking at nodes and actors while a command waits for them."""
COMMAND: Final[tuple[str, ...]] = ()
"""Command that runs `triolet` on the nodes; empty for the one that is installed there."""
ROLES: Final = (Role.SERVER, Role.PREFILL, Role.DECODE)
"""Roles of a fleet's processes, in the order in which they leave."""
NO_ANSWER: Final = "it waits for free CPUs or GPUs on a node, or its actor restarts"
MAX_LINE: Final = 200
"""Longest hindrance."""


@asynccontextmanager
async def connected(
    address: str, settings: Settings, store: DesiredStore
) -> AsyncIterator[RayTarget]:
    """Connect to a cluster.

    Args:
      address: `ray` for the cluster of this node, or `ray://HOST:PORT`.
      settings: settings of the fleet.
      store: the desired numbers.

    Raises:
      CommandFailed: there is no cluster.
    """
    config, fleet = settings.ray, settings.server.membership.redis.fleet
    within_s = config.answer_timeout_s
    place = urlsplit(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    with _failures(f"there is no Ray cluster at {address}"):
        if place.netloc:
            # Ray's client tries a wrong address for half a minute.
            with trio.fail_after(within_s):
                await (await trio.open_tcp_stream(place.hostname or "", place.port or 0)).aclose()
        init = partial(
            ray.init,
            address if place.netloc else "auto",
            namespace=f"triolet-{fleet}",
            log_to_driver=False,
            configure_logging=False,
        )
        # Ray puts this directory on the path of actors, where a folder could hide our package.
        with trio.fail_after(within_s), chdir("/"):
            await trio.to_thread.run_sync(init, abandon_on_cancel=True)
    try:
        yield RayTarget(settings, store)
    finally:
        await trio.to_thread.run_sync(ray.shutdown)


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turn the failures of a call into one line."""
    try:
        yield
    except trio.TooSlowError:
        raise CommandFailed(f"{what}: no answer in time") from None
    except (RayError, OSError, ValueError, RuntimeError) as error:
        raise CommandFailed(f"{what}: {one_line(said_by(error))[:MAX_LINE]}") from error


class RayTarget:
    """The processes of one fleet on a cluster. See `Target`.

    Args:
      settings: settings of the fleet.
      store: the desired numbers.
    """

    def __init__(self, settings: Settings, store: DesiredStore) -> None:
        self._settings, self._store, self._config = settings, store, settings.ray
        # A dead actor has no name, but its handle tells why it died.
        self._started: dict[tuple[Place, int], Any] = {}

    def check(self, place: Place) -> None:
        """See `Target`."""
        require_place(place, self._settings.decode.membership.model, self._config.zones)

    async def scale(self, place: Place, count: int, tell: Callable[[str], object]) -> None:
        """See `Target`."""
        await self._store.set(place, count)
        present = (await self._names()).get(place, [])
        if missing := [number for number in range(count) if number not in present]:
            await self._wait_for_node(place)
        for number in missing:
            tell(f"{name_of(place, number)} starts")
            await self._call("Ray refuses", partial(self._start, place, number))
        for number in sorted(present, reverse=True):
            if number >= count:
                await self._leave(place, number, tell)
        for number in range(count):
            await self._wait_ready(place, number)

    async def observe(self) -> dict[Place, Observed]:
        """See `Target`."""
        desired = await self._store.numbers()
        names = await self._names()
        found: dict[Place, dict[int, WorkerState | str]] = defaultdict(dict)

        async def look(place: Place, number: int) -> None:
            found[place][number] = await self._state(place, number)

        await together(partial(look, place, number) for place in names for number in names[place])
        return {
            place: observed(desired.get(place), place, found[place])
            for place in sorted({*desired, *names})
        }

    async def stop_all(self, tell: Callable[[str], object]) -> None:
        """Let every process of the fleet drain and exit: servers first, so that they finish what
        they have while workers are there."""
        names = await self._names()
        for role in ROLES:
            leaving = [(place, n) for place in names for n in names[place] if place.role is role]
            await together(partial(self._leave, *one, tell) for one in leaving)
        await self._store.forget()

    async def _names(self) -> dict[Place, list[int]]:
        """Return the numbers of the fleet's actors by place."""
        found: dict[Place, list[int]] = defaultdict(list)
        for name in await self._call("the actors cannot be listed", ray.util.list_named_actors):
            place, number = place_of(name)
            found[place].append(number)
        return found

    async def _call(self, what: str, call: Callable[[], Any], more_s: float = 0.0) -> Any:  # noqa: ANN401 (Ray's)
        """Call Ray in a thread, with a deadline."""
        with _failures(what), trio.fail_after(self._config.answer_timeout_s + more_s):
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True)

    async def _wait_for_node(self, place: Place) -> None:
        """Wait until some node of the zone could take a process.

        Raises:
          CommandFailed: none did in time.
        """
        lack = ""
        with trio.move_on_after(self._config.place_timeout_s):
            while True:
                nodes = await self._call("the nodes cannot be listed", ray.nodes)
                lack = lacking(nodes, place.zone, self._needs(place))
                if not lack:
                    return
                await trio.sleep(POLL_S)
        raise CommandFailed(
            f"{place} cannot be placed: {lack} for {self._config.place_timeout_s:g} s; add such a "
            "node, or change ray.zones, ray.cpus or ray.gpus"
        )

    def _needs(self, place: Place) -> dict[str, float]:
        gpus = 0.0 if place.role is Role.SERVER else self._config.gpus
        return {"CPU": self._config.cpus, "GPU": gpus}

    def _start(self, place: Place, number: int) -> None:
        needs = self._needs(place)
        # The zone is preferred: a process whose zone has lost its nodes starts in another one, and
        # tells servers that zone.
        strategy = NodeLabelSchedulingStrategy(hard={}, soft={ZONE: In(place.zone)})
        self._started[place, number] = (
            ray.remote(RayWorker)
            .options(
                name=actor_name(place, number),
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                num_cpus=needs["CPU"],
                num_gpus=needs["GPU"],
                scheduling_strategy=strategy if place.zone else "DEFAULT",
            )
            .remote(place, number, self._document(), COMMAND)
        )

    def _document(self) -> bytes:
        values = {"ray": self._settings.ray}
        for role in ROLES:
            values |= msgspec.json.decode(document(self._settings, role))
        return msgspec.json.encode(values)

    async def _state(self, place: Place, number: int) -> WorkerState | str:
        """Return the state of a process, or why its actor does not tell."""
        limits = self._config

        def ask() -> WorkerState:
            started = self._started.get((place, number))
            actor = started or ray.get_actor(actor_name(place, number))
            try:
                state: WorkerState = ray.get(actor.state.remote(), timeout=limits.answer_timeout_s)
            except ActorDiedError as died:
                *_, cause = str(died).strip().splitlines()
                trouble = f"its actor has ended on its node: {one_line(cause)}"
                return WorkerState(trouble=trouble, is_stuck=True)
            return state

        try:
            state: WorkerState = await self._call("its actor does not answer", ask)
        except CommandFailed:
            nodes = await self._call("the nodes cannot be listed", ray.nodes)
            return lacking(nodes, place.zone, self._needs(place)) or NO_ANSWER
        return state

    async def _wait_ready(self, place: Place, number: int) -> None:
        limits = self._config
        deadline = trio.current_time() + limits.place_timeout_s
        state: WorkerState | str = ""
        is_placed = False
        while trio.current_time() < deadline:
            state = await self._state(place, number)
            if not isinstance(state, str):
                if state.is_ready:
                    return
                if state.is_stuck:
                    raise CommandFailed(trouble_of(place, number, state))
                if not is_placed:
                    is_placed, deadline = True, trio.current_time() + limits.start_timeout_s
            await trio.sleep(POLL_S)
        raise CommandFailed(f"not ready in time: {trouble_of(place, number, state)}")

    async def _leave(self, place: Place, number: int, tell: Callable[[str], object]) -> None:
        """Let a process drain, then remove its actor. One that does not answer is only removed."""
        tell(f"{name_of(place, number)} drains")
        is_there = isinstance(await self._state(place, number), WorkerState)
        within_s = grace_of(self._settings, place.role) + 2 * self._config.stop_margin_s

        def leave() -> None:
            # Without the actor of this name it has left.
            with suppress(ValueError):
                actor = ray.get_actor(actor_name(place, number))
                with suppress(RayError):  # also an error of `leave` itself: the actor must go
                    ray.get([actor.leave.remote()] * is_there, timeout=within_s)
                ray.kill(actor)

        await self._call("the actor stays", leave, within_s)
