"""Tests of requests for a sleeping model: they wait while control loads it, or get a
Retry-After."""

from __future__ import annotations

from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
from msgspec import structs

from server.api.served_models import state_of
from server.contract.generation import AssignedVersion, Finished
from server.contract.request_events import RequestEvents
from server.rollouts.collector import RolloutCollector
from server.scheduling.control_link import ControlLink
from server.scheduling.links import Links
from server.scheduling.presence import LOST_S
from server.scheduling.status import Observer
from tests.server.tiny_text import tiny_text
from transport.control_protocol import (
    MAX_FRAME_BYTES,
    Activity,
    ModelNews,
    Models,
    ModelState,
    Observed,
    Said,
    Wake,
    decode_said,
    encoded,
)
from transport.frames import Capacity, ControlNews, Hello, Load, ServerReport
from transport.handshake import answer_hello
from transport.link import PeerGone
from transport.memory_network import MemoryNetwork
from transport.rollout_protocol import RolloutPhase, RolloutView, WorkDone
from triolet.errors import RequestError
from triolet.ids import PeerId, Role

from .fake_processes import FakeProcess
from .fakes import FakeDecode, FakePrefill, completion_ids, make_request, server_config
from .test_fleet import read_all, read_some
from .world import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from transport.frames import AnyFrame
    from transport.link import Listener

S = ModelState
PATIENCE_S = 60.0
WAIT_S = 30.0
CONTROL = "mem://control"


def news(state: ModelState, predicted_ready_s: float | None = 1.0) -> ModelNews:
    return ModelNews("tiny", "", state, predicted_ready_s, 0)


def away(state: ModelState | None, predicted_ready_s: float | None = 1.0) -> World:
    """Return a server after its workers have been away longer than it waits for them."""
    world = World(connect=False, worker_wait_s=WAIT_S)
    world.now += 2 * WAIT_S
    if state is not None:
        world.requests.admission.presence.note(news(state, predicted_ready_s), world.now)
    return world


@pytest.mark.parametrize("state", [S.STAGED, S.SLEEPING, S.DRAINING, S.LOADING, S.WARM])
def test_a_request_waits_for_a_model_that_can_be_had(state: ModelState) -> None:
    world = away(state)
    presence = world.requests.admission.presence
    told = []
    presence.changed = lambda: told.append(presence.is_wanted)
    reader = world.submit(make_request())
    world.sweep(2 * WAIT_S)
    assert not reader.terminals
    assert told == [True]


@pytest.mark.parametrize(
    ("state", "predicted_ready_s", "words"),
    [
        (S.SLEEPING, 700.0, "tiny is sleeping and is being loaded; it is expected in 700 s"),
        (S.SLEEPING, None, "tiny is sleeping and cannot be loaded now: there is no room"),
        (S.ABSENT, None, "now: its files are gone; `triolet model load tiny` says how to get them"),
        (S.SERVING, 0.0, "is available for this request"),
        (None, None, "is available for this request"),
    ],
)
def test_a_request_that_would_wait_in_vain_is_told_so_at_once(
    state: ModelState | None, predicted_ready_s: float | None, words: str
) -> None:
    world = away(state, predicted_ready_s)
    with pytest.raises(RequestError, match=words) as refused:
        world.submit(make_request(deadline_s=600.0))
    assert refused.value.status == 503
    if predicted_ready_s == 700.0:
        assert refused.value.retry_after_s == 700.0
        assert world.requests.admission.presence.is_wanted, "so that it is ready by then"


def test_without_control_for_long_a_request_does_not_wait() -> None:
    world = away(S.SLEEPING)
    presence = world.requests.admission.presence
    presence.note_lost(world.now)
    reader = world.submit(make_request())
    world.sweep(LOST_S / 2)
    assert not reader.terminals
    world.sweep(LOST_S)
    world.read(reader)
    assert reader.failed.error.code == "no_worker"
    with pytest.raises(RequestError, match="the control process of this fleet is away"):
        world.submit(make_request())


def test_a_prediction_runs_down() -> None:
    world = away(S.LOADING, 20.0)
    with pytest.raises(RequestError):
        world.submit(make_request(deadline_s=10.0))
    world.now += 11.0
    assert not world.submit(make_request(2, deadline_s=10.0)).terminals


class FakeControl:
    """Control's end of the link.

    Args:
      listener: where the server connects.
      name: name of the server's connection.
    """

    def __init__(self, listener: Listener, name: bytes) -> None:
        self._listener = listener
        self._name = name
        self._said: list[Said] = []
        self.wakes = 0

    def send(self, frame: AnyFrame) -> None:
        self._listener.send_nowait(self._name, frame)

    def tell(self, state: ModelState) -> None:
        self.send(ControlNews(encoded(Models((news(state),)))))

    async def hear(self) -> Said:
        while not self._said:
            frames = [one.frame for one in await self._listener.receive_many()]
            self._said += [decode_said(one.body) for one in frames if isinstance(one, ServerReport)]
        said = self._said.pop(0)
        self.wakes += isinstance(said, Wake)
        return said

    async def hear_observed(self) -> Observed:
        while not isinstance(said := await self.hear(), Observed):
            pass
        return said

    async def hear_hello(self) -> None:
        """Wait until the server connects again."""
        while not any(isinstance(one.frame, Hello) for one in await self._listener.receive_many()):
            pass

    async def hear_wake(self) -> None:
        while await self.hear() != Wake("tiny"):
            pass

    async def hear_activity(self, *, in_flight: int, is_ready: bool) -> Activity:
        while True:
            said = await self.hear()
            if isinstance(said, Activity):
                [model] = said.models
                if (model.in_flight, model.is_ready) == (in_flight, is_ready):
                    return said


class Scene:
    """A server with a link to control; tests start its workers."""

    def __init__(self, nursery: trio.Nursery, addresses: tuple[str, ...]) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork()
        self.processes: list[FakeProcess] = []
        self.heard = trio.Event()
        config = server_config(
            token_window=4, model_dir="/tiny", control_addresses=addresses, zone="eu"
        )
        events, observer, rollouts = RequestEvents(), Observer(), RolloutCollector()
        self.observer = observer
        rollouts.watch("tiny", events, observer)
        self.fleet = Links(config, tiny_text(), self.network, observer, events=events)
        self.link = ControlLink(
            config,
            self.network,
            "server",
            {"tiny": self.fleet},
            use_routes=lambda _: self.heard.set(),
            rollouts=rollouts,
        )

    async def start_workers(self) -> tuple[FakeDecode, FakePrefill]:
        decode, prefill = FakeDecode(), FakePrefill(labels={"zone": "us"})
        self.processes = [
            FakeProcess(self.network, decode),
            FakeProcess(self.network, prefill, [decode]),
        ]
        for process in self.processes:
            await self.nursery.start(process.run)
        return decode, prefill

    @asynccontextmanager
    async def control(self, address: str = CONTROL) -> AsyncIterator[FakeControl]:
        """Run one process of control."""
        with closing(
            self.network.listen(address, hwm=100, max_frame_bytes=MAX_FRAME_BYTES)
        ) as listener:
            name, hello = b"", None
            while not isinstance(hello, Hello):
                (name, hello, _), *_ = await listener.receive_many(1)
            me = PeerId(Role.CONTROL, "control", 1)
            capacity = Capacity(0, 1, 0, 0, 0)
            welcome = answer_hello(
                hello, me=me, expected=(Role.SERVER,), fingerprint="", capacity=capacity
            )
            control = FakeControl(listener, name)
            control.send(welcome)
            yield control


@asynccontextmanager
async def scene(*addresses: str) -> AsyncIterator[Scene]:
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            one = Scene(nursery, addresses or (CONTROL,))
            await nursery.start(one.fleet.run)
            nursery.start_soon(one.link.run)
            yield one
            nursery.cancel_scope.cancel()


async def test_a_request_wakes_its_model_and_is_answered() -> None:
    async with scene() as server, server.control() as control:
        await control.hear_activity(in_flight=0, is_ready=False)
        control.tell(S.SLEEPING)
        while (status := server.fleet.status()).told is not S.SLEEPING:
            await trio.lowlevel.checkpoint()
        assert (state_of(status), status.is_coming) == (S.SLEEPING, True)
        stream = server.fleet.submit(make_request(max_tokens=20))
        await control.hear_wake()
        control.tell(S.LOADING)
        await server.start_workers()
        token_ids, end = await read_all(stream)
        assert (token_ids, type(end)) == (completion_ids(0, 20), Finished)
        said = await control.hear_activity(in_flight=0, is_ready=True)
        assert said.models[0].last_used_s_ago is not None
        assert said.models[0].version == "/tiny", "the directory, because it has no digest"
        assert state_of(server.fleet.status()) is S.SERVING


async def test_what_still_runs_on_workers_that_end_does_not_wake_its_model() -> None:
    async with scene() as server, server.control() as control:
        workers = await server.start_workers()
        await control.hear_activity(in_flight=0, is_ready=True)
        stream = server.fleet.submit(make_request(max_tokens=150))
        await read_some(stream, 5)
        await control.hear_activity(in_flight=1, is_ready=True)
        for worker in workers:
            worker.is_draining = True
        control.tell(S.DRAINING)
        await control.hear_activity(in_flight=1, is_ready=False)
        control.tell(S.DRAINING)  # makes another report due
        await control.hear_activity(in_flight=1, is_ready=False)
        assert not control.wakes
        server.fleet.submit(make_request(2))
        await control.hear_wake()


async def test_a_control_that_comes_back_hears_what_waits() -> None:
    async with scene() as server:
        async with server.control() as control:
            control.tell(S.DRAINING)
            while server.fleet.status().told is None:
                await trio.lowlevel.checkpoint()
            server.fleet.submit(make_request())
            await control.hear_wake()
        async with server.control() as control:
            control.tell(S.STAGED)
            await control.hear_activity(in_flight=1, is_ready=False)
            await control.hear_wake()
        async with server.control() as control:
            control.send(ControlNews(b"nonsense"))
            await control.hear_hello()
        async with server.control() as control:
            await control.hear_activity(in_flight=1, is_ready=False)


VIEW = RolloutView("r", "chat", "tiny", "next", "", RolloutPhase.CANARY, 1, (0.1, 1.0), 0.0, "")
ASSIGNED = AssignedVersion("chat", "tiny", 7, 1.0)


async def test_control_hears_of_requests_workers_and_work_of_a_rollout_within_a_second(
    autojump_clock: MockClock,
) -> None:
    async with scene() as server, server.control() as control:
        await server.start_workers()
        await server.fleet.wait_ready()
        control.send(ControlNews(encoded(Models((), rollouts=(VIEW,)))))
        await server.heard.wait()
        request = replace(make_request(1, max_tokens=3), assigned=ASSIGNED)
        await read_all(server.fleet.submit(request))
        ended_at = trio.current_time()
        said = await control.hear_observed()
        assert trio.current_time() - ended_at <= 1.0
        [seen] = said.requests
        assert (said.server, seen.user, seen.version, seen.chosen_at) == ("server", 7, "tiny", 1.0)
        assert seen.missed == frozenset()
        assert seen.seconds.keys() == {"ttft"}
        activity = await control.hear_activity(in_flight=0, is_ready=True)
        while not activity.models[0].work.steps:
            activity = await control.hear_activity(in_flight=0, is_ready=True)
        assert (activity.zone, activity.freezes) == ("eu", ())
        server.processes[1].kill()
        said = await control.hear_observed()
        incidents = [(one.worker, one.version) for one in said.incidents]
        assert incidents == [("mem://prefill-0", "tiny")]
        # A zone without workers freezes rollouts.
        while not (isinstance(told := await control.hear(), Activity) and told.freezes):
            pass
        assert told.freezes == ("zone us is lost",)


class BrokenLink:
    """A connection that breaks after the first frame."""

    def __init__(self) -> None:
        self.sent: list[AnyFrame] = []

    async def send(self, frame: AnyFrame) -> None:
        self.sent.append(frame)

    def send_nowait(self, frame: AnyFrame) -> None:
        raise PeerGone(f"no place for {frame}")


async def test_a_broken_link_does_not_lose_what_was_seen() -> None:
    async with scene() as server:
        server.link._rollouts.hear((VIEW,))
        server.observer.incident("mem://decode-0")
        server.link._in_charge = CONTROL
        with pytest.raises(PeerGone):
            await server.link._report(BrokenLink(), CONTROL)  # type: ignore[arg-type]
        [seen] = server.link._rollouts.take("server")
        assert len(seen.incidents) == 1


async def test_only_the_control_whose_news_count_hears_what_was_seen(
    autojump_clock: MockClock,
) -> None:
    standby = "mem://standby"
    async with (
        scene(CONTROL, standby) as server,
        server.control() as control,
        server.control(standby) as other,
    ):
        for one, fence in ((control, 2), (other, 1)):
            one.send(ControlNews(encoded(Models((), fence=fence, rollouts=(VIEW,)))))
            await server.heard.wait()
        server.observer.incident("mem://decode-0")
        with trio.move_on_after(1.2):  # longer than until a report, shorter than a lease
            await other.hear_observed()
            raise AssertionError("it stands by")
        said = await control.hear_observed()
        assert [one.worker for one in said.incidents] == ["mem://decode-0"]


async def test_news_of_evidence_are_not_answered_at_once(autojump_clock: MockClock) -> None:
    async with scene() as server, server.control() as control:
        await control.hear()
        for number in range(20):
            view = structs.replace(VIEW, said=f"look {number}")
            control.send(ControlNews(encoded(Models((), rollouts=(view,)))))
            await trio.sleep(0.02)
        reports = 0
        with trio.move_on_after(0.5):
            while True:
                await control.hear()
                reports += 1
        assert reports <= 1, "one a second"


async def test_work_is_that_of_all_workers_by_their_role() -> None:
    async with scene() as server:
        await server.start_workers()
        await server.fleet.wait_ready()
        status = server.fleet.status()
        loads = {Role.PREFILL: (2.0, 3, 40), Role.DECODE: (0.5, 6, 70)}
        workers = tuple(
            replace(one, load=Load(busy_s=busy_s, steps=steps, computed_tokens=tokens))
            for one in status.workers
            for busy_s, steps, tokens in (loads[one.role],)
        )
        assert replace(status, workers=workers).work == WorkDone(2.5, 9, 70, 0, 40)
