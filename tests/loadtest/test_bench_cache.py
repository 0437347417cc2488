"""Tests of the prefix cache benchmark: reading a trace of real conversations, the ideal cache, and
the measured hits."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING

import pytest

from engine.block_ledger import BlockLedger
from engine.prefix_cache import PrefixCache
from loadtest.bench.cache import (
    BLOCK_SIZE,
    CACHED,
    PLAIN,
    TRACE,
    Replay,
    Turn,
    ideal_hit_rate,
    most_held_blocks,
    read_turns,
    report_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VOCAB_SIZE = 16_384


class NoBytes:
    """A fake pool that stores no bytes; the tests only count blocks."""

    def export_blocks(self, block_ids: Sequence[int]) -> bytes:
        return bytes(len(block_ids))

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        assert len(payload) == len(block_ids)


def turn(*block_ids: int, tokens: int | None = None) -> Turn:
    return Turn(block_ids[0], block_ids, tokens or BLOCK_SIZE * len(block_ids) - 4, 5)


def found(turns: list[Turn], num_blocks: int) -> float:
    """Return the hit rate of the real cache when the prompts run one after the other."""
    ledger = BlockLedger(num_blocks + 1)
    cache = PrefixCache(ledger, BLOCK_SIZE, NoBytes())
    for item in turns:
        packed = array("I", item.prompt(BLOCK_SIZE, VOCAB_SIZE)).tobytes()
        blocks, _ = cache.lease("turn", packed, b"", -(-item.prompt_tokens // BLOCK_SIZE))
        cache.insert(packed, b"", blocks[: item.prompt_tokens // BLOCK_SIZE])
        ledger.release("turn")
    cache.check_invariants()
    return cache.counts.hit_tokens / cache.counts.queried_tokens


def test_a_turn_shares_the_tokens_of_the_blocks_that_it_shares() -> None:
    first, second = (turn(0, 1, 2).prompt(16, 500), turn(0, 1, 7, 8).prompt(16, 500))
    assert (len(first), len(second)) == (44, 60)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:44]


def test_ideal_is_what_a_larger_cache_does_not_lose() -> None:
    turns = [turn(0, 1, 2), turn(0, 3, 4), turn(0, 1, 2, 5)]
    tokens = sum(item.prompt_tokens for item in turns)
    # Only full blocks are cached. The last block of each prompt is not full, so the first turn
    # leaves blocks 0 and 1.
    assert ideal_hit_rate(turns, 100, BLOCK_SIZE) == (16 + 32) / tokens
    assert ideal_hit_rate(turns, 2, BLOCK_SIZE) == (16 + 16) / tokens
    assert ideal_hit_rate(turns, 0, BLOCK_SIZE) == 0.0
    whole = [turn(0, 1, tokens=32), turn(0, 1, tokens=32)]
    assert ideal_hit_rate(whole, 9, BLOCK_SIZE) == 16 / 64, "the last block must be computed again"


def test_whole_conversations_are_read_and_scaled(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 700 + n, "output_length": 1, "hash_ids": [0, n % 8]}
        for n in range(32)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    every = read_turns(trace, BLOCK_SIZE, 1)
    assert [item.prompt_tokens for item in every] == [(700 + n) * 16 // 512 for n in range(32)]
    assert {item.output_tokens for item in every} == {1}
    some = read_turns(trace, BLOCK_SIZE, 3)
    names = {item.conversation for item in some}
    assert 0 < len(names) < 8
    assert len(some) == 4 * len(names)


def test_a_report_compares_with_the_ideal_and_counts_answers_that_differ() -> None:
    turns = [turn(0, 1, 2), turn(0, 1, 2)]
    hits = {
        ("triolet_kv_blocks", "prefill"): 64.0,
        ("triolet_prefix_cache_queried_tokens_total", "prefill"): 88.0,
        ("triolet_prefix_cache_hit_tokens_total", "prefill"): 32.0,
        ("triolet_prefix_cache_queried_tokens_total", "decode"): 88.0,
        ("triolet_prefix_cache_hit_tokens_total", "decode"): 16.0,
        ("triolet_kv_bytes_received_total", ""): 80.0,
    }
    cached = Replay({0: [1], 1: [2]}, 1.0, hits)
    plain = Replay({0: [1], 1: [3]}, 1.0, {("triolet_kv_bytes_received_total", ""): 100.0})
    report = report_of(turns, {CACHED: cached, PLAIN: plain}, {}, 2)
    values = {name: ratio.value for name, ratio in report.ratios.items()}
    assert values == pytest.approx(
        {
            "prefill hit rate of ideal": 1.0,
            "decode hit rate of ideal": 0.5,
            "KV bytes saved of ideal": 0.2 / (32 / 88),
            "answers equal to those without": 0.5,
        }
    )
    assert not report.ratios["decode hit rate of ideal"].is_met


def test_a_pool_that_what_runs_may_fill_is_held_to_no_ideal() -> None:
    turns = [turn(0, 1, 2), turn(0, 3), turn(0, 4, 5, 6)]
    assert [most_held_blocks(turns, n, BLOCK_SIZE) for n in (1, 2, 9)] == [4, 7, 9]
    blocks = {("triolet_kv_blocks", "prefill"): 6.0, ("triolet_kv_bytes_received_total", ""): 9.0}
    replays = {name: Replay({0: [1]}, 1.0, dict(blocks)) for name in (CACHED, PLAIN)}
    for at_once, is_held in ((1, True), (2, False)):
        ratios = report_of(turns, replays, {}, at_once).ratios
        assert (ratios["decode hit rate of ideal"].floor is not None) == is_held
        assert ratios["answers equal to those without"].floor == 1.0


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason="the trace file is missing")
@pytest.mark.parametrize("num_blocks", [255, 500, 1000, 4000])
def test_the_cache_finds_what_the_ideal_one_finds_in_real_conversations(num_blocks: int) -> None:
    turns = read_turns(TRACE, BLOCK_SIZE, 24)
    assert found(turns, num_blocks) == pytest.approx(
        ideal_hit_rate(turns, num_blocks, BLOCK_SIZE), rel=0.02
    )
