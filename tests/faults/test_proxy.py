"""Tests of the fault matrix's proxy: it applies its rules to real ZeroMQ links and changes nothing
else."""

from __future__ import annotations

import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from tests.faults.matches import between, frames
from tests.faults.proxy import FrameProxy, Place
from tests.faults.rules import Blackout, Fate, Rule, Way, with_fields
from transport.frames import Capacity, Drain, Goodbye, Hello, KvChunk, Peer, Welcome
from transport.handshake import make_hello
from transport.link import PeerGone
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.ids import PeerId, Role

from .processes import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from transport.frames import AnyFrame
    from transport.link import Connection, Listener

PATIENCE_S = 60.0
HWM = 100
MAX_BYTES = 1 << 20
SERVER = PeerId(Role.SERVER, "web", 7)
WORKER = PeerId(Role.DECODE, "d0", 9)

pytestmark = pytest.mark.slow


class Ends:
    """A worker's listener, and a server's connection that goes through the proxy."""

    def __init__(self, directory: Path) -> None:
        self.network = ZmqNetwork(LinkConfig())
        self.place = Place("d0", "control", directory / "front", directory / "back")
        kv = Place("d0", "kv", directory / "kv-front", directory / "kv-back")
        self.proxy = FrameProxy([self.place, kv])
        self.worker = self.listen()
        self.server: Connection = self.network.connect(
            f"ipc://{self.place.front}", SERVER.identity(), hwm=HWM, max_frame_bytes=MAX_BYTES
        )

    def listen(self) -> Listener:
        return self.network.listen(f"ipc://{self.place.back}", hwm=HWM, max_frame_bytes=MAX_BYTES)

    async def to_worker(self, *numbers: float) -> None:
        with trio.fail_after(PATIENCE_S):
            for number in numbers:
                await self.server.send(Drain(number))

    async def at_worker(self, count: int) -> list[float]:
        """Return the numbers of the next frames at the worker."""
        got: list[float] = []
        with trio.fail_after(PATIENCE_S):
            while len(got) < count:
                for message in await self.worker.receive_many():
                    assert isinstance(message.frame, Drain)
                    got.append(message.frame.deadline_s)
        return got

    async def server_notices(self) -> None:
        """Wait until the server notices that it is disconnected."""

        def is_gone() -> bool:
            try:
                self.server.send_nowait(Drain(0))
            except PeerGone:
                return True
            return False

        with trio.fail_after(PATIENCE_S):
            await until(is_gone)

    async def at_server(self) -> AnyFrame:
        with trio.fail_after(PATIENCE_S):
            (message,) = await self.server.receive_many(1)
        return message.frame


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="proxy-") as made:  # 0700, and short enough for ipc
        yield Path(made)


@asynccontextmanager
async def linked(directory: Path) -> AsyncIterator[Ends]:
    ends = Ends(directory)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(ends.proxy.run)
            with trio.fail_after(PATIENCE_S):
                await ends.server.send(make_hello(SERVER))
                [message] = await ends.worker.receive_many()
            assert message.sender == SERVER.identity()
            yield ends
            nursery.cancel_scope.cancel()
    finally:
        ends.network.close()


async def test_frames_and_payloads_pass_unchanged_and_are_seen(directory: Path) -> None:
    async with linked(directory) as ends:
        payload = bytes(range(256)) * 64
        chunk = KvChunk(bytes(16), 0, 1, 0, 0, 1, bytes(16))
        await ends.server.send(chunk, payload)
        (message,) = await ends.worker.receive_many()
        assert (message.frame, bytes(message.payload or b"")) == (chunk, payload)
        ends.worker.send_nowait(SERVER.identity(), Goodbye("x"))
        assert await ends.at_server() == Goodbye("x")
        ways = [(s.link, s.way, type(s.frame)) for s in ends.proxy.sightings.entries]
        link = ("web", "d0", "control")
        assert ways == [
            (link, Way.TO_WORKER, Hello),
            (link, Way.TO_WORKER, KvChunk),
            (link, Way.FROM_WORKER, Goodbye),
        ]


@pytest.mark.parametrize(
    ("fate", "limit", "arrive"),
    [
        (Fate.PASS, None, [1, 2, 3]),
        (Fate.DROP, 1, [2, 3]),
        (Fate.DOUBLE, 2, [1, 1, 2, 2, 3]),
        (Fate.SWAP, 1, [2, 1, 3]),
    ],
)
async def test_a_rule_does_what_it_says_as_often_as_it_says(
    fate: Fate, limit: int | None, arrive: list[float], directory: Path
) -> None:
    async with linked(directory) as ends:
        with ends.proxy.rule(Rule(fate, frames(Drain), limit)) as rule:
            await ends.to_worker(1, 2, 3)
            assert await ends.at_worker(len(arrive)) == arrive
        assert rule.hits == (3 if limit is None else limit)


@pytest.mark.parametrize(("fate", "at_first"), [(Fate.HOLD, [2]), (Fate.ECHO, [1, 2])])
async def test_what_is_kept_comes_when_the_rule_is_released(
    fate: Fate, at_first: list[float], directory: Path
) -> None:
    async with linked(directory) as ends:
        rule = Rule(fate, frames(Drain), limit=1)
        with ends.proxy.rule(rule):
            await ends.to_worker(1, 2)
            assert await ends.at_worker(len(at_first)) == at_first
            assert await ends.proxy.release(rule) == 1
            assert await ends.at_worker(1) == [1]
        assert await ends.proxy.release(rule) == 0


async def test_a_corrupt_payload_differs_in_one_bit_and_the_frame_not_at_all(
    directory: Path,
) -> None:
    async with linked(directory) as ends:
        chunk = KvChunk(bytes(16), 0, 1, 0, 0, 1, bytes(16))
        with ends.proxy.rule(Rule(Fate.CORRUPT, frames(KvChunk))) as rule:
            await ends.server.send(chunk, bytes(1000))
            (message,) = await ends.worker.receive_many()
        assert message.frame == chunk
        assert message.payload is not None
        assert sum(byte.bit_count() for byte in message.payload) == 1
        assert rule.hits == 1


async def test_a_frame_can_be_rewritten(directory: Path) -> None:
    async with linked(directory) as ends:
        rewrite = Rule(
            Fate.REWRITE, frames(Drain), rewrite=lambda frame: with_fields(frame, deadline_s=8.0)
        )
        with ends.proxy.rule(rewrite):
            await ends.to_worker(1)
            assert await ends.at_worker(1) == [8]


async def test_a_welcome_leads_kv_through_the_proxy_as_well(directory: Path) -> None:
    async with linked(directory) as ends:
        welcome = Welcome(
            Peer.of(WORKER), 1, "model", Capacity(1, 1, 1, 1, 1), f"ipc://{directory}/kv-back"
        )
        ends.worker.send_nowait(SERVER.identity(), welcome)
        assert await ends.at_server() == with_fields(
            welcome, kv_address=f"ipc://{directory}/kv-front"
        )


async def test_the_end_of_a_worker_is_the_end_of_its_links(directory: Path) -> None:
    async with linked(directory) as ends:
        ends.worker.close()
        await ends.server_notices()
        ends.worker = ends.listen()
        await ends.to_worker(2)
        assert (await ends.at_worker(1))[-1] == 2


async def test_through_a_partition_comes_nothing_and_afterwards_what_is_new(
    directory: Path,
) -> None:
    async with linked(directory) as ends:
        with ends.proxy.blackout(Blackout(between("web", "d0"))) as blackout:
            await ends.to_worker(1)
            with trio.fail_after(PATIENCE_S):
                await until(lambda: blackout.hits > 0)
        # Neither ZeroMQ has noticed: what was swallowed stays lost, the link continues.
        await ends.to_worker(3)
        assert await ends.at_worker(1) == [3]


async def test_a_link_may_be_silent_one_way_only(directory: Path) -> None:
    async with linked(directory) as ends:
        one_way = Blackout(between("d0", "web"), frozenset({Way.FROM_WORKER}))
        with ends.proxy.blackout(one_way):
            ends.worker.send_nowait(SERVER.identity(), Goodbye("lost"))
            await ends.to_worker(1)
            assert await ends.at_worker(1) == [1]
            with trio.fail_after(PATIENCE_S):
                await until(lambda: one_way.hits > 0)
