"""Tests of several completions of one prompt: the prompt is computed once, and its blocks are
shared by reference count."""

from __future__ import annotations

import random

import pytest

from transport.frames import Ended, EndReason, RefuseReason
from triolet.ids import AttemptKey, Role

from .pair import Pair
from .scripts import completion

LENGTHS = [1, 2, 3, 4, 5, 8, 9, 30]
"""Of prompts, around the ends of blocks of four."""
MANY = 10_000


def ask_for_several(
    pair: Pair, length: int, count: int, *, local_tokens: int = 0, **sampling: object
) -> list[AttemptKey]:
    """Request several completions of one prompt."""
    prompt = range(5, 5 + length)
    first = pair.ask(prompt, seed=0, local_tokens=local_tokens, **sampling)
    more = [pair.ask(prompt, seed=n, fork_of=first, **sampling) for n in range(1, count)]
    return [first, *more]


def tombstones(pair: Pair, key: AttemptKey) -> Ended:
    return pair.heard[key].ended[Role.DECODE]


@pytest.mark.parametrize("local_tokens", [0, MANY])
@pytest.mark.parametrize("length", LENGTHS)
def test_forks_complete_as_they_would_alone_and_the_prompt_is_computed_once(
    length: int, local_tokens: int
) -> None:
    pair = Pair()
    keys = ask_for_several(pair, length, 4, local_tokens=local_tokens, max_tokens=9)
    assert all(pair.heard[key].is_local for key in keys[1:])
    pair.run()
    for seed, key in enumerate(keys):
        wanted = completion(tuple(range(5, 5 + length)), seed, 9)
        assert [pair.heard[key].tokens[i] for i in range(9)] == wanted
        assert tombstones(pair, key).reason is EndReason.LENGTH
    assert pair.prefill.counters.computed_tokens == (0 if local_tokens else length)
    prompt_tokens = pair.decode.counters.prompt_tokens
    assert prompt_tokens == 3 + (length if local_tokens else 0), "one token of each fork's"
    pair.check_empty()


def test_shared_blocks_are_leased_once_and_only_their_owner_may_write() -> None:
    pair = Pair(num_blocks=24)
    keys = ask_for_several(pair, 30, 4, max_tokens=2)
    ledger = pair.decode._engine.ledger
    assert ledger.leased_blocks == 8 + 3, "a fork holds what it writes itself"
    while len(pair.heard[keys[0]].tokens) < 1 or pair.wire:
        if pair.wire:
            pair.deliver()
        pair.nodes[Role.PREFILL].begin_step(pair.now)
        pair.nodes[Role.PREFILL].finish_step(pair.now)
        pair.settle()
    assert ledger.num_references == 8 * 4
    assert ledger.leased_blocks == 8 + 3
    for key in keys:
        assert ledger.blocks_of(key) == tuple(pair.decode.attempt_table.attempts[key].block_table)
    pair.check()
    pair.run()
    pair.check_empty()


def test_a_fork_that_comes_late_joins_a_running_origin() -> None:
    pair = Pair()
    prompt = range(5, 5 + 10)
    first = pair.ask(prompt, seed=0, allowed=3, max_tokens=12)
    pair.run()
    late = pair.ask(prompt, seed=1, fork_of=first, max_tokens=12)
    pair.run()
    pair.allow(first, 100, received=3)
    pair.run()
    for seed, key in enumerate([first, late]):
        tokens = pair.heard[key].tokens
        assert [tokens[i] for i in range(12)] == completion(tuple(prompt), seed, 12)
    pair.check_empty()


def test_an_origin_that_ends_with_its_first_token_leaves_its_prompt_to_its_forks() -> None:
    pair = Pair()
    keys = ask_for_several(pair, 10, 3, max_tokens=1)
    pair.run()
    for seed, key in enumerate(keys):
        assert pair.heard[key].tokens == {0: completion(tuple(range(5, 15)), seed, 1)[0]}
    pair.check_empty()


def test_a_fork_goes_on_from_what_its_client_has() -> None:
    pair = Pair()
    prompt = tuple(range(5, 5 + 10))
    first = pair.ask(prompt, seed=0, max_tokens=12)
    replay = completion(prompt, 7, 5)
    fork = pair.ask(prompt, seed=7, replay=replay, fork_of=first, max_tokens=12)
    pair.run()
    assert [pair.heard[fork].tokens[i] for i in range(5, 12)] == completion(prompt, 7, 12)[5:]
    pair.check_empty()


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
def test_an_origin_that_ends_before_its_prompt_is_there_lets_its_forks_begin_anew(
    is_inside: bool, is_local: bool
) -> None:
    pair = Pair()
    keys = ask_for_several(pair, 30, 3, local_tokens=MANY if is_local else 0)
    for node in pair.nodes.values():
        if is_inside:
            node.begin_step(pair.now)
    pair.end(keys[0])
    for key in keys[1:]:
        assert tombstones(pair, key).reason is EndReason.FORSAKEN
        pair.live.discard(key)
    pair.run()
    pair.check_empty()


@pytest.mark.parametrize("num_rounds", range(8))
def test_a_fork_may_leave_at_any_time(num_rounds: int) -> None:
    pair = Pair()
    keys = ask_for_several(pair, 30, 3, max_tokens=9)
    for _ in range(num_rounds):
        for node in pair.nodes.values():
            node.begin_step(pair.now)
        while pair.wire:
            pair.deliver()
        for node in pair.nodes.values():
            node.finish_step(pair.now)
        pair.settle()
    pair.end(keys[1])
    pair.check()
    pair.run()
    for seed in (0, 2):
        tokens = pair.heard[keys[seed]].tokens
        assert [tokens[i] for i in range(9)] == completion(tuple(range(5, 35)), seed, 9)
    pair.check_empty()


def test_who_is_not_the_prompts_own_is_no_fork() -> None:
    pair = Pair(max_num_seqs=8)
    prompt, adapter = range(5, 5 + 10), b"a" * 32
    pair.nodes[Role.DECODE].engine.adapters = frozenset({adapter})
    first = pair.ask(prompt, seed=0)
    others = [
        pair.ask(prompt, fork_of=first, adapter=adapter),
        pair.ask(prompt, fork_of=AttemptKey(first.request_id, 1)),
        pair.ask(range(5, 5 + 11), fork_of=first),
        pair.ask(prompt, fork_of=first, salt=b"s" * 16),
    ]
    for key in others:
        refused = pair.heard[key].refused
        assert refused is not None
        assert refused.reason is RefuseReason.NO_FORK
    pair.run()
    pair.check_empty()


@pytest.mark.parametrize("seed", range(40))
def test_forks_at_random(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(num_blocks=rng.choice((14, 24)), max_num_seqs=6)
    keys: list[AttemptKey] = []
    for step in range(120):
        what = rng.random()
        if what < 0.08 and len(keys) < 12:
            local_tokens = rng.choice((0, MANY))
            keys += ask_for_several(
                pair, rng.randint(1, 20), rng.randint(2, 4),
                local_tokens=local_tokens, max_tokens=rng.randint(1, 12),
            )  # fmt: skip
        elif what < 0.11 and keys:
            pair.end(rng.choice(keys))
        elif what < 0.6 and pair.wire:
            pair.deliver()
        else:
            node = pair.nodes[rng.choice((Role.PREFILL, Role.DECODE))]
            if node.rows:
                node.finish_step(pair.now, fails=rng.random() < 0.02)
            else:
                node.begin_step(pair.now)
            pair.settle()
        if step % 10 == 0:
            pair.beat()
        pair.check()
    for node in pair.nodes.values():
        node.finish_step(pair.now)
    pair.settle()
    pair.run()
    for key in keys:
        pair.end(key)  # a server does so with what ended on one of the two
    pair.run()
    pair.check_empty()
