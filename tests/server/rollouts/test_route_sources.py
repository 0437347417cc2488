"""Tests of routes of rollouts: renewed, withdrawn, and expired by the server's own clock."""

from __future__ import annotations

from msgspec.structs import replace

from server.rollouts.route_sources import TemporaryRoutes
from triolet.config.routes import Route

CANARY = Route({"old": 0.9, "new": 0.1}, "old", 7, valid_until=110.0)


def ends(routes: TemporaryRoutes, now_s: float) -> dict[str, float | None]:
    return {name: one.valid_until for name, one in routes.valid(now_s).items()}


def test_a_route_counts_until_its_time_and_a_renewal_prolongs_it() -> None:
    routes = TemporaryRoutes(10.0)
    routes.use({"chat": CANARY}, 100.0, 100.0)
    assert routes.valid(109.9) == {"chat": CANARY}
    assert routes.valid(110.0) == {}
    routes.use({"chat": replace(CANARY, valid_until=112.0)}, 102.0, 102.0)
    assert ends(routes, 111.9) == {"chat": 112.0}
    routes.use({}, 103.0, 103.0)
    assert routes.valid(103.0) == {}, "withdrawn"


def test_a_slow_clock_does_not_prolong_a_route_that_is_not_renewed() -> None:
    routes = TemporaryRoutes(10.0)
    for now_s in (50.0, 50.5, 59.9):  # the same news twice a second, a minute early
        routes.use({"chat": CANARY}, now_s, now_s)
    assert ends(routes, 59.9) == {"chat": 60.0}
    assert routes.valid(60.0) == {}
    routes.use({"chat": CANARY}, 60.5, 60.5)
    assert routes.valid(60.5) == {}, "news of a control that cannot write"
    routes.use({"chat": replace(CANARY, valid_until=111.0)}, 61.0, 61.0)
    assert ends(routes, 61.0) == {"chat": 71.0}


def test_a_clock_that_is_set_back_does_not_prolong_a_route() -> None:
    routes = TemporaryRoutes(10.0)
    routes.use({"chat": CANARY}, 100.0, 1000.0)
    routes.use({"chat": CANARY}, 40.0, 1001.0)  # a minute back
    assert (routes.next_end(1001.0), ends(routes, 1001.0)) == (1010.0, {"chat": 50.0})
    assert (routes.next_end(1010.0), routes.valid(1010.0)) == (None, {})


def test_a_fast_clock_only_ends_routes_early() -> None:
    routes = TemporaryRoutes(10.0)
    routes.use({"chat": CANARY}, 150.0, 150.0)
    assert routes.valid(150.0) == {}


def test_a_time_that_is_moved_forward_ends_a_route_early() -> None:
    routes = TemporaryRoutes(10.0)
    routes.use({"chat": CANARY}, 100.0, 100.0)
    routes.use({"chat": replace(CANARY, valid_until=104.0)}, 101.0, 101.0)
    assert ends(routes, 101.0) == {"chat": 104.0}


def test_of_two_writers_the_higher_revision_counts_until_it_is_withdrawn() -> None:
    routes = TemporaryRoutes(10.0)
    routes.use({"chat": CANARY}, 100.0, 100.0)
    lower = replace(CANARY, shares={"old": 0.0, "new": 1.0}, revision=6, valid_until=111.0)
    same = replace(lower, revision=7)
    for other in (lower, same):
        routes.use({"chat": other}, 101.0, 101.0)
        assert routes.valid(101.0) == {"chat": CANARY}
    higher = replace(lower, revision=8)
    routes.use({"chat": higher}, 101.0, 101.0)
    assert routes.valid(101.0) == {"chat": higher}
    routes.use({}, 102.0, 102.0)
    routes.use({"chat": lower}, 102.0, 102.0)
    assert routes.valid(102.0) == {"chat": lower}, "another rollout"
