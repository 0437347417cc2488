"""Tests of ZeroMQ links between processes that are killed, paused and restarted."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING

import pytest
import trio

from transport.frames import Drain
from transport.link import PeerBusy
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.units import MIB

from .echo_peer import ROOT, EchoPeer, echo_peer
from .ends import (
    ME,
    PATIENCE_S,
    chunk,
    is_gone,
    make_key_directory,
    number_of,
    receive_numbers,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transport.link import Listener, Network

pytestmark = pytest.mark.slow
BOUNDS = {"hwm": 4, "max_frame_bytes": 64 * MIB}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return make_key_directory(tmp_path)


@pytest.fixture
def network(keys: str) -> Iterator[ZmqNetwork]:
    opened = ZmqNetwork(LinkConfig(), keys)
    yield opened
    opened.close()


def ipc_address(directory: Path) -> str:
    directory.chmod(0o700)
    return f"ipc://{directory}/echo"


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_frames_and_payloads_cross_processes_unchanged(
    network: Network, keys: str, tmp_path: Path, kind: str
) -> None:
    address = ipc_address(tmp_path) if kind == "ipc" else "tcp://127.0.0.1:*"
    with echo_peer("bind", address, keys) as peer, trio.fail_after(PATIENCE_S):
        connection = network.connect(peer.said, ME, hwm=1000, max_frame_bytes=64 * MIB)
        numbers = [float(n) for n in range(300)]
        for number in numbers:
            await connection.send(Drain(number))
        echoed: list[float] = []
        await receive_numbers(connection, len(numbers), echoed)
        assert echoed == numbers
        for size in (1, 65_535, 65_537, 4 * MIB):
            payload = hashlib.shake_256(b"kv").digest(size)
            await connection.send(chunk(size), payload)
            [message] = await connection.receive_many()
            assert message.frame == chunk(size)
            assert message.payload is not None
            assert bytes(message.payload) == payload


async def test_the_next_process_at_an_address_gets_nothing_meant_for_the_killed_one(
    network: Network, tmp_path: Path
) -> None:
    address = ipc_address(tmp_path)
    connection = network.connect(address, ME, hwm=1000, max_frame_bytes=MIB)
    with trio.fail_after(PATIENCE_S):
        with echo_peer("bind", address) as first:
            await connection.send(Drain(1.0))
            [message] = await connection.receive_many()
            assert number_of(message) == 1.0
            first.freeze()
            await until(lambda: first.state == "T")
            for _ in range(50):
                connection.send_nowait(Drain(13.0))
            first.kill()
            await until(lambda: is_gone(lambda: connection.send_nowait(Drain(13.0))))
        with echo_peer("bind", address):
            await connection.send(Drain(2.0))
            [message] = await connection.receive_many()
            assert number_of(message) == 2.0


async def frozen(listener: Listener, peer: EchoPeer) -> bytes:
    """Return the routing id of a peer that has sent a frame and is now stopped."""
    [message] = await listener.receive_many()
    assert message.sender.decode() == peer.said
    peer.freeze()
    await until(lambda: peer.state == "T")
    return message.sender


async def test_a_stopped_process_absorbs_little_and_is_busy_and_goes_on_when_continued(
    network: Network, tmp_path: Path
) -> None:
    listener = network.listen(ipc_address(tmp_path), **BOUNDS)
    with echo_peer("connect", listener.address) as peer, trio.fail_after(PATIENCE_S):
        identity = await frozen(listener, peer)
        absorbed = 0
        with pytest.raises(PeerBusy):  # noqa: PT012
            while absorbed < 400:
                listener.send_nowait(identity, chunk(absorbed), bytes(64 * 1024))
                absorbed += 1
                # Give the I/O thread time to hand as much as possible to the kernel.
                await trio.sleep(0.001)
        assert absorbed < 100
        peer.thaw()
        echoed: list[int] = []
        while len(echoed) < absorbed:
            echoed += [getattr(m.frame, "index") for m in await listener.receive_many()]  # noqa: B009
        assert echoed == list(range(absorbed))


@pytest.mark.long
async def test_a_process_that_reads_little_survives_the_death_of_one_that_sends_much(
    tmp_path: Path,
) -> None:
    """libzmq aborted the reader when its own heartbeats met a full, broken connection."""
    reading = [sys.executable, "-m", "tests.transport.full_reader", ipc_address(tmp_path)]
    ended = await trio.run_process(reading, cwd=ROOT, capture_stdout=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, b"lives\n")


async def test_a_killed_process_is_gone_at_once(network: Network, tmp_path: Path) -> None:
    listener = network.listen(ipc_address(tmp_path), **BOUNDS)
    with echo_peer("connect", listener.address) as peer, trio.fail_after(PATIENCE_S):
        [message] = await listener.receive_many()
        peer.kill()
        await until(lambda: is_gone(lambda: listener.send_nowait(message.sender, Drain(1.0))))
