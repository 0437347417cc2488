"""A fleet with rollouts for tests: control, a fake supervisor, and servers that follow temporary
routes and report made-up requests of users."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from ops.control.process import run_control
from tests.ops.control.fleets import (
    PATIENCE_S,
    FakeSupervisor,
    ask_soon,
    config_of,
    fleet_folder,
    supervised,
)
from tests.ops.control.test_changes import SAID_S, FakeServer
from transport.control_protocol import Activity, ModelActivity, Observed, decode_told
from transport.frames import ControlNews, Goodbye
from transport.rollout_protocol import CandidateReport, FinishedRequest
from triolet.config.routes import NUM_BUCKETS, user_hash

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.ops.control.fleets import ServerEnd
    from transport.control_protocol import Models
    from transport.rollout_protocol import RolloutView
    from triolet.config.routes import Route

USERS = [user_hash("tenant", f"user {number}") for number in range(100)]
ROLLOUTS = "/admin/rollouts"
FAST = {"shares": [0.2, 0.5, 1.0], "bake_s": 0.3, "min_requests": 20, "min_buckets": 5}
"""A rollout whose steps take tenths of a second."""
HELD = 10_000_000
"""`min_requests` with which no step ends by itself."""
GOLDEN = ("first answer", "second answer")


class RolloutServer(FakeServer):
    """A server that follows temporary routes and reports requests.

    Attributes:
      bad: returns whether a version answers requests badly.
      sends: whether there is traffic.
      golden: its answers to golden prompts, by version.
      golden_error: why golden prompts fail; empty if they do not.
      freezes: why no rollout should go on.
      told: the latest news.
      served: versions of its requests in the order of time.
      permanent: its permanent route from a control without a supervisor.
      follows: whether it uses permanent routes.
      zone: its zone.
      seen: phase and step of the rollout in the news, in order and without repeats.
      lacking: news of a step without its route.
    """

    def __init__(self, folder: Path, supervisor: FakeSupervisor, zone: str = "") -> None:
        super().__init__(folder, supervisor)
        self.identity = f"server {zone}".encode()
        self.bad: Callable[[str], bool] = lambda version: False
        self.sends = True
        self.golden: tuple[str, ...] = GOLDEN
        self.golden_error = ""
        self.freezes: tuple[str, ...] = ()
        self.told: Models | None = None
        self.served: list[str] = []
        self.seen: list[tuple[str, int]] = []
        self.lacking = 0
        self.permanent: Route | None = None
        self.follows = True
        self.zone = zone

    @property
    def view(self) -> RolloutView | None:
        """The latest rollout that it heard of."""
        return self.told.rollouts[0] if self.told and self.told.rollouts else None

    @property
    def route(self) -> Route | None:
        """The temporary route that is valid now."""
        route = None if self.told is None else self.told.routes.get("chat")
        if route is None or route.valid_until is None or route.valid_until < time.time():
            return None
        return route

    async def until_routed(self, *, wanted: bool = True) -> None:
        """Wait until it has a temporary route, or has none any more."""
        while (self.route is not None) is not wanted:
            await trio.lowlevel.checkpoint()

    def version_for(self, user: int) -> str:
        """Return the version that a user's request gets."""
        if self.route is not None:
            return self.route.version_for("tenant", str(user % NUM_BUCKETS), time.time())
        if self.permanent is not None:
            return self.permanent.stable
        of_file = self._supervisor.routes.get("chat")
        return "chat" if of_file is None else of_file["stable"]

    async def _hear(self, end: ServerEnd, link: trio.CancelScope) -> None:
        while not isinstance(frame := await end.next_frame(), Goodbye):
            if isinstance(frame, ControlNews):
                self.told = decode_told(frame.body)
                told = self.told.routes.get("chat")
                if told is not None and told.valid_until is None and self.follows:
                    self.permanent = told
                self.lacking += bool(self.view and self.view.is_served and told is None)
                if self.view and self.seen[-1:] != [(self.view.phase, self.view.step)]:
                    self.seen.append((self.view.phase, self.view.step))
        link.cancel()

    async def _say(self, end: ServerEnd) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super()._say, end)
            nursery.start_soon(self._report, end)

    def _activity(self, models: tuple[ModelActivity, ...], refused: dict[str, str]) -> Activity:
        routes = {} if self.permanent is None else {"chat": self.permanent}
        frozen = self.freezes
        said = Activity("server", models, refused, routes, zone=self.zone, freezes=frozen)
        if self.view is None or not self.view.golden_every_s:
            return said
        report = CandidateReport(self.golden, self.golden_error)
        return msgspec.structs.replace(said, candidates={self.view.candidate: report})

    async def _report(self, end: ServerEnd) -> None:
        while True:
            if self.sends and self.view is not None:
                await end.say(self._observed())  # type: ignore[arg-type]
            await trio.sleep(2 * SAID_S)

    def _observed(self) -> Observed:
        """Return one request of each user."""
        now, requests = time.time(), []
        for user in USERS:
            version = self.version_for(user)
            missed = frozenset({"errors"}) if self.bad(version) else frozenset[str]()
            requests.append(FinishedRequest(user, version, now, now, missed, {"ttft": 0.1}))
        self.served += [one.version for one in requests]
        return Observed("server", tuple(requests))


class RolloutScene:
    """A fleet with control, a fake supervisor and a server.

    Attributes:
      folder: directory of the fleet.
      supervisor: the fake supervisor.
      server: the server.
    """

    def __init__(self, folder: Path, supervisor: FakeSupervisor) -> None:
        self.folder = folder
        self.supervisor = supervisor
        self.server = RolloutServer(folder, supervisor)

    async def start(self, **fields: object) -> tuple[int, Any]:
        """Start a rollout of `chat` to a version in the fleet's folder."""
        ref = "chat-v2" if "chat-v2" in self.supervisor.added else str(self.folder / "model")
        body = {"model": "chat", "ref": ref, **FAST, **fields}
        return await ask_soon(self.folder, "POST", ROLLOUTS, json=body)

    async def order(self, order: str, **fields: object) -> tuple[int, Any]:
        """Give an order to the rollout of `chat`."""
        return await ask_soon(self.folder, "POST", f"{ROLLOUTS}/chat/{order}", json=fields)

    async def shown(self) -> dict[str, Any]:
        """Return the rollout of `chat`."""
        status, shown = await ask_soon(self.folder, "GET", f"{ROLLOUTS}/chat")
        assert status == 200, shown
        return dict(shown)

    async def reaches(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the rollout is as a test wants it, and return it."""
        while not is_so(shown := await self.shown()):
            await trio.lowlevel.checkpoint()
        return shown

    async def ends(self) -> dict[str, Any]:
        """Wait until one version is left."""
        return await self.reaches(lambda shown: shown["is_over"])

    async def phase(self, phase: str, step: int | None = None) -> dict[str, Any]:
        """Wait until the rollout has a phase and, unless it is None, a step."""
        return await self.reaches(
            lambda shown: shown["phase"] == phase and step in (None, shown["step"])
        )


@asynccontextmanager
async def scene_of_hosts(**fields: object) -> AsyncIterator[RolloutScene]:
    """Run a control without a supervisor in this process, and a server with two versions."""
    with fleet_folder() as folder, trio.fail_after(PATIENCE_S):
        models = FakeSupervisor()
        models.added = {"chat": "", "chat-v2": ""}
        async with trio.open_nursery() as nursery:
            one = RolloutScene(folder, models)
            nursery.start_soon(one.server.run)
            config = config_of(folder, **fields)  # type: ignore[arg-type]
            await nursery.start(run_control, config)
            while not (await ask_soon(folder, "GET", "/admin/models"))[1]["models"]:
                await trio.lowlevel.checkpoint()
            yield one
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def fleet_without_control() -> AsyncIterator[RolloutScene]:
    """Run a fake supervisor and a server, for several controls one after another."""
    with fleet_folder() as folder:
        async with supervised(folder, "chat") as supervisor, trio.open_nursery() as nursery:
            one = RolloutScene(folder, supervisor)
            nursery.start_soon(one.server.run)
            yield one
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def control_of(one: RolloutScene, **fields: object) -> AsyncIterator[None]:
    """Run control of a fleet in this process, until the end of the block."""
    async with trio.open_nursery() as nursery:
        await nursery.start(run_control, config_of(one.folder, "chat", **fields))  # type: ignore[arg-type]
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def rollout_scene(run_id: str = "run", **fields: object) -> AsyncIterator[RolloutScene]:
    """Run a fleet with control in this process."""
    with fleet_folder() as folder:
        async with supervised(folder, "chat") as supervisor, trio.open_nursery() as nursery:
            supervisor.run_id = run_id
            one = RolloutScene(folder, supervisor)
            config = config_of(folder, "chat", **fields)  # type: ignore[arg-type]
            await nursery.start(run_control, config)
            nursery.start_soon(one.server.run)
            yield one
            nursery.cancel_scope.cancel()
