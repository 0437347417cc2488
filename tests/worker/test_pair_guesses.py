"""Tests of speculative decoding on the decode core: the same tokens, ends and windows as without
it, in fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from transport.frames import EndReason
from triolet.config import SpeculationConfig
from triolet.ids import Role

from .oracle import Oracle
from .pair import Pair
from .phases import PROMPT
from .scripts import completion

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TOKENS = 24
TOKENS = completion(PROMPT, 3, NUM_TOKENS)
EAGER = SpeculationConfig(max_step_tokens=64, pause_rows=1, max_pause_rows=1)
WRONG_EVERY = [0, 1, 2, 3, 5]


def guessing(wrong_every: int = 0, **sizes: int) -> Pair:
    return Pair(source=Oracle(wrong_every), speculation=EAGER, **sizes)  # type: ignore[arg-type]


def steps(pair: Pair) -> int:
    return pair.decode.counters.steps


@pytest.mark.parametrize("wrong_every", WRONG_EVERY)
def test_tokens_are_the_same_whatever_is_guessed(wrong_every: int) -> None:
    pair = guessing(wrong_every)
    keys = [pair.ask(PROMPT[:n], max_tokens=NUM_TOKENS, seed=n) for n in (5, 9, 12)]
    pair.run()
    for key, n in zip(keys, (5, 9, 12), strict=True):
        tokens = completion(PROMPT[:n], n, NUM_TOKENS)
        assert pair.heard[key].tokens == dict(enumerate(tokens))
        assert pair.heard[key].ended[Role.DECODE].num_tokens == NUM_TOKENS
    counters = pair.decode.counters
    assert counters.speculative_proposed >= counters.speculative_accepted
    assert (counters.speculative_accepted == 0) == (wrong_every == 1)
    assert (counters.speculative_accepted == counters.speculative_proposed) == (wrong_every == 0)
    load = pair.decode.load()
    assert load.speculative_rows == counters.speculative_rows > 0
    pair.check_empty()


def test_guesses_that_hold_save_steps() -> None:
    plain, guessed = Pair(), guessing()
    for pair in (plain, guessed):
        pair.ask(PROMPT, max_tokens=NUM_TOKENS)
        pair.run()
    assert steps(plain) == NUM_TOKENS - 1
    # 2 + 1, 4 + 1, 8 + 1, and the rest of the 23.
    assert steps(guessed) == 4


@pytest.mark.parametrize("wrong_every", WRONG_EVERY)
@pytest.mark.parametrize("allowed", [1, 2, 4, 11])
def test_a_stream_stops_at_its_window_in_the_middle_of_guesses(
    allowed: int, wrong_every: int
) -> None:
    pair = guessing(wrong_every)
    key = pair.ask(PROMPT, allowed=allowed, max_tokens=NUM_TOKENS)
    pair.run()
    assert pair.heard[key].tokens == dict(enumerate(TOKENS[:allowed]))
    pair.allow(key, allowed + 3)
    pair.run()
    assert pair.heard[key].tokens == dict(enumerate(TOKENS[: allowed + 3]))
    pair.check()
    pair.allow(key, 1000)
    pair.run()
    pair.check_empty()


@pytest.mark.parametrize("position", range(10))
def test_a_stop_token_among_guesses_ends_it(position: int) -> None:
    pair = guessing()
    key = pair.ask(PROMPT, max_tokens=NUM_TOKENS, stop_token_ids=(TOKENS[position],))
    pair.run()
    ended = pair.heard[key].ended[Role.DECODE]
    assert ended.reason is EndReason.STOP
    assert ended.num_tokens == len(pair.heard[key].tokens) == position + 1
    pair.check_empty()


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_the_last_token_is_the_last(max_tokens: int) -> None:
    pair = guessing(wrong_every=7)
    key = pair.ask(PROMPT, max_tokens=max_tokens)
    pair.run()
    assert pair.heard[key].tokens == dict(enumerate(TOKENS[:max_tokens]))
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LENGTH
    pair.check_empty()


@pytest.mark.parametrize("make", [Pair, guessing])
def test_the_context_length_ends_it(make: Callable[..., Pair]) -> None:
    pair = make(num_blocks=7)
    key = pair.ask(PROMPT, max_tokens=500)
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LENGTH
    assert pair.heard[key].ended[Role.DECODE].num_tokens == 28 - 21
    pair.check_empty()


@pytest.mark.parametrize("wrong_every", WRONG_EVERY)
@pytest.mark.parametrize("num_replayed", [1, 2, 7, 23, 24])
def test_a_replay_continues_exactly(num_replayed: int, wrong_every: int) -> None:
    pair = guessing(wrong_every)
    key = pair.ask(PROMPT, replay=TOKENS[:num_replayed], max_tokens=NUM_TOKENS)
    pair.run()
    heard = pair.heard[key]
    assert sorted(heard.tokens) == sorted({0, *range(num_replayed, NUM_TOKENS)})
    assert heard.ended[Role.DECODE].num_tokens == NUM_TOKENS
    pair.check_empty()


def test_who_is_cancelled_inside_a_step_leaves_nothing() -> None:
    pair = guessing()
    source = Oracle()
    pair = Pair(source=source, speculation=EAGER)
    key = pair.ask(PROMPT, max_tokens=NUM_TOKENS)
    while not pair.nodes[Role.DECODE].rows:
        while pair.wire:
            pair.deliver()
        for node in pair.nodes.values():
            node.finish_step(pair.now)
            node.begin_step(pair.now)
        pair.settle()
    assert source.known == {key}
    pair.end(key)
    pair.nodes[Role.DECODE].finish_step(pair.now)
    pair.settle()
    assert pair.decode.counters.late_rows == 1
    assert not source.known
    assert not pair.decode._speculation._paces
    pair.run()
    pair.check_empty()


def test_a_step_that_raises_ends_each_attempt_once() -> None:
    pair = guessing()
    keys = [pair.ask(PROMPT[:n], max_tokens=NUM_TOKENS) for n in (5, 9)]
    decode = pair.nodes[Role.DECODE]
    while len(decode.core.attempt_table.leases) < 2 or not decode.rows:  # type: ignore[attr-defined]
        while pair.wire:
            pair.deliver()
        pair.nodes[Role.PREFILL].finish_step(pair.now)
        pair.nodes[Role.PREFILL].begin_step(pair.now)
        decode.begin_step(pair.now)
        pair.settle()
    decode.finish_step(pair.now, fails=True)
    pair.settle()
    failed = [key for key in keys if Role.DECODE in pair.heard[key].ended]
    for key in failed:
        ended = pair.heard[key].ended[Role.DECODE]
        assert (ended.reason, ended.failed_rows) == (EndReason.ERROR, len(failed))
    pair.run()
    pair.check_empty()


@pytest.mark.parametrize("wrong_every", WRONG_EVERY)
def test_few_blocks_are_given_to_rows_first(wrong_every: int) -> None:
    pair = guessing(wrong_every, num_blocks=24, max_num_seqs=3)
    keys = [pair.ask(PROMPT[:12], max_tokens=30, priority=p, seed=p) for p in (0, 1, 1)]
    pair.run()
    reasons = [pair.heard[key].ended[Role.DECODE].reason for key in keys]
    assert reasons[:2] == [EndReason.LENGTH, EndReason.LENGTH]
    assert reasons[2] in (EndReason.PREEMPTED, EndReason.LENGTH)
    pair.check()
