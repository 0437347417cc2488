"""Property tests of the eviction policy with arbitrary models, times and requests."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.control.model_states import HOLDING, RESTING, TRANSITIONS, ModelEvent, after
from ops.control.residency import (
    HOST,
    Fits,
    Later,
    LoadTimes,
    Never,
    Resident,
    held_bytes,
    is_expired,
    make_room,
    may_evict,
    score,
)
from transport.control_protocol import ModelState
from triolet.errors import LocalProtocolError

MIN_S = 60.0
TURN_S = 90.0
NOW = 10_000.0

STATES = st.sampled_from(sorted(ModelState))


def resident(name: str, state: ModelState = ModelState.SERVING, **fields: object) -> Resident:
    plain = Resident(name, state, 10, False, 0, 0.0, 0.0, 1.0)
    return replace(plain, **fields)  # type: ignore[arg-type]


@st.composite
def fleets(draw: st.DrawFn) -> list[Resident]:
    """Draw arbitrary models."""
    return [
        Resident(
            name,
            draw(STATES),
            draw(st.integers(1, 40)),
            draw(st.booleans()),
            draw(st.integers(0, 2)),
            since := draw(st.floats(NOW - 200, NOW)),
            draw(st.floats(since, NOW)),
            draw(st.floats(0.0, 20.0)),
        )
        for name in "abcdef"[: draw(st.integers(1, 6))]
    ]


@given(fleets(), st.integers(1, 120))
def test_room_is_made_within_the_budget_and_by_idle_models_only(
    models: list[Resident], budget: int
) -> None:
    wanted = replace(models[0], state=ModelState.STAGED)
    others = models[1:]
    answer = make_room(wanted, [wanted, *others], {HOST: budget}, NOW, MIN_S)
    pinned = held_bytes(model for model in others if model.is_pinned)
    if wanted.size_bytes + pinned > budget:
        assert answer == Never(wanted.size_bytes, pinned, budget)
        return
    if isinstance(answer, Later):
        # Evicting all idle models would not be enough.
        stays = [one for one in others if not may_evict(one, NOW, MIN_S)]
        stays = [one for one in stays if one.state is not ModelState.DRAINING]
        is_leaving = any(one.state is ModelState.DRAINING for one in others)
        assert is_leaving or wanted.size_bytes + held_bytes(stays) > budget
        assert answer.because
        return
    assert isinstance(answer, Fits)
    evicted = [one for one in others if one.name in answer.evict]
    for one in evicted:
        assert one.state in (ModelState.WARM, ModelState.SERVING)
        assert not one.is_pinned
        assert not one.num_requests
        assert NOW - one.since >= MIN_S
    leaving = [one for one in others if one.state is ModelState.DRAINING]
    gone = evicted + (leaving if evicted else [])
    stay = [one for one in others if one not in gone]
    assert wanted.size_bytes + held_bytes(stay) <= budget
    for one in evicted:  # each of them is needed
        assert wanted.size_bytes + held_bytes([*stay, one]) > budget


@given(fleets(), st.integers(1, 120))
def test_for_a_load_that_comes_first_all_idle_models_end_where_that_is_not_enough(
    models: list[Resident], budget: int
) -> None:
    wanted = replace(models[0], state=ModelState.STAGED)
    usual = make_room(wanted, models, {HOST: budget}, NOW, MIN_S)
    first = make_room(wanted, models, {HOST: budget}, NOW, MIN_S, TURN_S)
    idle = {one.name for one in models[1:] if may_evict(one, NOW, MIN_S)}
    if isinstance(first, Fits) and isinstance(usual, Later):
        assert set(first.evict) == idle != set()
    else:
        assert first == usual


def test_no_idle_model_ends_for_a_load_that_a_busy_one_keeps_out() -> None:
    wanted = resident("large", ModelState.STAGED, size_bytes=80)
    idle, busy = resident("idle"), resident("busy", num_requests=1, size_bytes=30)

    def room(busy_s: float) -> object:
        models = [idle, replace(busy, busy_s=busy_s)]
        return make_room(wanted, models, {HOST: 100}, NOW, MIN_S, TURN_S)

    assert room(89.0) == Fits(("idle",)), "it may be idle within the turn"
    assert room(90.0) == Later(("idle", "busy"))
    small = replace(busy, busy_s=90.0, size_bytes=20)
    assert make_room(wanted, [idle, small], {HOST: 100}, NOW, MIN_S, TURN_S) == Fits(("idle",))


def on_gpus(name: str, state: ModelState, **gpus: int) -> Resident:
    one = Resident(name, state, 10, False, 0, 0.0, 0.0, 1.0, gpu_bytes=gpus)
    return replace(one, since=NOW - 100, last_used_at=NOW - 100)


def test_each_gpu_has_a_budget_of_its_own() -> None:
    on_a, on_b, both = (
        on_gpus("on_a", ModelState.SERVING, a=50),
        on_gpus("on_b", ModelState.SERVING, b=80),
        on_gpus("both", ModelState.SERVING, a=30, b=10),
    )
    others, budgets = [on_a, on_b, both], {HOST: 1000, "a": 100, "b": 100}

    def room(gpus: dict[str, int], *models: Resident) -> object:
        wanted = on_gpus("new", ModelState.STAGED, **gpus)
        return make_room(wanted, models or others, budgets, NOW, MIN_S)

    assert room({"a": 20}) == room({"b": 10}) == room({}) == Fits()
    # Memory of the other GPU does not help.
    assert room({"a": 60}) == Fits(("on_a",))
    assert room({"a": 60, "b": 100}) == Fits(("on_b", "on_a", "both"))
    assert room({"a": 60}, replace(on_a, num_requests=1), on_b) == Later(("on_a", "on_b"))
    assert room({"a": 60}, replace(on_a, is_pinned=True)) == Never(60, 50, 100, "a")
    assert room({"b": 101}) == Never(101, 0, 100, "b")
    wanted = on_gpus("new", ModelState.STAGED, b=100)
    busy = replace(on_b, num_requests=1)
    first = make_room(wanted, [on_a, busy, both], budgets, NOW, MIN_S, TURN_S)
    assert first == Fits(("both",)), "what is on the other GPU alone does not end"
    assert room({"c": 101}) == Fits(), "of a GPU that no worker has told of nothing is known"
    draining = replace(on_a, state=ModelState.DRAINING)
    assert room({"a": 60}, draining, on_b) == Later(("on_a",))


def test_the_longest_idle_largest_and_quickest_model_goes_first() -> None:
    wanted = resident("new", ModelState.STAGED)
    base = resident("base", last_used_at=NOW - 100, size_bytes=10, reload_s=2.0)
    for other in (
        replace(base, name="idle", last_used_at=NOW - 200),
        replace(base, name="large", size_bytes=20),
        replace(base, name="quick", reload_s=1.0),
    ):
        assert score(other, NOW) == 2 * score(base, NOW)
        budget = held_bytes([base, other])
        answer = make_room(wanted, [base, other], {HOST: budget}, NOW, MIN_S)
        assert answer == Fits((other.name,))


def test_keep_alive_ends_idle_models_that_are_not_pinned() -> None:
    idle = resident("idle", last_used_at=NOW - 10, keep_alive_s=10.0)
    assert is_expired(idle, NOW)
    assert not is_expired(idle, NOW - 1)
    assert not is_expired(replace(idle, is_pinned=True), NOW)
    assert not is_expired(replace(idle, num_requests=1), NOW)
    assert not is_expired(replace(idle, keep_alive_s=None), NOW)
    assert not is_expired(replace(idle, state=ModelState.SLEEPING), NOW)


def test_load_times_follow_what_is_measured() -> None:
    times = LoadTimes()
    guess = times.predict("a", ModelState.STAGED, 400_000_000)
    assert guess == pytest.approx(3.0)
    assert times.add("a", ModelState.STAGED, 10.0) == 10.0
    assert times.predict("a", ModelState.SLEEPING, 1) == 10.0
    times.add("a", ModelState.SLEEPING, 1.0)
    for _ in range(20):
        times.add("a", ModelState.SLEEPING, 2.0)
    assert times.predict("a", ModelState.SLEEPING, 1) == pytest.approx(2.0, rel=0.01)
    assert times.predict("a", ModelState.STAGED, 1) == 10.0


@pytest.mark.parametrize(("state", "event"), list(itertools.product(ModelState, ModelEvent)))
def test_a_step_is_in_the_table_or_raises(state: ModelState, event: ModelEvent) -> None:
    if event in TRANSITIONS[state]:
        assert after(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(LocalProtocolError, match=f"{state} got event {event.name}"):
            after(state, event)


def test_every_model_can_end_and_rest_from_every_state_that_holds_memory() -> None:
    for state in HOLDING - {ModelState.DRAINING}:
        assert after(state, ModelEvent.END) is ModelState.DRAINING
    assert {
        after(ModelState.DRAINING, e) for e in (ModelEvent.SLEPT, ModelEvent.UNLOADED)
    } == RESTING
