"""Tests of the connection table: which connection is evicted for a new one, after any order of
events."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from server.edge.connection_table import ConnectionPlace, ConnectionRefused, ConnectionTable

ONE, OTHER = "192.0.2.1", "192.0.2.2"


class World:
    """A table, and the connections that it cut."""

    def __init__(self, max_connections: int = 4, max_per_address: int = 2) -> None:
        self.table = ConnectionTable(max_connections, max_per_address)
        self.cut: list[str] = []

    def admit(self, name: str, address: str | None) -> ConnectionPlace | ConnectionRefused:
        return self.table.admit(address, partial(self.cut.append, name))

    def place(self, name: str, address: str | None, *, key: bool = False) -> ConnectionPlace:
        place = self.admit(name, address)
        assert isinstance(place, ConnectionPlace)
        if key:
            self.table.work(place)
            place.has_shown_key = True
            self.table.rest(place)
        return place


def test_an_address_at_its_bound_makes_room_from_its_own_connections_only() -> None:
    world = World()
    world.place("other", OTHER)
    for name in ("first", "second", "third"):
        world.place(name, ONE)
    assert world.cut == ["first"]
    assert len(world.table) == 3


def test_an_address_whose_connections_are_busy_is_refused_and_others_are_not() -> None:
    world = World()
    for name in ("first", "second"):
        world.table.work(world.place(name, ONE))
    assert world.admit("third", ONE) is ConnectionRefused.ADDRESS
    world.place("other", OTHER)
    assert world.cut == []


def test_a_full_server_cuts_the_longest_idle_connection_that_has_shown_no_key() -> None:
    world = World(max_per_address=4)
    world.place("with key", ONE, key=True)
    rested = world.place("rested", ONE)
    world.place("second", ONE)
    world.place("third", ONE)
    world.table.work(rested)
    world.table.rest(rested)
    for newcomer in ("a", "b", "c"):
        world.place(newcomer, OTHER)
    assert world.cut == ["second", "third", "rested"]


def test_connections_with_a_key_go_last_and_busy_ones_never() -> None:
    world = World(max_connections=2)
    world.place("with key", ONE, key=True)
    world.table.work(world.place("busy", ONE))
    world.table.work(world.place("newcomer", OTHER))
    assert world.cut == ["with key"]
    assert world.admit("late", OTHER) is ConnectionRefused.SERVER
    assert world.table.turned_away == {"evicted": 1, "address": 0, "server": 1}


def test_a_proxy_is_no_address_until_it_names_one() -> None:
    world = World(max_connections=8)
    for number in range(4):
        world.place(f"proxied {number}", None)
    busy = world.place("busy", ONE)
    world.table.work(busy)
    world.place("idle", ONE)
    named = world.place("named", None)
    assert world.table.attribute(named, ONE) is None
    assert world.cut == ["idle"]
    world.table.work(named)
    late = world.place("late", None)
    assert world.table.attribute(late, ONE) is ConnectionRefused.ADDRESS
    world.table.leave(late)
    world.table.leave(late)
    assert len(world.table) == 6


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "work", "rest", "leave", "key", "attribute"]),
        st.integers(0, 11),
    ),
    max_size=60,
)


@given(EVENTS)
def test_no_bound_is_ever_passed_and_no_busy_connection_is_ever_cut(
    events: list[tuple[str, int]],
) -> None:
    table = ConnectionTable(5, 2)
    held: list[ConnectionPlace] = []
    busy: set[ConnectionPlace] = set()
    for what, number in events:
        if what == "admit":
            address = None if number % 4 == 0 else f"192.0.2.{number % 4}"
            mine: list[ConnectionPlace] = []

            def cut(mine: list[ConnectionPlace] = mine) -> None:
                assert mine[0] not in busy
                held.remove(mine[0])

            place = table.admit(address, cut)
            if isinstance(place, ConnectionPlace):
                mine.append(place)
                held.append(place)
            else:
                of_address = [p for p in held if p.address == address]
                assert all(p in busy for p in (of_address if place == "address" else held))
        elif held:
            place = held[number % len(held)]
            if what == "work":
                table.work(place)
                busy.add(place)
            elif what == "rest":
                table.rest(place)
                busy.discard(place)
            elif what == "key":
                table.work(place)
                place.has_shown_key = True
                busy.add(place)
            elif what == "leave":
                table.leave(place)
                held.remove(place)
                busy.discard(place)
            elif place.address is None and place not in busy:
                table.attribute(place, "192.0.2.1")
        assert len(table) == len(held) <= 5
        for address in {p.address for p in held} - {None}:
            assert sum(p.address == address for p in held) <= 2
    for place in list(held):
        table.leave(place)
    assert not table._by_address
    assert table._idle.first is None
