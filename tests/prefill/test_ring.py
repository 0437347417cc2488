"""Tests of the allocator of prefill's send ring: a byte is reused only after the network has
stopped reading it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from prefill.ring import RingSlot, SlotRing


class FakeHold:
    """A network's hold on bytes that it still reads; the test ends it."""

    def __init__(self) -> None:
        self.done = False


def ring(num_bytes: int = 64) -> SlotRing:
    return SlotRing(memoryview(bytearray(num_bytes)))


def take(of: SlotRing, num_bytes: int) -> RingSlot:
    slot = of.take(num_bytes)
    assert slot is not None
    return slot


def test_what_is_full_has_no_room_until_something_comes_back() -> None:
    full = ring()
    slots = [take(full, 16) for _ in range(4)]
    assert [slot.offset for slot in slots] == [0, 16, 32, 48]
    assert full.take(1) is None
    assert not full.has_room(1)
    full.give_back(slots[1])
    assert full.has_room(16)
    assert not full.has_room(17)
    assert take(full, 16).offset == 16


def test_neighbours_that_come_back_join() -> None:
    joined = ring()
    slots = [take(joined, 16) for _ in range(4)]
    for index in (0, 2, 1):
        joined.give_back(slots[index])
        joined.check_invariants()
    assert take(joined, 48).offset == 0


def test_what_is_larger_than_the_ring_goes_alone_and_beside_it() -> None:
    small = ring(8)
    slot = take(small, 20)
    assert slot.offset is None
    assert len(slot.memory) == small.used_bytes == 20
    assert small.take(1) is not None  # the ring itself is empty
    assert small.take(20) is None
    small.give_back(slot)
    assert small.used_bytes == 1


def test_bytes_that_a_network_reads_are_not_used_again() -> None:
    busy = ring(16)
    slot, first, second = take(busy, 16), FakeHold(), FakeHold()
    slot.hold(first)
    slot.hold(second)
    busy.give_back(slot)
    first.done = True
    assert busy.take(16) is None
    assert busy.used_bytes == busy.returned_bytes == 16
    second.done = True
    assert busy.used_bytes == busy.returned_bytes == 0
    assert take(busy, 16).offset == 0


@pytest.mark.parametrize("seed", range(30))
def test_slots_never_overlap_and_all_of_the_ring_comes_back(seed: int) -> None:
    chance, tested = random.Random(seed), ring(1000)
    taken: list[RingSlot] = []
    for _ in range(200):
        if taken and chance.random() < 0.45:
            tested.give_back(taken.pop(chance.randrange(len(taken))))
        else:
            slot = tested.take(chance.randint(1, 300))
            if slot is not None:
                taken.append(slot)
        tested.check_invariants()
        assert tested.used_bytes == sum(len(slot.memory) for slot in taken)
        inside = sorted((s.offset, s.offset + len(s.memory)) for s in taken if s.offset is not None)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(inside))
    for slot in taken:
        tested.give_back(slot)
    assert tested.used_bytes == 0
    tested.check_invariants()
