"""Tests of the in-memory network: virtual time, counted faults, and the same run for the same
seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trio

from transport.digest import payload_digest
from transport.frames import Drain
from transport.handshake import make_hello
from transport.memory_network import MemoryNetwork
from transport.memory_pipe import FaultCounts, Faults
from triolet.errors import ConfigError

from .ends import ME, SERVER, chunk, number_of, receive_numbers

if TYPE_CHECKING:
    from trio.testing import MockClock

    from transport.memory_network import MemoryConnection, MemoryListener

ADDRESS = "memory://worker"
BOUNDS = {"hwm": 5000, "max_frame_bytes": 1_000_000}
COUNT = 1000
QUIET_S = 60.0
"""Longer than any delay in this file."""


def linked(network: MemoryNetwork) -> tuple[MemoryListener, MemoryConnection]:
    return network.listen(ADDRESS, **BOUNDS), network.connect(ADDRESS, ME, **BOUNDS)


@dataclass
class Arrival:
    """A number and the time of its arrival."""

    at: float
    number: float


async def arrivals(listener: MemoryListener) -> list[Arrival]:
    """Receive until no more frames arrive."""
    arrived: list[Arrival] = []
    while True:
        with trio.move_on_after(QUIET_S) as scope:
            for message in await listener.receive_many():
                arrived.append(Arrival(trio.current_time(), number_of(message)))
        if scope.cancelled_caught:
            return arrived


async def sent_and_arrived(network: MemoryNetwork, interval_s: float = 0.01) -> list[Arrival]:
    """Send numbers at a steady pace; return what arrives, with times since the start."""
    listener, connection = linked(network)
    start = trio.current_time()
    received: list[Arrival] = []

    async def receive() -> None:
        received.extend(await arrivals(listener))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        for number in range(COUNT):
            connection.send_nowait(Drain(float(number)))
            await trio.sleep(interval_s)
    return [Arrival(arrival.at - start, arrival.number) for arrival in received]


async def test_without_faults_everything_arrives_at_once_and_in_order(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    arrived = await sent_and_arrived(network)
    assert [a.number for a in arrived] == [float(n) for n in range(COUNT)]
    assert all(a.at == pytest.approx(0.01 * a.number) for a in arrived)
    assert network.conditions.counts == FaultCounts()


async def test_delay_delays_and_does_not_reorder(autojump_clock: MockClock) -> None:
    arrived = await sent_and_arrived(MemoryNetwork(1, Faults(min_delay_s=0.05, max_delay_s=0.5)))
    assert [a.number for a in arrived] == [float(n) for n in range(COUNT)]
    delays = [a.at - 0.01 * a.number for a in arrived]
    assert 0.05 <= min(delays) < max(delays) <= 0.5


async def test_loss_loses_its_share(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(1, Faults(loss=0.2))
    arrived = await sent_and_arrived(network)
    lost = COUNT - len(arrived)
    assert lost == network.conditions.counts.lost
    assert 0.1 * COUNT < lost < 0.3 * COUNT


async def test_duplication_brings_its_share_twice(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(1, Faults(duplication=0.2))
    arrived = [a.number for a in await sent_and_arrived(network)]
    assert len(arrived) - len(set(arrived)) == network.conditions.counts.duplicated
    assert network.conditions.counts.duplicated > 0.1 * COUNT
    assert set(arrived) == {float(n) for n in range(COUNT)}


async def test_reordering_lets_frames_overtake(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(1, Faults(reorder=0.2))
    arrived = [a.number for a in await sent_and_arrived(network)]
    assert sorted(arrived) == [float(n) for n in range(COUNT)]
    assert arrived != sorted(arrived)
    assert network.conditions.counts.reordered > 0.1 * COUNT


async def test_corruption_changes_payloads_and_never_frames(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(1, Faults(corruption=0.3))
    listener, connection = linked(network)
    payload = bytes(range(256))
    for index in range(COUNT):
        connection.send_nowait(chunk(index), payload)
    broken, received = 0, 0
    while received < COUNT:
        for message in await listener.receive_many():
            assert message.frame == chunk(received)
            assert message.payload is not None
            broken += payload_digest(message.payload) != payload_digest(payload)
            received += 1
    assert broken == network.conditions.counts.corrupted > 0.2 * COUNT
    assert payload == bytes(range(256)), "the sender's own bytes do not change"


async def test_a_cut_link_loses_everything_until_it_is_healed(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    listener, connection = linked(network)
    connection.send_nowait(make_hello(SERVER))
    await listener.receive_many()
    other = network.connect(ADDRESS, b"other", **BOUNDS)
    network.cut(ADDRESS, ME)
    connection.send_nowait(Drain(1.0))
    listener.send_nowait(ME, Drain(1.0))
    other.send_nowait(Drain(2.0))
    assert [a.number for a in await arrivals(listener)] == [2.0]
    assert network.conditions.counts.cut == 2
    network.heal(ADDRESS, ME)
    connection.send_nowait(Drain(3.0))
    assert [a.number for a in await arrivals(listener)] == [3.0]


@pytest.mark.parametrize("outlives", [False, True])
async def test_frames_reach_the_next_link_of_that_name_only_if_told_to(
    outlives: bool, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork(faults=Faults(min_delay_s=0.5, max_delay_s=0.5))
    network.conditions.outlives_links = outlives
    listener, connection = linked(network)
    connection.send_nowait(Drain(1.0))
    await trio.sleep(0.4)
    connection.send_nowait(Drain(2.0))
    await trio.sleep(0.2)  # the first has arrived, and is lost unread with its receiver
    listener.close()
    again = network.listen(ADDRESS, **BOUNDS)
    assert [a.number for a in await arrivals(again)] == ([2.0] if outlives else [])
    assert network.conditions.counts.outlived == int(outlives)


BAD_WEATHER = Faults(
    min_delay_s=0.001, max_delay_s=0.2, loss=0.1, duplication=0.1, reorder=0.2, reorder_s=1.0
)


async def test_a_seed_always_tells_the_same_story_and_another_seed_another(
    autojump_clock: MockClock,
) -> None:
    story = await sent_and_arrived(MemoryNetwork(7, BAD_WEATHER))
    again = await sent_and_arrived(MemoryNetwork(7, BAD_WEATHER))
    other = await sent_and_arrived(MemoryNetwork(8, BAD_WEATHER))
    assert [a.number for a in story] == [a.number for a in again]
    assert [a.at for a in story] == pytest.approx([a.at for a in again])
    assert [a.number for a in story] != [a.number for a in other]


async def test_what_one_link_suffers_does_not_depend_on_the_others(
    autojump_clock: MockClock,
) -> None:
    alone = MemoryNetwork(7, Faults(loss=0.3))
    crowded = MemoryNetwork(7, Faults(loss=0.3))
    noise = crowded.connect(ADDRESS, b"noise", **BOUNDS)
    survivors = []
    for network in (alone, crowded):
        listener, connection = linked(network)
        for number in range(200):
            connection.send_nowait(Drain(float(number)))
            if network is crowded:
                noise.send_nowait(Drain(1e6))
        survivors.append([a.number for a in await arrivals(listener) if a.number < 1e6])
    assert survivors[0] == survivors[1]
    assert len(survivors[0]) < 200


async def test_hours_pass_in_no_time(autojump_clock: MockClock) -> None:
    listener, connection = linked(MemoryNetwork(1, Faults(min_delay_s=3600.0, max_delay_s=3600.0)))
    start = trio.current_time()
    connection.send_nowait(Drain(1.0))
    await receive_numbers(listener, 1, [])
    assert trio.current_time() - start == pytest.approx(3600.0)


async def test_an_earlier_frame_shortens_the_wait_for_a_later_one(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork(1, Faults(min_delay_s=10.0, max_delay_s=10.0))
    listener, slow = linked(network)
    fast = network.connect(ADDRESS, b"fast", **BOUNDS)
    slow.send_nowait(Drain(10.0))
    received: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive_numbers, listener, 2, received)
        await trio.testing.wait_all_tasks_blocked()
        network.conditions.faults = Faults(min_delay_s=1.0, max_delay_s=1.0)
        fast.send_nowait(Drain(1.0))
    assert received == [1.0, 10.0]


def test_a_connection_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError):
        MemoryNetwork().connect(ADDRESS, b"", **BOUNDS)
