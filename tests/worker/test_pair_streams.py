"""Tests of streams from the decode core: tokens, windows, replays and preemption."""

from __future__ import annotations

import pytest

from transport.frames import EndReason
from triolet.fair_lru import Keeper
from triolet.ids import Role

from .pair import Pair
from .phases import PROMPT, paused
from .scripts import VOCAB_SIZE, completion


@pytest.mark.parametrize("num_replayed", range(7))
def test_a_replay_continues_exactly_and_sends_nothing_twice(num_replayed: int) -> None:
    pair, tokens = Pair(), completion(PROMPT, 3, 6)
    key = pair.ask(PROMPT, replay=tokens[:num_replayed])
    pair.run()
    heard = pair.heard[key]
    # Position 0 comes from prefill, which knows of no replay.
    assert sorted(heard.tokens) == sorted({0, *range(num_replayed, 6)})
    assert heard.ended[Role.DECODE].reason is EndReason.LENGTH
    assert heard.ended[Role.DECODE].num_tokens == 6
    pair.check_empty()


def test_a_replay_that_begins_otherwise_is_an_error() -> None:
    pair, tokens = Pair(), completion(PROMPT, 3, 6)
    key = pair.ask(PROMPT, replay=[(tokens[0] + 1) % VOCAB_SIZE])
    pair.run()
    ended = pair.heard[key].ended[Role.DECODE]
    assert ended.reason is EndReason.ERROR
    assert "would not be the same" in ended.message
    pair.check_empty()


def test_a_stream_stops_at_its_window_and_goes_on_when_it_opens() -> None:
    pair, tokens = Pair(), completion(PROMPT, 3, 6)
    key = paused(pair)
    assert pair.heard[key].tokens == {0: tokens[0], 1: tokens[1]}
    assert pair.decode.load().paused == 1
    assert pair.decode.load().leased_blocks > 0
    pair.allow(key, 1)
    pair.run()
    assert len(pair.heard[key].tokens) == 2
    pair.allow(key, 5)
    pair.run()
    assert len(pair.heard[key].tokens) == 5
    pair.allow(key, 6)
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LENGTH


def test_rows_that_a_server_misses_are_said_again() -> None:
    pair, tokens = Pair(), completion(PROMPT, 3, 6)
    key = pair.ask(PROMPT, allowed=4)
    pair.run()
    heard = pair.heard[key].tokens
    assert len(heard) == 4
    for position in (2, 3):
        del heard[position]  # lost on the way, like all that followed
    pair.allow(key, 4, received=2)
    assert heard == dict(enumerate(tokens[:4]))
    pair.allow(key, 4, received=4)
    heard.clear()
    pair.allow(key, 4, received=4)
    assert not heard, "nothing is repeated that has arrived"
    pair.allow(key, 6, received=4)
    assert not heard, "new credit is no complaint"
    pair.run()
    assert heard == {4: tokens[4], 5: tokens[5]}


@pytest.mark.parametrize("position", range(6))
def test_a_stop_token_ends_it_and_is_a_row(position: int) -> None:
    pair, tokens = Pair(), completion(PROMPT, 3, 6)
    key = pair.ask(PROMPT, stop_token_ids=(tokens[position],))
    pair.run()
    ended = pair.heard[key].ended[Role.DECODE]
    assert ended.reason is EndReason.STOP
    assert ended.num_tokens == len(pair.heard[key].tokens) == position + 1
    pair.check_empty()


def test_when_blocks_run_out_the_youngest_of_the_least_important_gives_way() -> None:
    pair = Pair(num_blocks=24, max_num_seqs=3)
    keys = [pair.ask(PROMPT[:12], max_tokens=30, priority=p, seed=p) for p in (0, 1, 1)]
    pair.run()
    reasons = [pair.heard[key].ended[Role.DECODE].reason for key in keys]
    assert reasons == [EndReason.LENGTH, EndReason.LENGTH, EndReason.PREEMPTED]
    assert pair.decode.load().preemptions == 1
    pair.check()


def test_when_blocks_run_out_the_tenant_with_most_for_its_weight_gives_way() -> None:
    pair = Pair(num_blocks=24, max_num_seqs=3)
    many, few = Keeper(b"many"), Keeper(b"few")
    wishes = ((many, 1.0), (many, 1.0), (few, 4.0))
    keys = [
        pair.ask(PROMPT[:12], max_tokens=30, keeper=keeper, weight=weight, seed=number)
        for number, (keeper, weight) in enumerate(wishes)
    ]
    pair.run()
    reasons = [pair.heard[key].ended[Role.DECODE].reason for key in keys]
    assert reasons == [EndReason.LENGTH, EndReason.PREEMPTED, EndReason.LENGTH]
    pair.check()
