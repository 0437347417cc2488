"""Tests of a rollout's phases: every order and every verdict in every phase, golden prompts, shadow
copies, freezes, experiments, outages, and the route and view of each."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.rollouts import rollout as module
from ops.rollouts.evidence import RolloutEvidence
from ops.rollouts.judge import RolloutAction, RolloutVerdict
from ops.rollouts.plan import Objective
from ops.rollouts.rollout import (
    AFTER,
    MAX_NOTES,
    MIN_PAIRS,
    SHOWN_NOTES,
    VALID_S,
    Rollout,
    RolloutOrder,
    RolloutRefused,
    RolloutSettings,
    RolloutSight,
)
from transport.rollout_protocol import (
    ENDED_PHASES,
    CandidateReport,
    RolloutPhase,
    ShadowComparison,
    WorkDone,
)
from triolet.config.routes import RouteCaps

from .rollout_cases import COSTS, plan, request, users

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

P = RolloutPhase
NOW = 1000.0
BAKE_S = 60.0
ERRORS = {"errors": Objective(0.99)}
GOLDEN = ("a1", "b2")


def made(
    phase: RolloutPhase = P.PREPARING,
    step: int = 0,
    plan_fields: Mapping[str, object] | None = None,
    **fields: object,
) -> Rollout:
    """Return a rollout that is prepared, in a phase and step."""
    settings: dict[str, Any] = {"model": "chat", "ref": "chat:v2", "golden_every_s": 0.0}
    settings |= fields
    chosen = plan(objectives=ERRORS, **(plan_fields or {}))
    evidence = RolloutEvidence().begin_step(chosen, 0, NOW)
    one = Rollout(id="1", settings=RolloutSettings(**settings), plan=chosen, evidence=evidence)
    one.note_prepared("sha256:2", NOW)
    one.phase = phase
    if step:
        one.evidence = one.evidence.begin_step(chosen, step, NOW)
    return one


def everywhere() -> Iterator[Rollout]:
    """Return rollouts in each phase and each step that it may have."""
    for phase in P:
        steps = {P.PREPARING: (0,), P.SHADOW: (0,), P.CANARY: (1, 2, 3)}.get(phase, (0, 1, 2, 3))
        for step in steps:
            yield made(phase, step)


def at(one: Rollout) -> tuple[RolloutPhase, int]:
    return one.phase, one.evidence.step


def expected_after(order: RolloutOrder, phase: RolloutPhase, step: int) -> tuple[P, int] | None:
    """Return where an order leads; None if it is refused."""
    if order is RolloutOrder.ROLLBACK:
        return P.ROLLED_BACK, step
    if order is RolloutOrder.PAUSE:
        return (P.PAUSED, step) if phase in (P.SHADOW, P.CANARY) else None
    if phase is P.PREPARING:
        return None
    if step == 3:
        return P.PROMOTED, 3
    return P.CANARY, step + 1 if order is RolloutOrder.PROMOTE else 3


@pytest.mark.parametrize("order", RolloutOrder)
@pytest.mark.parametrize("one", [*everywhere()], ids=lambda one: f"{one.phase}-{one.evidence.step}")
def test_every_order_in_every_phase(one: Rollout, order: RolloutOrder) -> None:
    one = copy.deepcopy(one)
    before = msgspec.json.encode(one)
    expected = None if one.phase in ENDED_PHASES else expected_after(order, *at(one))
    if expected is None:
        with pytest.raises(RolloutRefused, match=r"takes .* only while it is"):
            one.order(order, "user:ada", NOW + 5)
        assert msgspec.json.encode(one) == before, "nothing has changed"
        return
    one.order(order, "user:ada", NOW + 5)
    assert at(one) == expected
    note = one.history[-1]
    assert (note.phase, note.step, note.actor, note.at) == (*expected, "user:ada", NOW + 5)


VERDICTS = (
    ("hold", 0, {}),
    ("advance", 1, {P.PREPARING: P.CANARY, P.SHADOW: P.CANARY, P.CANARY: P.CANARY}),
    ("rollback", 0, dict.fromkeys((P.PREPARING, P.SHADOW, P.CANARY, P.PAUSED), P.ROLLED_BACK)),
    ("pause", 0, {P.SHADOW: P.PAUSED, P.CANARY: P.PAUSED}),
)


@pytest.mark.parametrize(("action", "by", "then"), VERDICTS)
@pytest.mark.parametrize("phase", P)
def test_every_verdict_in_every_phase(
    phase: RolloutPhase,
    action: RolloutAction,
    by: int,
    then: dict[P, P],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = 0 if phase in (P.PREPARING, P.SHADOW) else 2
    one = made(phase, step)
    one.shadow = ShadowComparison(pairs=MIN_PAIRS)
    verdict = RolloutVerdict(action, "passed", "why", to_step=step + 1 if by else 0)
    monkeypatch.setattr(module, "judge", lambda *_: verdict)
    monkeypatch.setattr(module, "alarm", lambda *_: verdict if action == "rollback" else None)
    if phase is P.PREPARING and action == "pause":
        return  # the judge pauses no step without requests to the candidate
    one.look(RolloutSight(NOW + 5))
    assert at(one) == (then.get(phase, phase), step + by if phase in then else step)


def test_a_paused_rollout_keeps_its_share_and_only_alarms_change_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = made(P.PAUSED, 2)
    one.look(RolloutSight(NOW + 10_000))
    assert at(one) == (P.PAUSED, 2)
    route = one.route(NOW)
    assert route is not None
    assert route.shares["new"] == 0.5
    back = RolloutVerdict("rollback", "both bad", "both", to_step=1)
    monkeypatch.setattr(module, "alarm", lambda *_: back)
    one.look(RolloutSight(NOW + 10_001))
    assert at(one) == (P.PAUSED, 1), "one step back"


def test_the_last_step_lasts_as_long_as_the_old_version_is_kept() -> None:
    one = made(P.CANARY, 3, {"min_requests": 1, "min_buckets": 1}, retention_s=600.0)
    [user] = [next(users(one.plan, "new"))]
    one.look(RolloutSight(NOW + 1, [request(user, "new", NOW + 0.5)]))
    one.look(RolloutSight(NOW + 100))
    assert at(one) == (P.CANARY, 3)
    assert "old stays loaded for 600 s in all" in one.said
    one.look(RolloutSight(NOW + 600))
    assert at(one) == (P.PROMOTED, 3)


def test_without_traffic_a_step_pauses_and_says_what_it_lacks() -> None:
    one = made(P.CANARY, 1)
    one.look(RolloutSight(NOW + 3599))
    assert one.phase is P.CANARY
    one.look(RolloutSight(NOW + 3600))
    assert one.phase is P.PAUSED
    assert one.said == (
        "step 1 has lasted 3600 s: new has had 0 requests from 0 buckets of users; it needs 200 "
        "from 20"
    )


def test_a_fresh_rollout_waits_for_golden_answers_and_says_so() -> None:
    one = made(golden_every_s=30.0)
    one.look(RolloutSight(NOW + BAKE_S))
    assert at(one) == (P.PREPARING, 0)
    assert one.said == "new has not answered the golden prompts yet"
    one.look(RolloutSight(NOW + BAKE_S, reports={"server/1": CandidateReport(GOLDEN)}))
    assert at(one) == (P.CANARY, 1)
    assert one.golden == GOLDEN
    assert "a step of 10% needs about" in one.said, "the forecast"


def test_golden_prompts_that_nothing_answers_end_it() -> None:
    one = made(golden_every_s=30.0)
    one.look(RolloutSight(NOW + 3600))
    assert at(one) == (P.ROLLED_BACK, 0)
    assert one.said == "new has not answered the golden prompts yet, in 3600 s"


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (CandidateReport(("a1", "c3")), "changed its answer to a golden prompt at server"),
        (CandidateReport(("a1",)), "changed its answer to a golden prompt at server"),
    ],
)
@pytest.mark.parametrize("phase", [P.PREPARING, P.CANARY, P.PAUSED])
def test_another_golden_answer_at_any_server_and_time_rolls_back(
    phase: RolloutPhase, report: CandidateReport, said: str
) -> None:
    one = made(phase, int(phase is not P.PREPARING), golden_every_s=30.0)
    one.look(RolloutSight(NOW + 1, reports={"server/1": CandidateReport(GOLDEN)}))
    assert one.phase is phase
    both = {"server/1": CandidateReport(GOLDEN), "server/2": report}
    one.look(RolloutSight(NOW + 2, reports=both))
    assert one.phase is P.ROLLED_BACK
    assert said in one.said


def test_a_golden_prompt_that_fails_counts_only_before_the_first_answers() -> None:
    failed = {"server/2": CandidateReport(golden_error="503")}
    one = made(golden_every_s=30.0)
    one.look(RolloutSight(NOW + 1, reports=failed))
    assert one.phase is P.ROLLED_BACK
    assert "golden prompts to new failed: 503" in one.said
    busy = made(P.CANARY, 1, golden_every_s=30.0)
    busy.look(RolloutSight(NOW + 1, reports={"server/1": CandidateReport(GOLDEN)}))
    busy.look(RolloutSight(NOW + 2, reports=failed))
    assert busy.phase is P.CANARY


def test_servers_that_first_answer_at_once_must_agree() -> None:
    one = made(golden_every_s=30.0)
    reports = {"a": CandidateReport(GOLDEN), "b": CandidateReport(("a1", "x"))}
    one.look(RolloutSight(NOW + 1, reports=reports))
    assert one.phase is P.ROLLED_BACK


def shadow_look(one: Rollout, now: float, *parts: ShadowComparison) -> None:
    reports = {f"s{n}": CandidateReport(shadow=part) for n, part in enumerate(parts)}
    one.look(RolloutSight(now, reports=reports))


def test_shadow_copies_come_before_the_first_step() -> None:
    one = made(shadow_share=0.1)
    one.look(RolloutSight(NOW + 1))
    assert at(one) == (P.SHADOW, 0)
    assert (one.view().shadow_share, one.route(NOW)) == (0.1, None)
    part = ShadowComparison(pairs=12, tokens=(3, 4), ttft_s=(0.5, 0.25), failed=1)
    shadow_look(one, NOW + 2 * BAKE_S, part)
    assert at(one) == (P.SHADOW, 0)
    assert one.said == "12 shadow copies were compared, 1 failed; 20 are needed"
    shadow_look(one, NOW + 2 * BAKE_S + 1, part, part)
    assert at(one) == (P.CANARY, 1)
    assert one.shadow == ShadowComparison(pairs=24, tokens=(6, 8), ttft_s=(1.0, 0.5), failed=2)
    assert one.view().shadow_share == 0.0


def test_shadow_copies_that_fail_roll_back_and_too_few_pause() -> None:
    one = made(P.SHADOW, shadow_share=0.1)
    shadow_look(one, NOW + BAKE_S, ShadowComparison(pairs=20, failed=20))
    assert one.phase is P.ROLLED_BACK
    one = made(P.SHADOW, shadow_share=0.1)
    one.look(RolloutSight(NOW + 3600))
    assert one.phase is P.PAUSED
    assert "20 are needed" in one.said


def test_a_freeze_holds_a_rollout_that_may_still_roll_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for phase, step in ((P.PREPARING, 0), (P.SHADOW, 0), (P.CANARY, 1), (P.CANARY, 3)):
        one = made(phase, step)
        one.look(RolloutSight(NOW + 10_000, freezes=["zone b is lost", "the budget is spent"]))
        assert at(one) == (phase, step)
        assert one.said == "frozen: the budget is spent; zone b is lost"
    verdict = RolloutVerdict("rollback", "guard", "bad")
    monkeypatch.setattr(module, "alarm", lambda *_: verdict)
    one.look(RolloutSight(NOW + 10_001, freezes=["zone b is lost"]))
    assert one.phase is P.ROLLED_BACK


def test_a_freeze_is_no_time_of_a_step() -> None:
    easy = {"min_requests": 1, "min_buckets": 1, "shares": (0.3, 1.0)}
    one = made(P.CANARY, 1, easy)
    user = next(users(one.plan, "new"))
    for now in range(int(NOW), int(NOW) + 10_000, 50):
        one.look(RolloutSight(now, freezes=["zone b is lost"]))
    one.look(RolloutSight(now + 1))
    assert at(one) == (P.CANARY, 1), "neither late nor baked"
    assert one.said == "step 1 has run for 1 of 60 s"
    one.look(RolloutSight(now + 2, [request(user, "new", NOW + 10)]))
    assert one.evidence.canary == [1, 1], "requests count"
    one.look(RolloutSight(now + BAKE_S))
    assert at(one) == (P.CANARY, 2)


def test_a_freeze_is_no_time_of_the_first_and_the_last_step() -> None:
    last = made(P.CANARY, 3, {"min_requests": 1, "min_buckets": 1}, retention_s=600.0)
    user = next(users(last.plan, "new"))
    first, shadow = made(golden_every_s=30.0), made(P.SHADOW, shadow_share=0.1)
    for one in (first, shadow, last):
        one.look(RolloutSight(NOW + 10_000, freezes=["zone b is lost"]))
    first.look(RolloutSight(NOW + 10_001))
    assert first.phase is P.PREPARING, "golden prompts are not late"
    shadow.look(RolloutSight(NOW + 10_000 + BAKE_S))
    assert shadow.phase is P.SHADOW
    last.look(RolloutSight(NOW + 10_599, [request(user, "new", NOW + 10_100)]))
    assert last.phase is P.CANARY
    last.look(RolloutSight(NOW + 10_600))
    assert last.phase is P.PROMOTED


def test_no_shadow_copies_begin_in_a_freeze() -> None:
    one = made(shadow_share=0.1)
    one.look(RolloutSight(NOW + 1, freezes=["zone b is lost"]))
    assert (at(one), one.said) == ((P.PREPARING, 0), "frozen: zone b is lost")
    one.look(RolloutSight(NOW + 2))
    assert one.phase is P.SHADOW


def test_a_rollout_despite_freezes_goes_on() -> None:
    one = made(ignores_freezes=True)
    one.look(RolloutSight(NOW + BAKE_S, freezes=["the budget is spent"]))
    assert at(one) == (P.CANARY, 1)


@pytest.mark.parametrize("ignores_freezes", [False, True])
def test_what_cannot_be_written_does_not_go_on_but_may_roll_back(
    monkeypatch: pytest.MonkeyPatch, *, ignores_freezes: bool
) -> None:
    monkeypatch.setattr(module, "judge", lambda *_: RolloutVerdict("advance", "step", "good"))
    one = made(P.CANARY, 1, ignores_freezes=ignores_freezes)
    one.look(RolloutSight(NOW + 1, trouble="disk full"))
    assert (one.evidence.step, one.said) == (1, "frozen: the rollout cannot be written: disk full")
    fresh = made(shadow_share=0.1, ignores_freezes=ignores_freezes)
    fresh.look(RolloutSight(NOW + 1, trouble="disk full"))
    assert fresh.phase is P.PREPARING
    monkeypatch.setattr(module, "alarm", lambda *_: RolloutVerdict("rollback", "guard", "bad"))
    one.look(RolloutSight(NOW + 2, trouble="disk full"))
    assert one.phase is P.ROLLED_BACK


def test_an_experiment_shows_the_verdict_and_ends_by_orders_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = made(P.CANARY, 1, {"shares": (0.3, 1.0)}, is_experiment=True)
    for action in ("advance", "rollback", "pause", "hold"):
        verdict = RolloutVerdict(action, "step", "p is 0.001", to_step=0)
        monkeypatch.setattr(module, "judge", lambda *_, verdict=verdict: verdict)
        one.look(RolloutSight(NOW + 10_000))
        assert at(one) == (P.CANARY, 1)
        assert one.said == f"experiment; the verdict would be {action}: p is 0.001"
    one.order(RolloutOrder.PROMOTE, "user:ada", NOW + 10_001)
    assert at(one) == (P.CANARY, 2)
    monkeypatch.setattr(module, "judge", lambda *_: RolloutVerdict("rollback", "guard", "bad"))
    one.look(RolloutSight(NOW + 10_002))
    assert one.phase is P.ROLLED_BACK, "with all requests the guard counts"


def test_tests_at_the_end_of_a_step_are_kept_and_few() -> None:
    fields = {"shares": (0.3, 1.0), "min_requests": 1, "min_buckets": 1}
    one = made(P.CANARY, 1, fields, is_experiment=True)
    new, old = next(users(one.plan, "new")), next(users(one.plan, "old"))
    for number in range(1, 6):
        now = NOW + number * (BAKE_S + 1)
        both = [request(new, "new", now - 1), request(old, "old", now - 1)]
        one.look(RolloutSight(now, both))
    assert [look.at for look in one.evidence.looks] == [now - BAKE_S - 1, now]


def test_servers_without_a_route_for_long_have_the_step_judged_again() -> None:
    one = made(P.CANARY, 2)
    user = next(users(one.plan, "old", "new"))
    one.look(RolloutSight(NOW + 1, [request(user, "new", NOW)]))
    one.evidence.was_good["errors"] = False
    one.resume(NOW + 1, NOW + 1 + VALID_S)
    assert one.evidence.tallies, "servers have kept the route"
    one.resume(NOW + 1, NOW + 1.1 + VALID_S)
    assert (one.evidence.tallies, one.evidence.began_at) == ({}, NOW + 1.1 + VALID_S)
    assert at(one) == (P.CANARY, 2)
    assert one.evidence.was_good == {"errors": False}, "before the step"


def test_costs_are_compared_in_slots_of_ten_seconds() -> None:
    one = made(P.CANARY, 1, {"costs": COSTS})

    def worked(slot: int, stable_s: float, canary_s: float) -> None:
        steps = 100 * slot
        work = WorkDone(stable_s, steps), WorkDone(canary_s, steps)
        one.look(RolloutSight(10.0 * slot + 5, work=work))

    for slot, stable_s, canary_s in ((100, 10, 10), (101, 11, 12), (102, 12, 14), (104, 14, 18)):
        worked(slot, stable_s, canary_s)
    assert one.evidence.cost.batches == 2, "one slot was missed"
    worked(105, 0.5, 19)
    assert one.evidence.cost.batches == 2, "a worker was restarted"
    worked(106, 1.5, 21)
    assert one.evidence.cost.batches == 3
    assert one.evidence.cost.total == pytest.approx(3 * 0.6931, abs=1e-3)
    worked(106, 2.5, 25)
    assert one.evidence.cost.batches == 3, "the slot is not over"


def test_routes_and_views_follow_the_phase() -> None:
    caps = RouteCaps(streams=3)
    one = made(plan_fields={"caps": caps})
    assert one.route(NOW) is None
    one.order(RolloutOrder.ROLLBACK, "user:ada", NOW)
    assert (one.route(NOW), one.view().share) == (None, 0.0)
    one = made(P.CANARY, 1, {"caps": caps}, golden_every_s=30.0)
    route = one.route(NOW + 7)
    assert route is not None
    assert (route.shares, route.stable) == ({"old": 0.9, "new": 0.1}, "old")
    assert (route.valid_until, route.caps, route.revision) == (NOW + 7, caps, one.revision)
    view = one.view()
    assert (view.share, view.golden_every_s, view.candidate_digest) == (0.1, 30.0, "sha256:2")
    one.order(RolloutOrder.PROMOTE_FULLY, "user:ada", NOW)
    one.order(RolloutOrder.PROMOTE, "user:ada", NOW)
    route = one.route(NOW)
    assert route is not None, "until servers have the permanent one"
    assert (one.phase, route.shares["new"], one.view().golden_every_s) == (P.PROMOTED, 1.0, 0.0)
    one.finish()
    assert (one.route(NOW), one.view().share) == (None, 1.0)


def test_zones_follow_one_another_and_roll_back_together() -> None:
    easy = {"min_requests": 1, "min_buckets": 1}
    one = made(P.CANARY, 2, easy, zones=("b", "a"), retention_s=600.0)

    def shares() -> list[float]:
        zones, view = ("b", "a", "c", ""), one.view()
        routes = [one.route(NOW, zone) for zone in zones]
        if one.is_live:
            told = [view.has_route(zone) for zone in zones]
            assert told == [route is not None for route in routes]
        return [0.0 if route is None else route.shares["new"] for route in routes]

    assert shares() == [0.5, 0.0, 0.0, 0.0]
    one.order(RolloutOrder.PROMOTE, "user:ada", NOW)
    assert shares() == [1.0, 0.0, 0.0, 0.0]
    user = next(users(one.plan, "new"))
    one.look(RolloutSight(NOW + 1, [request(user, "new", NOW + 0.5)]))
    one.look(RolloutSight(NOW + BAKE_S))
    assert (at(one), one.zone, shares()) == ((P.CANARY, 3), 1, [1.0, 1.0, 0.0, 0.0])
    assert one.said == "zone a begins: step 3 has passed"
    assert one.evidence.canary == [0, 0], "of this zone"
    one.look(RolloutSight(NOW + 100, [request(user, "new", NOW + 90)]))
    one.look(RolloutSight(NOW + 500))
    assert at(one) == (P.CANARY, 3)
    back = copy.deepcopy(one)
    back.order(RolloutOrder.ROLLBACK, "user:ada", NOW + 500)
    assert [back.route(NOW, zone) for zone in ("b", "a", "")] == [None] * 3
    one.look(RolloutSight(NOW + 700))
    assert (at(one), shares()) == ((P.PROMOTED, 3), [1.0] * 4)


def test_views_count_the_step_and_the_last_minute() -> None:
    one = made(P.CANARY, 1)
    new, old = next(users(one.plan, "new")), next(users(one.plan, "old"))
    given = [request(new, "new", NOW, is_bad=True), *[request(old, "old", NOW)] * 3]
    one.look(RolloutSight(NOW + 2, given))
    assert one.view().counts == one.view().recent == {"errors": (3, 0, 0, 1)}


def test_history_is_bounded() -> None:
    one = made(P.CANARY, 2)
    for number in range(MAX_NOTES):
        one._go(P.CANARY, 1 + number % 2, f"{number}", NOW + number)
    one._go(P.PAUSED, 2, "last", NOW + 100)
    assert (len(one.history), one.history[-1].said) == (MAX_NOTES, "last")
    assert len(one.view().history) == SHOWN_NOTES
    assert one.view().history[-1].said == "last"


def test_a_candidate_that_cannot_serve_ends_it_once() -> None:
    one = made()
    one.fail("chat-2.decode-0 has died three times", NOW)
    assert at(one) == (P.ROLLED_BACK, 0)
    one.fail("again", NOW)
    one.note_prepared("sha256:3", NOW)
    assert (one.said, one.digest) == ("chat-2.decode-0 has died three times", "sha256:2")


def test_before_the_candidate_is_there_nothing_is_decided() -> None:
    one = made()
    one.is_prepared = False
    one.look(RolloutSight(NOW + 10_000))
    assert at(one) == (P.PREPARING, 0)
    assert one.view().golden_every_s == 0.0


def test_it_survives_a_restart_as_json() -> None:
    one = made(P.CANARY, 1, {"costs": COSTS}, golden_every_s=30.0)
    new, old = next(users(one.plan, "new")), next(users(one.plan, "old"))
    work = WorkDone(1.0, 2), WorkDone(2.0, 3)
    reports = {"s": CandidateReport(GOLDEN, shadow=ShadowComparison(pairs=1))}
    requests = [request(new, "new", NOW, is_bad=True), request(old, "old", NOW)]
    one.look(RolloutSight(NOW + 2, requests, reports=reports, work=work))
    one.order(RolloutOrder.PAUSE, "user:ada", NOW + 3)
    again = msgspec.json.decode(msgspec.json.encode(one), type=Rollout)
    assert again == one


def test_no_phase_follows_the_end() -> None:
    assert {phase for phase, then in AFTER.items() if not then} == ENDED_PHASES


ACTS = st.one_of(
    st.sampled_from(RolloutOrder),
    st.builds(
        RolloutSight,
        now=st.floats(NOW, NOW + 20_000),
        freezes=st.sampled_from([(), ("zone b is lost",)]),
        reports=st.dictionaries(
            st.sampled_from(["a", "b"]),
            st.builds(
                CandidateReport,
                golden=st.sampled_from([(), GOLDEN, ("x",)]),
                golden_error=st.sampled_from(["", "", "", "503"]),
            ),
        ),
    ),
)


@given(st.lists(ACTS, max_size=12), st.booleans(), st.sampled_from([0.0, 30.0]))
def test_whatever_happens_nothing_changes_after_the_end(
    acts: list[Any], is_experiment: bool, golden_every_s: float
) -> None:
    one = made(is_experiment=is_experiment, golden_every_s=golden_every_s)
    end = None
    for act in acts:
        if isinstance(act, RolloutSight):
            one.look(act)
        else:
            with suppress(RolloutRefused):
                one.order(act, "user:ada", NOW)
        if end is not None:
            assert msgspec.json.encode(one) == end
        elif not one.is_live:
            end = msgspec.json.encode(one)
        assert (one.route(NOW) is None) == (one.phase is P.ROLLED_BACK or one.evidence.step == 0)
