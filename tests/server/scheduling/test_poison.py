"""Strikes: what isolates a request, what quarantines it, what clears it; refused prompts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.recovery import CLEARING_TOKENS, PoisonDetector, Quarantine, prompt_digest
from triolet.config import RecoveryConfig
from triolet.ids import Role

CONFIG = RecoveryConfig()


def test_one_death_quarantines_nothing() -> None:
    for num_suspects in (1, 2, 20):
        poison = PoisonDetector()
        assert not poison.strike(Role.DECODE, 5, num_suspects)
        assert not poison.isolated


def test_two_deaths_alone_quarantine() -> None:
    poison = PoisonDetector()
    poison.strike(Role.DECODE, 5, 20)
    assert poison.strike(Role.DECODE, 5, 1)


def test_two_deaths_among_others_isolate_and_a_third_quarantines() -> None:
    poison = PoisonDetector()
    poison.strike(Role.DECODE, 5, 20)
    assert not poison.strike(Role.DECODE, 5, 20)
    assert poison.isolated
    assert poison.strike(Role.DECODE, 5, 4)


def test_more_tokens_clear() -> None:
    poison = PoisonDetector()
    poison.strike(Role.DECODE, 5, 2)
    poison.strike(Role.DECODE, 6, 2)
    assert not poison.advanced(5 + CLEARING_TOKENS - 1)
    assert poison.isolated
    assert poison.advanced(5 + CLEARING_TOKENS)
    assert not poison.advanced(5 + CLEARING_TOKENS)
    assert not poison.strike(Role.DECODE, 40, 1)
    assert poison.strikes == 1


def test_a_death_in_the_other_role_is_another_matter() -> None:
    poison = PoisonDetector()
    for role in (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE):
        assert not poison.strike(role, 1, 1)
        assert poison.strikes == 1
    assert poison.strike(Role.DECODE, 1, 1)


def test_deaths_far_apart_in_its_text_are_not_its_doing() -> None:
    poison = PoisonDetector()
    for position in range(0, 100 * CLEARING_TOKENS, CLEARING_TOKENS):
        assert not poison.strike(Role.DECODE, position, 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=40))
def test_quarantine_takes_two_deaths_within_a_few_tokens(events: list[tuple[int, int]]) -> None:
    poison, num_tokens = PoisonDetector(), 0
    struck: list[int] = []
    is_quarantined = False
    for more_tokens, num_suspects in events:
        num_tokens += more_tokens
        if num_suspects == 0:
            poison.advanced(num_tokens)
        elif not is_quarantined:
            struck.append(num_tokens)
            is_quarantined = poison.strike(Role.DECODE, num_tokens, num_suspects)
    if is_quarantined:
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
