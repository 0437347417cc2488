"""Tests of the evidence: which requests, incidents and work count, in which bounds, and that order
and restarts do not matter."""

from __future__ import annotations

import math
from itertools import count, islice
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.rollouts import evidence as module
from ops.rollouts.evidence import (
    RolloutEvidence,
    StepLook,
)
from ops.rollouts.inference import log_factors
from ops.rollouts.judge import judge
from transport.rollout_protocol import FinishedRequest, SeenIncident, WorkDone
from triolet.config.routes import NUM_BUCKETS, user_hash

from .rollout_cases import COSTS, STEP_S, begun, plan, request, users

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ops.rollouts.plan import RolloutPlan

NOW = STEP_S + 10.0
NONE = frozenset[str]()


def fed(
    requests: Iterable[FinishedRequest], step: int = 1, chosen: RolloutPlan | None = None
) -> RolloutEvidence:
    chosen = chosen or plan()
    evidence = begun(chosen, step)
    evidence.add_requests(chosen, requests, NOW)
    return evidence


def restored(evidence: RolloutEvidence) -> RolloutEvidence:
    return msgspec.json.decode(msgspec.json.encode(evidence), type=RolloutEvidence)


def test_requests_are_counted_by_version_and_signal() -> None:
    old, new = next(users(plan(), "old")), next(users(plan(), "new"))
    evidence = fed(
        [request(old, "old"), request(new, "new", is_bad=True), request(new, "new", STEP_S + 2)]
    )
    assert evidence.recent("errors") == (1, 0, 1, 1)
    assert evidence.recent("ttft") == (0, 0, 1, 0), "first requests are cold"
    assert evidence.canary == [2, 1]
    assert evidence.first_bad == {"errors": [0, 1], "ttft": [0, 0]}


def test_a_request_does_not_count_if_its_version_was_chosen_before_the_step() -> None:
    old, new = next(users(plan(), "old")), next(users(plan(), "new"))
    evidence = fed([request(user, "old", STEP_S - 0.1, is_bad=True) for user in (old, new)])
    assert evidence.tallies == {}
    assert evidence.window == {}


def test_a_request_does_not_count_if_its_version_is_not_the_assigned_one() -> None:
    old, new = next(users(plan(), "old")), next(users(plan(), "new"))
    evidence = fed([request(old, "new"), request(new, "old"), request(new, "another")])
    assert evidence.tallies == {}
    assert evidence.canary == [0, 0]


def test_only_buckets_that_the_step_could_move_are_compared() -> None:
    moved, stayed = next(users(plan(), "old", "new")), next(users(plan(), "new", "new"))
    evidence = fed([request(user, "new", is_bad=True) for user in (moved, stayed)], step=2)
    assert evidence.first_bad["errors"] == [0, 1]
    assert evidence.groups("errors") == {(1, 1): [0, 1]}
    assert evidence.canary == [2, 2], "both are evidence of users"


def test_a_bucket_counts_once_however_often_it_fails() -> None:
    old = next(users(plan(), "old"))
    evidence = fed([request(old, "old", STEP_S + at, is_bad=at > 2) for at in range(6)])
    assert evidence.first_bad["errors"] == [1, 0]
    assert evidence.groups("errors") == {(6, 3): [1, 0]}
    assert evidence.recent_bad("errors", is_canary=False) == {old % NUM_BUCKETS: 3}


def test_times_count_from_the_end_of_a_users_first_request() -> None:
    old = next(users(plan(), "old"))
    at_once = [request(old, "old", STEP_S + at, ttft_s=9.0) for at in (0.0, 0.2, 0.9)]
    assert fed(at_once).recent("ttft") == (0, 0, 0, 0)
    later = [request(old, "old", STEP_S + 1.0, ttft_s=ttft_s) for ttft_s in (1.0, 1.1)]
    assert fed(at_once + later).recent("ttft") == (1, 1, 0, 0), "the limit itself is good"


def test_each_user_of_a_bucket_has_a_cold_first_request() -> None:
    user = next(users(plan(), "old"))
    others = (user_hash("tenant", f"other {number}") for number in count())
    other = next(one for one in others if one % NUM_BUCKETS == user % NUM_BUCKETS)
    evidence = fed([request(user, "old"), request(other, "old", STEP_S + 5, ttft_s=9.0)])
    assert evidence.recent("ttft") == (0, 0, 0, 0)
    assert evidence.recent("errors") == (2, 0, 0, 0)
    assert len(evidence.tallies) == 1


def test_a_request_without_a_time_says_nothing_about_it() -> None:
    user = next(users(plan(), "old"))
    lost = FinishedRequest(user, "old", STEP_S + 5, STEP_S + 6, frozenset({"errors"}), {})
    evidence = fed([request(user, "old"), lost])
    assert evidence.recent("errors") == (1, 1, 0, 0)
    assert evidence.recent("ttft") == (0, 0, 0, 0)


def test_the_window_forgets_after_a_minute_and_the_step_does_not() -> None:
    chosen, user = plan(), next(users(plan(), "old"))
    evidence = fed([request(user, "old", is_bad=True)])
    evidence.add_requests(chosen, [], STEP_S + 60.9)
    assert evidence.recent("errors") == (0, 1, 0, 0)
    evidence.add_requests(chosen, [], STEP_S + 61.0)
    assert evidence.recent("errors") == (0, 0, 0, 0)
    assert evidence.window == {}
    assert evidence.groups("errors") == {(1, 1): [1, 0]}
    late = request(user, "old", is_bad=True)
    evidence.add_requests(chosen, [late], STEP_S + 90.0)
    assert evidence.window == {}, "a report may be late"


def test_a_server_whose_clock_is_ahead_adds_no_slots() -> None:
    user = next(users(plan(), "old"))
    evidence = fed([request(user, "old", NOW + ahead) for ahead in range(100)])
    assert list(evidence.window) == [int(NOW)]


def test_a_version_is_judged_without_its_worst_bucket() -> None:
    chosen = plan()
    objective = chosen.objectives["errors"]
    heavy, *others = islice(users(chosen, "old"), 40)
    calm = [request(user, "old", is_bad=False) for user in others]
    one = [request(heavy, "old", STEP_S + at / 10, is_bad=True) for at in range(50)]
    assert objective.is_burning(39, 50)
    assert not fed(calm + one).is_burning("errors", objective, is_canary=False)
    # Without the worst bucket 39 good and 7 bad: 15.2 %, and 14.4 % is the limit.
    some = [request(user, "old", is_bad=True) for user in others[:7]]
    assert fed(calm + one + some).is_burning("errors", objective, is_canary=False)
    assert not fed(calm + one + some[:6]).is_burning("errors", objective, is_canary=False)
    assert not fed(calm + one + some).is_burning("errors", objective, is_canary=True)


def test_a_step_begins_without_evidence_but_with_costs() -> None:
    chosen, user = plan(costs=COSTS), next(users(plan(), "old"))
    evidence = fed([request(user, "old", is_bad=True)], chosen=chosen)
    evidence.add_incidents(chosen, [SeenIncident("w", STEP_S, "old")], 0.1)
    evidence.add_work(COSTS, WorkDone(1.0, 100, 0, 0, 0), WorkDone(2.0, 100, 0, 0, 0))
    evidence.looks.append(StepLook(NOW, 1, {}))
    following = evidence.begin_step(chosen, 2, 200.0)
    assert following == msgspec.structs.replace(
        begun(chosen, 2), began_at=200.0, now=200.0, cost=evidence.cost
    )
    assert following.cost.batches == 1


def test_a_step_remembers_whether_the_stable_version_was_good() -> None:
    chosen = plan()
    failing = [request(user, "old", is_bad=True) for user in islice(users(chosen, "old"), 20)]
    following = fed(failing).begin_step(chosen, 2, NOW)
    assert following.was_good == {"errors": False, "ttft": True}


def test_incidents_of_one_worker_within_ten_seconds_are_one() -> None:
    chosen = plan()
    evidence = begun(chosen)
    times = (100.0, 109.9, 110.0, 131.0)
    evidence.add_incidents(chosen, [SeenIncident("a", at, "new") for at in times], 0.2)
    evidence.add_incidents(chosen, [SeenIncident("b", 105.0, "old")], 0.5)
    evidence.add_incidents(chosen, [SeenIncident("b", 103.0, "old")], 0.5)
    assert evidence.incidents == [1, 3]
    up, down = log_factors(0.2)[1], log_factors(0.5)[0]
    bets = [3 * gain + loss for gain, loss in zip(up, down, strict=True)]
    assert evidence.incident_bets == pytest.approx(bets)


@pytest.mark.parametrize(("at", "share"), [(99.0, 0.2), (100.0, 0.0), (100.0, 1.0)])
def test_an_incident_counts_only_beside_workers_of_the_other_version(
    at: float, share: float
) -> None:
    evidence = begun(plan())
    evidence.add_incidents(plan(), [SeenIncident("a", at, "new")], share)
    assert evidence == begun(plan())


def test_costs_are_compared_for_the_same_work() -> None:
    evidence = begun(plan())
    # Steps cost 10 ms and rows 1 ms: 100 steps of 1 row take 1.1 s, and of 10 rows 2 s.
    evidence.add_work(COSTS, WorkDone(2.0, 100, 1000, 0, 0), WorkDone(1.1, 100, 100, 0, 0))
    assert evidence.cost.total == pytest.approx(0.0)
    evidence.add_work(COSTS, WorkDone(2.0, 100, 1000, 0, 0), WorkDone(2.2, 100, 100, 0, 0))
    assert evidence.cost.total == pytest.approx(math.log(2.0))
    assert evidence.cost.squares == pytest.approx(math.log(2.0) ** 2)
    assert evidence.cost.batches == 2


@pytest.mark.parametrize(
    ("stable", "canary"),
    [
        (WorkDone(1.0, 100, 0, 0, 0), WorkDone(0.04, 4, 0, 0, 0)),
        (WorkDone(0.04, 4, 0, 0, 0), WorkDone(1.0, 100, 0, 0, 0)),
        (WorkDone(1.0, 100, 0, 0, 0), WorkDone(0.0, 100, 0, 0, 0)),
    ],
)
def test_work_that_says_nothing_does_not_count(stable: WorkDone, canary: WorkDone) -> None:
    evidence = begun(plan())
    evidence.add_work(COSTS, WorkDone(1.0, 100, 0, 0, 0), WorkDone(1.1, 100, 0, 0, 0))
    before = restored(evidence)
    evidence.add_work(COSTS, stable, canary)
    assert evidence == before


def test_users_and_workers_beyond_the_bounds_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_USERS", 3)
    monkeypatch.setattr(module, "MAX_WORKERS", 2)
    requests = [
        request(user, "old", STEP_S + at)
        for user in islice(users(plan(), "old"), 5)
        for at in (0.0, 2.0)
    ]
    evidence = fed(requests)
    assert len(evidence.warm_at) == 3
    assert evidence.recent("ttft") == (3, 0, 0, 0), "others' prefixes may be cold"
    assert evidence.recent("errors") == (10, 0, 0, 0)
    evidence.add_incidents(
        plan(), [SeenIncident(name, STEP_S, "old") for name in ("a", "b", "c")], 0.5
    )
    assert evidence.last_incident.keys() == {"a", "b"}
    evidence.add_incidents(plan(), [SeenIncident("a", STEP_S + 20, "old")], 0.5)
    assert evidence.incidents == [3, 0], "known ones still count"


POOL = [*islice(users(plan(), "old"), 4), *islice(users(plan(), "new"), 3)]
TIMES = st.integers(0, 40).map(lambda tenth: STEP_S + tenth / 4)


@st.composite
def some_requests(draw: st.DrawFn) -> FinishedRequest:
    user = draw(st.sampled_from(POOL))
    version = "new" if user in POOL[4:] else "old"
    missed = draw(st.sampled_from((NONE, frozenset({"errors"}))))
    ttft_s = draw(st.sampled_from((0.5, 2.0)))
    at = draw(TIMES)
    return FinishedRequest(user, version, at, at + ttft_s, missed, {"ttft": ttft_s})


INCIDENTS = st.builds(
    SeenIncident,
    st.sampled_from("abc"),
    TIMES,
    st.sampled_from(("old", "new")),
)


@given(
    requests=st.lists(some_requests(), max_size=30),
    incidents=st.lists(INCIDENTS, max_size=6),
    data=st.data(),
)
def test_the_order_within_a_look_decides_nothing(
    requests: list[FinishedRequest], incidents: list[SeenIncident], data: st.DataObject
) -> None:
    chosen = plan(bake_s=5.0, min_requests=1, min_buckets=1)
    evidence = fed(requests, chosen=chosen)
    evidence.add_incidents(chosen, incidents, 0.1)
    shuffled = fed(data.draw(st.permutations(requests)), chosen=chosen)
    shuffled.add_incidents(chosen, data.draw(st.permutations(incidents)), 0.1)
    assert shuffled == evidence
    assert judge(shuffled, chosen) == judge(evidence, chosen)


@given(requests=st.lists(some_requests(), max_size=30), cut=st.integers(0, 30))
def test_a_restart_loses_nothing(requests: list[FinishedRequest], cut: int) -> None:
    chosen = plan(bake_s=5.0, min_requests=5, min_buckets=2)
    first, second = requests[:cut], requests[cut:]
    evidence, stopped = begun(chosen), begun(chosen)
    for one in (evidence, stopped):
        one.add_requests(chosen, first, NOW)
        one.add_incidents(chosen, [SeenIncident("a", STEP_S, "new")], 0.1)
        one.looks.append(StepLook(STEP_S, 7, {"errors": 0.5}))
    stopped = restored(stopped)
    assert stopped == evidence
    for one in (evidence, stopped):
        one.add_requests(chosen, second, NOW + 1.0)
    assert stopped == evidence
    assert judge(stopped, chosen) == judge(evidence, chosen)
