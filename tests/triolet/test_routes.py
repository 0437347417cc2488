"""Tests of routes from a public model name to versions: which version a request gets, and which
routes are refused."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from triolet.config.members import Members, read_members, written_members
from triolet.config.routes import Route
from triolet.errors import ConfigError

KEYS = [f"key-{n}" for n in range(4000)]


def versions(route: Route, now_s: float = 0.0) -> list[str]:
    return [route.version_for("", key, now_s) for key in KEYS]


def test_requests_are_dealt_out_by_their_shares_and_stay() -> None:
    route = Route({"old": 3, "new": 1}, "old", 1, "salt")
    found = versions(route)
    assert found == versions(route)
    assert 900 < Counter(found)["new"] < 1100, "a quarter; five standard deviations are 137"
    assert versions(msgspec.structs.replace(route, salt="other")) != found


def test_a_larger_share_takes_requests_from_the_stable_version_only() -> None:
    steps = [versions(Route({"old": 1 - new, "new": new}, "old", 1)) for new in (0, 0.1, 0.6, 1)]
    assert [set(steps[0]), set(steps[-1])] == [{"old"}, {"new"}]
    for before, after in pairwise(steps):
        assert {(a, b) for a, b in zip(before, after, strict=True) if a != b} == {("old", "new")}


def test_an_excluded_tenant_gets_the_stable_version() -> None:
    route = Route({"old": 0, "new": 1}, "old", 1, excluded_tenants=("bank",))
    assert [route.version_for(tenant, "k", 0.0) for tenant in ("bank", "shop")] == ["old", "new"]


def test_a_temporary_route_falls_back_when_it_is_not_renewed() -> None:
    route = Route({"old": 0, "new": 1}, "old", 1, valid_until=10.0)
    assert [route.version_for("", "k", now) for now in (9.9, 10.0)] == ["new", "old"]
    renewed = msgspec.structs.replace(route, valid_until=20.0)
    assert renewed.version_for("", "k", 10.0) == "new"
    assert renewed.may_follow(route)


def test_a_conversation_stays_as_long_as_new_requests_get_its_version() -> None:
    route = Route({"old": 0.5, "new": 0.5, "next": 0}, "old", 1, "", ("bank",), 10.0)
    found = {
        version: [route.may_stay(version, *at) for at in (("", 9.9), ("bank", 9.9), ("", 10.0))]
        for version in ("old", "new", "next", "gone")
    }
    assert found == {
        "old": [True, True, True],
        "new": [True, False, False],
        "next": [False] * 3,
        "gone": [False] * 3,
    }


def test_a_route_follows_one_of_a_lower_revision_only() -> None:
    route = Route({"old": 0, "new": 1}, "old", 2)
    assert route.may_follow(None)
    assert route.may_follow(Route({"old": 1}, "old", 1))
    assert not route.may_follow(Route({"old": 1}, "old", 2)), "two writers took one revision"
    assert not route.may_follow(Route({"old": 1}, "old", 3))


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ({"chat": Route({"a": -1.0, "b": 2}, "a", 1)}, "not a number of at least 0"),
        ({"chat": Route({"a": 0}, "a", 1)}, "needs a share above 0"),
        ({"chat": Route({"a": 1}, "b", 1)}, "a share for its stable version 'b'"),
        (
            {"chat": Route({"a": 1}, "a", 1), "talk": Route({"a": 1}, "a", 1)},
            "version 'a' is in the routes 'chat' and 'talk'",
        ),
        ({str(n): Route({str(n): 1}, str(n), 1) for n in range(65)}, "65 routes; allowed: 64"),
    ],
)
def test_a_file_with_a_route_that_cannot_be_used_is_refused(
    routes: dict[str, Route], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_members(written_members(Members((), routes=routes)), "F")


def test_a_file_gives_its_routes_back() -> None:
    route = Route({"a": 1, "b": 0.5}, "a", 7, "salt", ("bank",), 12.5)
    members = Members((), routes={"chat": route})
    assert read_members(written_members(members), "F") == members
