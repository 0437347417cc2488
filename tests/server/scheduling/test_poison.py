"""Tests of strikes against requests whose workers died: what isolates, convicts and clears a
request, and which prompts are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.poison import CLEARING_TOKENS, PoisonDetector
from server.scheduling.recovery import Quarantine
from triolet.config import RecoveryConfig
from triolet.ids import Role
from triolet.service_class import Scheduling

from .fakes import make_request

if TYPE_CHECKING:
    from server.contract.generation import GenerationRequest

CONFIG = RecoveryConfig()


def died(poison: PoisonDetector, num_tokens: int, num_suspects: int, event: object) -> bool:
    """Strike a request and report the death of the process; return whether that convicts it."""
    poison.strike(Role.DECODE, num_tokens, num_suspects, event)
    return poison.settle(event, has_died=True)


@pytest.mark.parametrize(
    ("suspects", "convicted", "isolated"),
    [
        ([1], [False], False),
        ([2], [False], False),
        ([20], [False], False),
        ([20, 1], [False, True], True),
        ([1, 1, 1, 1], [False, True, False, False], True),
    ],
    ids=["one alone", "one of two", "one of many", "two", "told once"],
)
def test_two_deaths_convict_once_and_one_convicts_nothing(
    suspects: list[int], convicted: list[bool], isolated: bool
) -> None:
    poison = PoisonDetector()
    deaths = enumerate(suspects)
    assert [died(poison, 5, num_suspects, event) for event, num_suspects in deaths] == convicted
    assert poison.isolated is isolated


def test_two_deaths_among_others_isolate_and_a_third_convicts() -> None:
    poison = PoisonDetector()
    died(poison, 5, 20, "first")
    assert not died(poison, 5, 20, "second")
    assert poison.isolated
    assert not poison.is_blamed
    assert died(poison, 5, 4, "third")


def test_a_third_strike_of_a_process_that_lives_convicts_nothing() -> None:
    poison = PoisonDetector()
    died(poison, 5, 20, "first")
    died(poison, 5, 20, "second")
    poison.strike(Role.DECODE, 5, 1, "a broken link")
    assert poison.is_blamed
    assert not poison.is_convicted
    assert not poison.settle("a broken link", has_died=False)
    assert not poison.is_convicted


@pytest.mark.parametrize("num_strikes", range(1, 8))
def test_nothing_is_convicted_before_it_is_known_that_processes_died(num_strikes: int) -> None:
    poison = PoisonDetector()
    for event in range(num_strikes):
        poison.strike(Role.DECODE, 5, 1, event)
    assert not poison.is_convicted
    assert not died(poison, 5, 1, "a death")
    assert not poison.is_convicted
    assert died(poison, 5, 1, "another death")


def test_a_strike_of_a_process_that_lives_is_taken_back() -> None:
    poison = PoisonDetector()
    died(poison, 5, 1, "a death")
    poison.strike(Role.DECODE, 5, 1, "a broken link")
    assert poison.is_blamed
    assert not poison.settle("a broken link", has_died=False)
    assert len(poison.strikes) == 1
    assert not poison.isolated
    assert not poison.is_blamed
    assert died(poison, 5, 1, "another death")


def test_more_tokens_clear() -> None:
    poison = PoisonDetector()
    poison.strike(Role.DECODE, 5, 2, 1)
    poison.strike(Role.DECODE, 6, 2, 2)
    assert not poison.advanced(5 + CLEARING_TOKENS - 1)
    assert poison.isolated
    assert poison.advanced(5 + CLEARING_TOKENS)
    assert not poison.advanced(5 + CLEARING_TOKENS)
    poison.settle(1, has_died=True)
    assert not died(poison, 40, 1, 3)
    assert len(poison.strikes) == 1


def test_a_death_in_the_other_role_is_another_matter() -> None:
    poison = PoisonDetector()
    for event, role in enumerate((Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE)):
        poison.strike(role, 1, 1, event)
        assert not poison.settle(event, has_died=True)
        assert len(poison.strikes) == 1
    assert died(poison, 1, 1, "one more")


def test_deaths_far_apart_in_its_text_are_not_its_doing() -> None:
    poison = PoisonDetector()
    for position in range(0, 100 * CLEARING_TOKENS, CLEARING_TOKENS):
        assert not died(poison, position, 1, position)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.booleans()), max_size=40),
)
def test_conviction_takes_two_deaths_within_a_few_tokens(
    events: list[tuple[int, int, bool]],
) -> None:
    poison, num_tokens = PoisonDetector(), 0
    deaths: list[int] = []
    is_convicted = False
    for event, (more_tokens, num_suspects, has_died) in enumerate(events):
        num_tokens += more_tokens
        if num_suspects == 0:
            poison.advanced(num_tokens)
        elif not is_convicted:
            deaths += [num_tokens] if has_died else []
            poison.strike(Role.DECODE, num_tokens, num_suspects, event)
            is_convicted = poison.settle(event, has_died=has_died)
    if is_convicted:
        assert len(deaths) >= 2
        assert deaths[-1] - deaths[-2] < CLEARING_TOKENS


def asked(prompt: str, tenant: str = "") -> GenerationRequest:
    return make_request(prompt=prompt, scheduling=Scheduling(tenant=tenant))


def prompt_of(request: GenerationRequest) -> bytes:
    return bytes(request.prompt_ids)


def test_a_prompt_is_refused_for_its_time() -> None:
    quarantine = Quarantine(CONFIG, prompt_of)
    quarantine.add(asked("abc"), 10.0)
    assert quarantine.refuses(asked("abc"), math.nextafter(10.0 + CONFIG.quarantine_s, 0.0))
    assert not quarantine.refuses(asked("ab"), 11.0)
    assert not quarantine.refuses(asked("abc"), 10.0 + CONFIG.quarantine_s)
    assert len(quarantine) == 0


def test_a_prompt_is_refused_to_the_tenant_whose_requests_it_was_convicted_for() -> None:
    quarantine = Quarantine(CONFIG, prompt_of)
    quarantine.add(asked("abc", "a"), 10.0)
    assert quarantine.refuses(asked("abc", "a"), 11.0)
    assert not quarantine.refuses(asked("abc", "b"), 11.0)
    assert not quarantine.refuses(asked("abc"), 11.0)


def test_the_oldest_prompt_goes_first_at_the_bound() -> None:
    quarantine = Quarantine(replace(CONFIG, max_quarantined=2), prompt_of)
    for at, prompt in enumerate(("1", "2", "1", "3")):
        quarantine.add(asked(prompt), float(at))
    assert len(quarantine) == 2
    assert not quarantine.refuses(asked("2"), 5.0)
    assert quarantine.refuses(asked("1"), 5.0)
    assert quarantine.refuses(asked("3"), 5.0)


def test_a_tenant_with_many_prompts_in_quarantine_flushes_its_own() -> None:
    quarantine = Quarantine(replace(CONFIG, max_quarantined=4), prompt_of)
    quarantine.add(asked("of a quiet tenant", "quiet"), 0.0)
    for at in range(1, 50):
        quarantine.add(asked(f"{at}", "loud"), float(at))
    assert len(quarantine) == 4
    assert quarantine.refuses(asked("of a quiet tenant", "quiet"), 50.0)
    assert quarantine.refuses(asked("49", "loud"), 50.0)
    assert not quarantine.refuses(asked("1", "loud"), 50.0)
    assert not quarantine.refuses(asked("49", "loud"), CONFIG.quarantine_s + 49.0)
    assert len(quarantine) == 0
