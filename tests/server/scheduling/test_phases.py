"""Tests of the request phases: every transition is in the table, and every request can end from any
phase."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.request import TRANSITIONS, Phase, Step, after
from triolet.errors import LocalProtocolError


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("step", Step)
def test_each_step_is_in_the_table_or_raises(phase: Phase, step: Step) -> None:
    following = TRANSITIONS[phase].get(step)
    if following is None:
        with pytest.raises(LocalProtocolError, match=phase.name):
            after(phase, step)
    else:
        assert after(phase, step) is following


def test_end_leads_from_everywhere_to_the_last_phase() -> None:
    for phase in Phase:
        if phase is not Phase.FINISHED:
            assert after(phase, Step.END) is Phase.FINISHED


def test_nothing_leads_out_of_the_last_phase() -> None:
    assert TRANSITIONS[Phase.FINISHED] == {}


def test_every_phase_with_an_attempt_can_begin_again() -> None:
    for phase in (Phase.RESERVING, Phase.PREFILLING, Phase.DECODING, Phase.FINISHING):
        assert after(phase, Step.RETRY) is Phase.QUEUED


@given(st.lists(st.sampled_from(Step), max_size=40))
def test_random_steps_never_leave_the_table_and_end_once(steps: list[Step]) -> None:
    phase, num_ends = Phase.QUEUED, 0
    for step in steps:
        try:
            following = after(phase, step)
        except LocalProtocolError:
            assert step not in TRANSITIONS[phase]
            continue
        num_ends += following is Phase.FINISHED
        phase = following
    assert num_ends <= 1
    assert (num_ends == 1) == (phase is Phase.FINISHED)


def test_every_phase_is_reachable() -> None:
    reached = {Phase.QUEUED}
    for _ in Phase:
        reached |= {following for phase in reached for following in TRANSITIONS[phase].values()}
    assert reached == set(Phase)
