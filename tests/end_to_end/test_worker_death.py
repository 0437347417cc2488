"""Tests that a crash of any process only delays answers and does not change them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest
import trio

from loadtest.campaign.answers import draw_asks, lengthened
from loadtest.campaign.client import ask_all
from loadtest.campaign.faults import ask_under_faults, wait_whole
from loadtest.harness.servers import FleetLog
from loadtest.kills import SERVER_KILL, Verdict, judge
from loadtest.soak import SERVE_OPTIONS, STALL_TIMEOUT_S, Soak, SoakPlan

from . import paced
from .conftest import PATIENT
from .fleet_process import PATIENCE_S, wait_until
from .tenants import (
    NAMED,
    OPERATOR,
    check_charges,
    check_usage,
    headers_of,
    key_of,
    write_tenants,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from loadtest.campaign.answers import Answer, Ask
    from loadtest.campaign.client import Story

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

PAYING = ("alice", "bob")
SOAK_S, SOAK_WHOLE_S = 5.0, 60.0
"""Durations with a fault every two seconds: two kinds of faults, or all."""
ASKS = 12
CANCELS = 3
CLIENTS = 12
LONGEST, LONGEST_WHOLE = 60, 480
LAST_MOMENT = 0.3
MAX_JITTER_S = 0.1
"""Early faults, so that most requests are still running."""


def asks_of_all_lengths(seed: int, whole: bool) -> list[Ask]:
    """Return requests with answers of different lengths: when the first few have ended, the others
    still run for long, also on a fast machine."""
    asks = draw_asks(ASKS, seed)
    longest = LONGEST_WHOLE if whole else LONGEST
    return [lengthened(ask, longest * n // ASKS) for n, ask in enumerate(asks, start=1)]


def command_of(whole: bool) -> Sequence[str] | None:
    """Return the command that runs `triolet`: answers of either form take as long."""
    return None if whole else paced.COMMAND


async def answers_in_peace(
    fleet: FleetProcess, asks: list[Ask], told: list[Story], key: str = ""
) -> dict[int, Answer]:
    await wait_whole(fleet.url, FleetLog(fleet.log_path), key)
    stories = await ask_all(fleet.url, asks, CLIENTS, lambda _: None)
    told += stories
    assert [story.failure for story in stories] == [None] * len(asks)
    return {story.ask.number: story.answer for story in stories if story.answer is not None}


async def verdict_under(
    fault: str,
    fleet: FleetProcess,
    asks: list[Ask],
    expected: dict[int, Answer],
    told: list[Story],
    key: str = "",
) -> Verdict:
    """Send the same requests again while one process is killed."""
    log = FleetLog(fleet.log_path)
    rng = Random(fault)
    is_server = fault == SERVER_KILL
    run = await ask_under_faults(
        fleet.url,
        log,
        asks,
        CLIENTS,
        [fault],
        rng,
        retries_broken=is_server,
        last_moment=LAST_MOMENT,
        max_jitter_s=MAX_JITTER_S,
        key=key,
    )
    assert len(run.injected) == 1
    told += run.stories
    verdict = Verdict("float32", fault, run.injected, len(asks))
    judge(verdict, run.stories, expected, log.entries())
    return verdict


def cancel_streams(fleet: FleetProcess) -> None:
    """Close the connections of some running streams."""
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    for _ in range(CANCELS):
        with fleet.client.stream(
            "POST", "/v1/completions", json=body, headers=headers_of(OPERATOR)
        ) as answer:
            next(answer.iter_lines())
    num_cancelled = partial(fleet.metric, "triolet_requests_total", outcome="client_gone")
    wait_until(lambda: num_cancelled() == CANCELS, PATIENCE_S, "the streams are cancelled")


@pytest.mark.long
@pytest.mark.proof
def test_one_process_after_the_other_is_killed_and_every_answer_stays_the_same(
    start_fleet: Callable[..., FleetProcess], tmp_path: Path, whole: bool
) -> None:
    tenants = write_tenants(tmp_path / "tenants.toml", dict.fromkeys(PAYING, ""))
    key = key_of(OPERATOR)
    options = ("--tenants", str(tenants), "--usage-dir", str(tmp_path / "usage"), *NAMED)
    fleet = start_fleet(*options, key=key, command=command_of(whole))
    asks = [
        replace(ask, key=key_of(PAYING[ask.number % 2])) for ask in asks_of_all_lengths(5, whole)
    ]
    told: list[Story] = []
    expected = trio.run(answers_in_peace, fleet, asks, told, key)
    for fault in ("decode-kill", "prefill-kill", SERVER_KILL):
        if fault == SERVER_KILL:  # a killed server loses part of its counts, and its clients retry
            cancel_streams(fleet)
            check_charges(fleet, PAYING, told)
            check_usage(fleet, tmp_path / "usage")
        verdict = trio.run(verdict_under, fault, fleet, asks, expected, told, key)
        assert verdict.failed == verdict.inexact == []
        # Prompts take milliseconds, so a kill of prefill may miss all of them.
        assert verdict.hit or fault == "prefill-kill"
    fleet.wait_all_blocks_free()


@pytest.mark.promise
@pytest.mark.long
@pytest.mark.proof
def test_a_death_costs_each_stream_one_attempt(
    start_fleet: Callable[..., FleetProcess], whole: bool
) -> None:
    fleet = start_fleet(*PATIENT, "--decode", "2", command=command_of(whole))
    asks = asks_of_all_lengths(6, whole)
    expected = trio.run(answers_in_peace, fleet, asks, [])

    verdict = trio.run(verdict_under, "decode-kill", fleet, asks, expected, [])

    assert verdict.wrongs == []
    failed = {s.labels["cause"]: s.value for s in fleet.samples("triolet_attempts_failed_total")}
    # A worker reports "unknown" for an attempt named by a heartbeat before its RESERVE arrives.
    assert "unknown" not in failed
    assert failed["decode_lost"] >= 1


@pytest.mark.long
@pytest.mark.proof
def test_a_short_soak_finds_nothing_wrong(
    start_fleet: Callable[..., FleetProcess], whole: bool
) -> None:
    fleet = start_fleet(*SERVE_OPTIONS)
    plan = SoakPlan(
        seconds=SOAK_WHOLE_S if whole else SOAK_S,
        fault_every_s=2.0,
        readers=4,
        asks=6,
        seed=1,
        stall_timeout_s=STALL_TIMEOUT_S,
    )
    soak = Soak(fleet.url, FleetLog(fleet.log_path), plan, lambda _: None)
    trio.run(soak.run)
    assert soak.wrongs == []
    assert soak.injected
    for what in (
        "answers read: sse",
        "requests cut by the client",
        "clients that stopped reading",
    ):
        assert soak.done[what] > 0, what
