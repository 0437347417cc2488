"""Tests of the links over which a prefill worker sends KV, against a scripted decode worker."""

from __future__ import annotations

from collections.abc import AsyncIterator  # noqa: TC003 (asynccontextmanager's return type)
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import structlog
import trio
from trio.testing import wait_all_tasks_blocked

from prefill.core import PrefillCore
from prefill.links import KvLinks
from tests.worker.scripts import scripted_engine
from transport.frames import (
    PROTOCOL_VERSION,
    Capacity,
    Ended,
    EndReason,
    Goodbye,
    Hello,
    KvChunk,
    KvTarget,
    Peer,
    Prefill,
    Welcome,
)
from transport.handshake import make_hello
from transport.memory_network import MemoryListener, MemoryNetwork
from transport.tokens import pack_tokens
from triolet.config import LinkConfig
from triolet.ids import AttemptKey, PeerId, Role
from triolet.sampling import SamplingParams
from worker.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio.testing import MockClock

    from simulation.engine import ScriptedEngine
    from transport.frames import AnyFrame

LINK = LinkConfig(kv_chunk_bytes=32, kv_window_bytes=64, kv_ring_bytes=128)
SERVER = PeerId(Role.SERVER, "server-0", 1)
ADDRESS = "memory:kv"
PROMPT = tuple(range(1, 9))
FIRST, SECOND = AttemptKey(bytes(15) + b"1", 0), AttemptKey(bytes(15) + b"2", 0)


def life(epoch: int) -> KvTarget:
    return KvTarget(Peer.of(PeerId(Role.DECODE, "decode-0", epoch)), ADDRESS)


@dataclass
class Sender:
    """A prefill worker without its loop, and the decode worker's listener."""

    core: PrefillCore
    engine: ScriptedEngine
    links: KvLinks
    listener: MemoryListener
    network: MemoryNetwork

    def ask(self, key: AttemptKey, target: KvTarget) -> None:
        """Hand over a PREFILL, without sending anything yet."""
        packed, params = pack_tokens(PROMPT), SamplingParams(seed=1)
        frame = Prefill(*key, packed, target, params, priority=0, remaining_s=60.0)
        self.core.on_control(SERVER.identity(), frame, trio.current_time())

    def compute(self) -> None:
        """Run one step, without sending anything yet."""
        now = trio.current_time()
        rows = self.core.stepper.plan(now)
        self.core.stepper.complete(self.engine.step(rows), now)

    def flush(self) -> None:
        self.links.flush(trio.current_time())

    def ends(self) -> dict[AttemptKey, Ended]:
        frames = (send.frame for send in self.core.outbox.take_for_servers())
        return {frame.key: frame for frame in frames if isinstance(frame, Ended)}

    async def received(self) -> Sequence[AnyFrame]:
        return [message.frame for message in await self.listener.receive_many()]

    async def welcome(
        self, target: KvTarget, kv_window_bytes: int = 64, answers: KvTarget | None = None
    ) -> None:
        """Receive the HELLO, after the last frames of an older link, and answer it.

        Args:
          target: that was connected to.
          kv_window_bytes: granted window.
          answers: another epoch at its address; None for itself.
        """
        messages = list(await self.listener.receive_many())
        while not isinstance(messages[-1].frame, Hello):
            messages += await self.listener.receive_many()
        *before, message = messages
        assert all(isinstance(earlier.frame, Goodbye) for earlier in before)
        capacity = Capacity(8, 4, 16, 4, 64, kv_window_bytes=kv_window_bytes)
        peer = (answers or target).peer
        welcome = Welcome(peer, PROTOCOL_VERSION, self.engine.fingerprint, capacity)
        self.listener.send_nowait(message.sender, welcome)
        await wait_all_tasks_blocked()


@asynccontextmanager
async def open_sender() -> AsyncIterator[Sender]:
    network = MemoryNetwork()
    listener = network.listen(ADDRESS, hwm=100, max_frame_bytes=10_000)
    engine = scripted_engine()
    identity = Identity(Role.PREFILL, "prefill-0", engine, max_num_seqs=4, max_waiting_tokens=200)
    core = PrefillCore(
        engine, identity, LINK, memoryview(bytearray(LINK.kv_ring_bytes)), trio.current_time()
    )
    core.on_control(SERVER.identity(), make_hello(SERVER), trio.current_time())
    async with trio.open_nursery() as nursery:
        links = KvLinks(core, identity, network, LINK, nursery, settle=lambda now: links.flush(now))
        yield Sender(core, engine, links, listener, network)
        nursery.cancel_scope.cancel()


async def test_kv_is_shipped_once_the_receiver_has_welcomed(
    autojump_clock: MockClock,
) -> None:
    async with open_sender() as sender:
        sender.ask(FIRST, life(1))
        sender.compute()
        sender.flush()
        await sender.welcome(life(1))
        frames = await sender.received()
        assert isinstance(frames[0], KvChunk)


async def test_what_is_ready_for_an_old_life_does_not_meet_the_dialling_of_the_new_one(
    autojump_clock: MockClock,
) -> None:
    async with open_sender() as sender:
        sender.ask(FIRST, life(1))
        sender.flush()
        await sender.welcome(life(1))
        sender.compute()
        sender.ask(SECOND, life(2))
        sender.flush()
        assert sender.ends()[FIRST].reason is EndReason.PEER_LOST
        assert sender.core.shipper.targets == (life(2),)
        sender.compute()
        sender.flush()
        await sender.welcome(life(2))
        chunks = [f for f in await sender.received() if isinstance(f, KvChunk)]
        assert {chunk.key for chunk in chunks} == {SECOND}


@pytest.mark.parametrize(
    ("is_computed", "kv_window_bytes", "answers", "words"),
    [
        pytest.param(False, 0, None, "", id="it grants no window"),
        pytest.param(True, 64, life(2), "answers, but", id="another life than was dialled"),
    ],
)
async def test_a_receiver_that_cannot_take_kv_is_given_up(
    is_computed: bool,
    kv_window_bytes: int,
    answers: KvTarget | None,
    words: str,
    autojump_clock: MockClock,
) -> None:
    async with open_sender() as sender:
        sender.ask(FIRST, life(1))
        if is_computed:
            sender.compute()
        sender.flush()
        await sender.welcome(life(1), kv_window_bytes, answers)
        ended = sender.ends()[FIRST]
        assert ended.reason is EndReason.PEER_LOST
        assert words in ended.message
        assert sender.core.shipper.targets == ()


async def test_kv_that_a_lost_connection_did_not_take_is_sent_again_on_the_next(
    autojump_clock: MockClock,
) -> None:
    async with open_sender() as sender:
        sender.ask(FIRST, life(1))
        sender.flush()
        await sender.welcome(life(1))
        sender.compute()
        sender.listener.close()
        with structlog.testing.capture_logs() as logs:
            sender.flush()
        assert {entry["event"] for entry in logs} == {"kv_send_failed"}
        sender.listener = sender.network.listen(ADDRESS, hwm=100, max_frame_bytes=10_000)
        await trio.sleep(1.1 * LINK.kv_retry_s)
        sender.flush()
        frames = await sender.received()
        assert {frame.key for frame in frames if isinstance(frame, KvChunk)} == {FIRST}
