"""Tests of the cancel campaign: finding tokens computed for no request, finding growing processes,
and the pace of its clients."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.block_ledger import BlockLedger
from engine.kv_pool import KVLayout, KVPool
from loadtest.campaign.misbehaving import EARLY_S, MAX_WAIT_S, Pace
from loadtest.cancels import (
    MAX_GROWTH_BYTES,
    MIB,
    SERVE_OPTIONS,
    StrayTokens,
    costs_table,
    growth,
    stray_tokens,
)
from loadtest.harness.servers import Cost, cost_of
from ops.settings.form import value_at
from ops.settings.sources import read_settings

SERVER_LINE = {"event": "request_ended", "request_id": "aa", "outcome": "client_gone"}
DECODE_LINE = {"event": "attempt_ended", "attempt": "aa/0", "process": "decode-0"}


def accounts(computed: int, late: int) -> StrayTokens:
    entries: list[dict[str, Any]] = [
        SERVER_LINE | {"completion_tokens": 7},
        DECODE_LINE | {"num_tokens": 9},
        DECODE_LINE | {"process": "prefill-0", "num_tokens": 1},
    ]
    audit = {
        "role": "decode",
        "name": "decode-0",
        "computed_tokens": computed + 30,
        "prompt_tokens": 30,
        "late_rows": late,
        "late_tokens": late,
    }
    return stray_tokens(entries, [audit, {"role": "prefill", "name": "prefill-0"}])


def test_every_row_that_decode_computed_belongs_to_an_attempt_or_to_its_last_step() -> None:
    # Eight of the nine tokens are decode's, because prefill computes the first one. The ninth row
    # of decode is the late one.
    stray = accounts(computed=9, late=1)
    assert (stray.cut, stray.under_way, stray.unaccounted) == (1, [2], 0)
    assert stray.wrongs == []


@pytest.mark.parametrize(("computed", "late"), [(11, 1), (12, 3), (10, 2)])
def test_tokens_for_nobody_are_found(computed: int, late: int) -> None:
    assert accounts(computed, late).wrongs


def stages(**last: int) -> list[tuple[str, dict[str, Cost]]]:
    first = {"rss_bytes": 100 * MIB, "num_fds": 20, "num_threads": 5}
    return [("20%", {"server": Cost(**first)}), ("100%", {"server": Cost(**(first | last))})]


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ({}, []),
        ({"rss_bytes": 100 * MIB + MAX_GROWTH_BYTES}, []),
        ({"rss_bytes": 150 * MIB}, ["server grew by 50 MiB"]),
        ({"num_fds": 23}, ["server has 3 more open files"]),
        ({"num_threads": 9}, ["server has 4 more threads"]),
        ({"rss_bytes": 50 * MIB, "num_fds": 10}, []),
    ],
)
def test_growth_is_found_and_shrinking_is_none(last: dict[str, int], found: list[str]) -> None:
    assert growth(stages(**last)) == found
    assert costs_table(stages(**last)).row_count == 1


def test_a_process_that_is_gone_has_not_stayed_flat() -> None:
    [first, (name, _)] = stages()
    assert growth([first, (name, {})]) == ["server is gone"]
    assert costs_table([first, (name, {})]).row_count == 1


@pytest.mark.slow
def test_the_first_use_of_a_kv_block_takes_no_memory_from_workers_of_the_campaign() -> None:
    assignments = [value for option, value in pairwise(SERVE_OPTIONS) if option == "--set"]
    settings = read_settings(None, assignments).settings()
    is_poisoned = value_at(settings, ("worker", "engine", "poison_freed_blocks"))
    layout = KVLayout(4, 16, 4, 32, torch.float32)
    num_blocks = 4 * MAX_GROWTH_BYTES // layout.bytes_per_block
    pool = KVPool(layout, num_blocks, torch.device("cpu"))
    BlockLedger(num_blocks, poison=pool if is_poisoned else None)  # as engine/load.py
    before = cost_of(os.getpid())
    pool.blocks.fill_(1.0)
    after = cost_of(os.getpid())
    assert before
    assert after
    assert not growth([("ready", {"decode-0": before}), ("used", {"decode-0": after})])


def test_clients_wait_as_they_like_while_there_is_time_and_hurry_when_there_is_none() -> None:
    pace = Pace(count=1000, clients=10, budget_s=200.0)
    assert pace.next_wait_s(50.0) == MAX_WAIT_S
    # With 999 requests and 20 s left, each of the ten clients has 0.2 s per request.
    assert pace.next_wait_s(230.0) == pytest.approx(0.4, rel=0.01)
    assert pace.next_wait_s(999.0) == EARLY_S
