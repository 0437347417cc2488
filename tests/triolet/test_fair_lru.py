"""Tests of the fair LRU: the owner with the most entries relative to its share loses entries first,
and the counts stay right."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triolet.fair_lru import ANYBODY, MIN_STALE, FairLru, Keeper

A, B = Keeper(b"a"), Keeper(b"b")


def popped(kept: FairLru[int], count: int) -> list[int]:
    return [kept.pop() for _ in range(count)]


def test_alone_it_is_plain_lru() -> None:
    kept: FairLru[int] = FairLru()
    kept.add(range(4), ANYBODY)
    kept.touch(0, b"")
    assert popped(kept, 4) == [1, 2, 3, 0]
    with pytest.raises(KeyError):
        kept.pop()


def test_who_floods_gives_way_to_who_does_not() -> None:
    kept: FairLru[int] = FairLru()
    kept.add(range(3), B)
    for number in range(100, 200):
        kept.add([number], A)
        if len(kept) > 10:
            assert kept.pop() >= 100
    assert (kept.held_by(b"a"), kept.held_by(b"b")) == (7, 3)


def test_room_is_borrowed_until_somebody_wants_it() -> None:
    kept: FairLru[int] = FairLru()
    kept.add(range(100, 110), A)
    for number in range(10):
        kept.pop()
        kept.add([number], B)
    assert kept.held_by(b"a") in (4, 5)


def test_shares_are_what_is_left_where_all_want_more() -> None:
    kept: FairLru[int] = FairLru()
    small, large = Keeper(b"s", 0.1), Keeper(b"l", 0.4)
    for number in range(400):
        kept.add([number], large if number % 2 else small)
        if len(kept) > 50:
            kept.pop()
    assert (kept.held_by(b"s"), kept.held_by(b"l")) == (10, 40)


def test_weights_count_and_not_names() -> None:
    kept: FairLru[int] = FairLru()
    kept.add([1], A, 100)
    kept.add([2, 3, 4], B, 10)
    assert popped(kept, 2) == [1, 2]


def test_what_is_outdated_is_forgotten() -> None:
    kept: FairLru[int] = FairLru()
    for number in range(1000):
        keeper = Keeper(bytes([number % 7]), 1.0)
        kept.add(range(10 * number, 10 * number + 10), keeper)
        popped(kept, 10 if number > 20 else 0)
    assert len(kept._heap) <= 2 * kept.num_tenants + MIN_STALE + 7


class Keepers(RuleBasedStateMachine):
    """After any operation, the chosen owner is the one that a full search finds."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: FairLru[int] = FairLru()
        self.names: dict[bytes, dict[int, int]] = {}
        self.shares: dict[bytes, float] = {}
        self.next_name = 0

    @rule(
        tenant=st.sampled_from([b"a", b"b", b"c", b"d"]),
        share=st.sampled_from([0.1, 0.5, 1.0]),
        count=st.integers(0, 4),
        weight=st.integers(1, 3),
    )
    def add(self, tenant: bytes, share: float, count: int, weight: int) -> None:
        names = range(self.next_name, self.next_name + count)
        self.next_name += count
        self.kept.add(names, Keeper(tenant, share), weight)
        if count:
            self.shares[tenant] = share
            self.names.setdefault(tenant, {}).update(dict.fromkeys(names, weight))
        elif self.names.get(tenant):
            self.shares[tenant] = share

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        known = sorted((t, n) for t, names in self.names.items() for n in names)
        if known:
            tenant, name = data.draw(st.sampled_from(known))
            self.kept.remove([name], tenant)
            del self.names[tenant][name]

    @rule()
    def pop(self) -> None:
        loads = {
            tenant: sum(names.values()) / self.shares[tenant]
            for tenant, names in self.names.items()
            if names
        }
        if not loads:
            return
        name = self.kept.pop()
        [tenant] = [tenant for tenant, names in self.names.items() if name in names]
        assert loads[tenant] == max(loads.values())
        assert name == next(iter(self.names[tenant])), "not its least recently used"
        del self.names[tenant][name]

    @invariant()
    def everything_adds_up(self) -> None:
        self.kept.check_invariants()
        assert set(self.kept) == {name for names in self.names.values() for name in names}
        for tenant, names in self.names.items():
            assert self.kept.held_by(tenant) == sum(names.values())


TestKeepers = pytest.mark.slow(Keepers.TestCase)
