"""Tests of the prefix cache across prefill and decode: a shared prefix is computed and sent once,
and every token stays right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from transport.frames import EndReason, KvChunk, RefuseReason, Reserve
from transport.lease import LeaseState
from transport.tokens import pack_tokens
from triolet.fair_lru import Keeper
from triolet.ids import AttemptKey, Role
from triolet.sampling import SamplingParams

from .pair import Pair
from .phases import state_on_decode, until
from .scripts import completion

if TYPE_CHECKING:
    from engine.prefix_cache import PrefixCache

BLOCK_SIZE = 4


def cache_of(pair: Pair, role: Role) -> PrefixCache:
    return pair.nodes[role].engine.prefix_cache


def answered(pair: Pair, prompt: list[int], **asked: int) -> tuple[AttemptKey, int, int]:
    """Return a finished attempt, the prompt tokens computed by prefill, and the blocks sent."""
    computed = pair.prefill.counters.computed_tokens
    kv_bytes = pair.decode.counters.kv_bytes
    key = pair.ask(prompt, **asked)
    assert pair.heard[key].granted
    pair.run()
    pair.check_empty()
    assert len(pair.heard[key].tokens) == pair.heard[key].sampling.max_tokens
    bytes_per_block = pair.nodes[Role.DECODE].engine.bytes_per_block
    return (
        key,
        pair.prefill.counters.computed_tokens - computed,
        (pair.decode.counters.kv_bytes - kv_bytes) // bytes_per_block,
    )


def test_a_prompt_asked_twice_is_computed_and_shipped_once() -> None:
    pair = Pair()
    prompt = list(range(22))
    assert answered(pair, prompt)[1:] == (22, 6)
    key, num_computed, num_shipped = answered(pair, prompt)
    assert (num_computed, num_shipped) == (2, 1)
    assert pair.heard[key].held_blocks == 5
    first = pair.heard[key].first
    assert first is not None
    assert first.cached_tokens == 20
    for role in (Role.PREFILL, Role.DECODE):
        counts = cache_of(pair, role).counts
        assert (counts.queried_tokens, counts.hit_tokens) == (44, 20)


def test_of_whole_blocks_the_last_is_computed_all_the_same() -> None:
    pair = Pair()
    prompt = list(range(20))
    answered(pair, prompt)
    assert answered(pair, prompt)[1:] == (4, 1)


def test_the_next_turn_of_a_chat_finds_the_answer_on_decode() -> None:
    pair = Pair()
    turn = list(range(10))
    answered(pair, turn, max_tokens=12)
    reply = completion(turn, 3, 12)
    # Prefill never saw the reply; decode computed all of it but the last token.
    key, num_computed, num_shipped = answered(pair, [*turn, *reply, 7, 8, 9])
    assert pair.heard[key].held_blocks == 5
    assert (num_computed, num_shipped) == (25 - 8, 2)


def test_where_paths_differ_only_prompts_are_kept() -> None:
    pair = Pair()
    cache_of(pair, Role.DECODE).keeps_completions = False
    turn = list(range(10))
    answered(pair, turn, max_tokens=12)
    key, *_ = answered(pair, [*turn, *completion(turn, 3, 12), 7])
    assert pair.heard[key].held_blocks == 2


def test_other_salts_find_nothing() -> None:
    pair = Pair()
    prompt = list(range(22))
    answered(pair, prompt)
    key = pair.ask(prompt, salt=b"somebody else's")
    pair.run()
    first = pair.heard[key].first
    assert first is not None
    assert (pair.heard[key].held_blocks, first.cached_tokens) == (0, 0)
    pair.check_empty()


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_who_asks_much_pushes_out_no_other_tenants_kv(share: float) -> None:
    pair = Pair(num_blocks=24)
    quiet = Keeper(b"quiet")
    prompt = list(range(30))
    pair.ask(prompt, salt=b"q", keeper=quiet)
    pair.run()
    for number in range(40):
        pair.ask([number] * 18, salt=b"l", keeper=Keeper(b"loud", share))
        pair.run()
    for role in (Role.PREFILL, Role.DECODE):
        assert cache_of(pair, role).counts.evicted_blocks > 100
        pair.beat()
        assert pair.beats[role].load.cache.tenants == 2
    key = pair.ask(prompt, salt=b"q", keeper=quiet)
    pair.run()
    first = pair.heard[key].first
    assert first is not None
    assert (pair.heard[key].held_blocks, first.cached_tokens) == (7, 28)
    pair.check_empty()


def test_a_reserve_that_comes_twice_is_granted_alike() -> None:
    pair = Pair()
    prompt = list(range(22))
    answered(pair, prompt)
    key = pair.new_key()
    pair.ask(prompt, key=key)
    pair.heard[key].held_blocks = 0
    shared = (SamplingParams(max_tokens=6, seed=3), 0, 1_000, 60.0)
    pair.to_worker(Role.DECODE, Reserve(*key, pack_tokens(prompt), b"", *shared))
    assert pair.heard[key].held_blocks == 5
    pair.run()
    pair.check_empty()


def test_prompts_that_come_together_are_computed_once() -> None:
    pair = Pair(num_blocks=64)
    prompt = list(range(30))
    for number in range(4):
        pair.ask([*prompt, number])
    pair.run()
    pair.check_empty()
    # All of the first one, and what the others have of their own behind the last common block.
    assert pair.prefill.counters.computed_tokens == 31 + 3 * 3


def test_cached_blocks_give_way_before_anybody_is_refused_or_preempted() -> None:
    pair = Pair(num_blocks=16)
    for number in range(5):
        answered(pair, [number] * 30, max_tokens=20)
    assert pair.decode.counters.preemptions == 0
    assert cache_of(pair, Role.DECODE).counts.evicted_blocks > 0
    assert cache_of(pair, Role.PREFILL).counts.evicted_blocks > 0


def test_a_prompt_that_is_here_needs_room_for_its_growth_only() -> None:
    pair = Pair(num_blocks=16)
    prompt = list(range(40))
    first = pair.ask(prompt, allowed=1)
    pair.run()
    assert state_on_decode(pair, first) is LeaseState.PAUSED
    other = pair.ask([9, *range(39)])
    assert pair.heard[other].refused is not None
    assert pair.heard[other].refused.reason is RefuseReason.NO_BLOCKS
    second = pair.ask(prompt, allowed=1)
    assert pair.heard[second].granted
    pair.allow(first, 100)
    pair.allow(second, 100)
    pair.run()
    pair.check_empty()


def test_whoever_shares_is_not_preempted_for_what_would_not_come_back() -> None:
    pair = Pair(num_blocks=13)
    prompt = list(range(40))
    keys = [pair.ask(prompt, max_tokens=12)]
    pair.run()
    keys += [pair.ask(prompt, max_tokens=12, allowed=1)]
    until(pair, lambda: len(pair.heard[keys[1]].tokens) == 1)
    keys += [pair.ask(prompt, max_tokens=12, allowed=1)]
    pair.run()
    pair.check()
    for key in keys:
        pair.allow(key, 100)
    pair.run()
    pair.check()
    reasons = [pair.heard[key].ended[Role.DECODE].reason for key in keys]
    assert reasons[:2] == [EndReason.LENGTH, EndReason.LENGTH]


def test_host_memory_brings_back_what_gave_way() -> None:
    pair = Pair(num_blocks=12, host_blocks=40)
    prompts = [[number] * 30 for number in range(3)]
    for prompt in prompts:
        answered(pair, prompt)
    for prompt in prompts:
        _, num_computed, num_shipped = answered(pair, prompt)
        assert (num_computed, num_shipped) == (2, 1)
    for role in (Role.PREFILL, Role.DECODE):
        assert cache_of(pair, role).counts.restored_blocks > 0
        pair.beat()
        assert pair.beats[role].load.cache.host_bytes > 0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_cancel_keeps_what_was_finished_and_harms_nobody_who_shares_it(role: Role) -> None:
    pair = Pair()
    prompt = list(range(22))
    answered(pair, prompt)
    key = pair.ask(prompt)
    other = pair.ask([*prompt, 50])
    until(pair, lambda: bool(pair.nodes[role].rows))
    pair.end(key)
    pair.run()
    pair.check_empty()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.CANCEL
    assert len(pair.heard[other].tokens) == 6
    assert answered(pair, prompt)[1:] == (2, 1)


def test_a_damaged_chunk_is_never_kept() -> None:
    pair = Pair()
    prompt = list(range(22))
    key = pair.ask(prompt)
    for _ in range(200):
        for node in pair.nodes.values():
            node.begin_step(pair.now)
            node.finish_step(pair.now)
        pair.settle()
        while pair.wire:
            pair.deliver(damage=isinstance(pair.wire[0].frame, KvChunk))
        if Role.DECODE in pair.heard[key].ended:
            break
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.ERROR
    assert pair.nodes[Role.DECODE].engine.ledger.cached_blocks == 0
    again, _, num_shipped = answered(pair, prompt)
    assert num_shipped == 6
    assert pair.heard[again].ended[Role.DECODE].reason is EndReason.LENGTH


def test_a_new_life_still_knows_its_blocks() -> None:
    pair = Pair()
    prompt = list(range(22))
    answered(pair, prompt)
    pair.now += 2.5  # longer than leases live: both fence themselves
    pair.sweep()
    pair.run()
    key = pair.ask(prompt)
    pair.run()
    assert pair.heard[key].held_blocks == 5
    assert len(pair.heard[key].tokens) == 6
    pair.pass_time(6.0)
    pair.check_empty()


def test_a_prompt_that_is_here_counts_for_what_it_lacks() -> None:
    pair = Pair(num_blocks=200, max_num_seqs=64)
    prompt = list(range(180))
    answered(pair, prompt)
    keys = [pair.ask([*prompt, number]) for number in range(8)]
    pair.beat()
    assert pair.beats[Role.PREFILL].load.waiting_tokens == 8
    pair.run()
    pair.check_empty()
    assert all(len(pair.heard[key].tokens) == 6 for key in keys)


def test_other_adapters_find_nothing() -> None:
    pair = Pair()
    adapters = [bytes([number]) * 32 for number in (1, 2)]
    for node in pair.nodes.values():
        node.engine.adapters = frozenset(adapters)
    prompt = list(range(22))
    answered(pair, prompt)
    for adapter in adapters:
        for held_blocks, cached_tokens in ((0, 0), (5, 20)):
            key = pair.ask(prompt, adapter=adapter)
            pair.run()
            first = pair.heard[key].first
            assert first is not None
            assert (pair.heard[key].held_blocks, first.cached_tokens) == (
                held_blocks,
                cached_tokens,
            )
    pair.check_empty()
