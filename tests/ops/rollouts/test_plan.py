"""Tests of the plan of a rollout: what is refused, its routes, and its levels."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.rollouts.plan import Objective, RolloutPlan
from triolet.config.routes import NUM_BUCKETS, user_hash
from triolet.errors import SettingError

from .rollout_cases import plan, version_of

SHARES = st.lists(st.floats(0.001, 0.999), min_size=1, max_size=6, unique=True).map(
    lambda shares: (*sorted(shares), 1.0)
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shares": (0.5, 0.1, 1.0)}, "allowed: rising numbers that end with 1"),
        ({"shares": (0.1, 0.1, 1.0)}, "rising"),
        ({"shares": (0.1, 0.5)}, "end with 1"),
        ({"candidate": "old"}, "another version than stable"),
        ({"salt": "short"}, "a secret of 16 characters"),
        ({"max_step_s": 100.0}, "at least 2 times bake_s, 120 s"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        plan(**changes)


@pytest.mark.parametrize(
    "changes", [{"shares": []}, {"objectives": {}}, {"accept_cost": 0.9}, {"min_requests": 0}]
)
def test_a_field_out_of_bounds_is_refused_when_it_is_read(changes: dict[str, Any]) -> None:
    fields = msgspec.to_builtins(plan())
    assert msgspec.convert(fields, RolloutPlan, strict=False) == plan()
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields | changes, RolloutPlan)


@given(shares=SHARES, salt=st.text(min_size=16, max_size=30), number=st.integers(0, 10**6))
def test_a_user_that_has_moved_to_the_candidate_stays_there(
    shares: tuple[float, ...], salt: str, number: int
) -> None:
    chosen, user = plan(shares=shares, salt=salt), user_hash("tenant", str(number))
    versions = [version_of(chosen, user, step) for step in range(chosen.last_step + 1)]
    assert versions[0] == "old"
    assert versions[-1] == "new"
    assert versions == sorted(versions, reverse=True), "old, old, ..., new, new"


def test_a_step_moves_its_share_of_buckets() -> None:
    chosen = plan()
    assert [chosen.share(step) for step in range(4)] == [0.0, 0.1, 0.5, 1.0]
    moved = [chosen.moved_share(step) for step in range(4)]
    assert moved == pytest.approx([0.0, 0.1, 0.4 / 0.9, 1.0])
    on = [
        sum(version_of(chosen, bucket, step) == "new" for bucket in range(NUM_BUCKETS))
        for step in (1, 2)
    ]
    assert on == pytest.approx([1000, 5000], abs=150), "five standard deviations"


def test_the_budget_is_divided_by_steps_signals_and_looks() -> None:
    chosen = plan()
    # Two steps with a comparison; errors, first tokens and incidents; at most two looks.
    assert chosen.fast_threshold == pytest.approx(2 * 3 / 0.004)
    assert chosen.step_level == pytest.approx(0.004 / (2 * 2 * 2))
    assert chosen.doubt_level == pytest.approx(0.05 / 2)
    assert plan(shares=(1.0,)).fast_threshold == pytest.approx(3 / 0.004)


@pytest.mark.parametrize(
    ("good_share", "good", "bad", "is_burning"),
    [
        (0.99, 35, 6, True),  # 14.6 % of requests; 14.4 times the budget are 14.4 %
        (0.99, 36, 6, False),
        (0.99, 0, 5, True),
        (0.99, 0, 4, False),
        (0.9, 6, 6, True),  # 14.4 times the budget are more than all
        (0.9, 7, 6, False),
    ],
)
def test_an_objective_that_is_missed_by_far_burns(
    good_share: float, good: int, bad: int, is_burning: bool
) -> None:
    assert Objective(good_share).is_burning(good, bad) == is_burning


def test_an_operator_may_accept_a_higher_cost() -> None:
    assert plan().cost_limits == (1.10, 1.25)
    assert plan(accept_cost=1.2).cost_limits == (1.2, 1.25)
    assert plan(accept_cost=1.5).cost_limits == (1.5, 1.5)


def test_a_route_keeps_excluded_tenants_on_the_stable_version() -> None:
    route = plan(excluded_tenants=("bank",)).route(3, 7, 12.0)
    assert (route.revision, route.valid_until, route.stable) == (7, 12.0, "old")
    assert [route.version_for(tenant, "1", 0.0) for tenant in ("bank", "shop")] == ["old", "new"]


def test_a_users_number_depends_on_tenant_and_user() -> None:
    found = {user_hash(tenant, user) for tenant in ("", "a", "ab") for user in ("", "b", "bc")}
    assert len(found) == 9
    assert user_hash("tenant", "user") == 0xE60F5F1EE0292BF2  # in every process and release
