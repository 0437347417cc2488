"""Suspicion: every cell of the table, who is convicted and who never is; refused prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.poison import (
    CLEARING_TOKENS,
    TRANSITIONS,
    Finding,
    Standing,
    Suspicion,
    next_standing,
)
from server.scheduling.recovery import Quarantine, prompt_digest
from triolet.config import RecoveryConfig
from triolet.errors import LocalProtocolError
from triolet.ids import Role

S, F = Standing, Finding
CONFIG = RecoveryConfig()


@pytest.mark.parametrize(("standing", "finding"), [(s, f) for s in S for f in F])
def test_each_step_is_in_the_table_or_an_error(standing: Standing, finding: Finding) -> None:
    following = TRANSITIONS[standing].get(finding)
    if following is None:
        with pytest.raises(LocalProtocolError):
            next_standing(standing, finding)
    else:
        assert next_standing(standing, finding) is following


def test_everybody_can_be_cleared_but_a_convict_and_every_standing_is_reachable() -> None:
    for standing in set(S) - {S.CONVICTED}:
        assert TRANSITIONS[standing][F.CLEARED] is S.CLEAN
    assert TRANSITIONS[S.CONVICTED] == {}
    assert {s for row in TRANSITIONS.values() for s in row.values()} == set(S)


def test_nobody_is_convicted_of_one_death() -> None:
    for num_suspects in (1, 2, 20):
        assert Suspicion().struck(Role.DECODE, 5, num_suspects) is S.SUSPECT


def test_two_deaths_alone_convict() -> None:
    suspicion = Suspicion()
    suspicion.struck(Role.DECODE, 5, 20)
    assert suspicion.struck(Role.DECODE, 5, 1) is S.CONVICTED


def test_two_deaths_among_others_lead_to_probation_and_a_third_convicts() -> None:
    suspicion = Suspicion()
    suspicion.struck(Role.DECODE, 5, 20)
    suspicion.struck(Role.DECODE, 5, 20)
    assert suspicion.is_on_probation
    assert suspicion.struck(Role.DECODE, 5, 4) is S.CONVICTED


def test_whoever_gets_on_is_cleared() -> None:
    suspicion = Suspicion()
    suspicion.struck(Role.DECODE, 5, 2)
    suspicion.struck(Role.DECODE, 6, 2)
    assert not suspicion.advanced(5 + CLEARING_TOKENS - 1)
    assert suspicion.is_on_probation
    assert suspicion.advanced(5 + CLEARING_TOKENS)
    assert not suspicion.advanced(5 + CLEARING_TOKENS)
    assert suspicion.struck(Role.DECODE, 40, 1) is S.SUSPECT


def test_a_death_in_the_other_role_is_another_matter() -> None:
    suspicion = Suspicion()
    for role in (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE):
        assert suspicion.struck(role, 1, 1) is S.SUSPECT
    assert suspicion.struck(Role.DECODE, 1, 1) is S.CONVICTED


def test_deaths_far_apart_in_its_text_are_not_its_doing() -> None:
    suspicion = Suspicion()
    for position in range(0, 100 * CLEARING_TOKENS, CLEARING_TOKENS):
        assert suspicion.struck(Role.DECODE, position, 1) is S.SUSPECT


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=40))
def test_conviction_takes_two_deaths_within_a_few_tokens(events: list[tuple[int, int]]) -> None:
    suspicion, num_tokens = Suspicion(), 0
    struck: list[int] = []
    for more_tokens, num_suspects in events:
        num_tokens += more_tokens
        if num_suspects == 0:
            suspicion.advanced(num_tokens)
        elif suspicion.standing is not S.CONVICTED:
            struck.append(num_tokens)
            suspicion.struck(Role.DECODE, num_tokens, num_suspects)
    if suspicion.standing is S.CONVICTED:
        assert len(struck) >= 2
        assert struck[-1] - struck[-2] < CLEARING_TOKENS


def test_a_prompt_is_refused_for_its_time() -> None:
    quarantine = Quarantine(CONFIG, prompt_digest)
    quarantine.add((1, 2, 3), 10.0)
    assert quarantine.remaining_s((1, 2, 3), 11.0) == CONFIG.quarantine_s - 1.0
    assert quarantine.remaining_s((1, 2), 11.0) is None
    assert quarantine.remaining_s((1, 2, 3), 10.0 + CONFIG.quarantine_s) is None
    assert len(quarantine) == 0


def test_the_oldest_prompt_goes_first_at_the_bound() -> None:
    quarantine = Quarantine(replace(CONFIG, max_quarantined=2), prompt_digest)
    for number in (1, 2, 1, 3):
        quarantine.add((number,), float(number))
    assert len(quarantine) == 2
    assert quarantine.remaining_s((2,), 5.0) is None
    assert quarantine.remaining_s((1,), 5.0) is not None
    assert quarantine.remaining_s((3,), 5.0) is not None
