"""Property tests of a prefill and a decode core: in any order of events, no block is lost or leased
twice, and tokens stay right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode.drafts import Drafts
from transport.frames import EndReason
from triolet.config import SpeculationConfig
from triolet.ids import AttemptKey, Role

from .oracle import Oracle
from .pair import Pair
from .scripts import VOCAB_SIZE, completion, hashes, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Callable


def ask(pair: Pair, number: int) -> None:
    start = number if number % 4 == 0 else number % 3  # most begin like some other
    pair.ask(
        range(start, start + 1 + number % 20),
        allowed=1 + number % 33,
        priority=number % 3,
        max_tokens=1 + number % 30,
        seed=number,
        local_tokens=number % 5 * 7,  # decode computes some of the prompts
    )


def ask_again(pair: Pair, number: int) -> None:
    """Begin the next attempt of a request, which replays the tokens received so far."""
    if not pair.heard:
        return
    key = sorted(pair.heard)[number % len(pair.heard)]
    heard = pair.heard[key]
    tokens = completion(heard.prompt, heard.sampling.seed, heard.sampling.max_tokens)
    pair.live.discard(key)
    pair.ask(
        heard.prompt,
        key=AttemptKey(key.request_id, key.attempt + 1),
        replay=tokens[: number % (len(tokens) + 1)],
        max_tokens=heard.sampling.max_tokens,
        seed=heard.sampling.seed,
        local_tokens=number % 3 * 15,
    )


def end(pair: Pair, number: int) -> None:
    if pair.heard:
        pair.end(sorted(pair.heard)[number % len(pair.heard)])


def allow(pair: Pair, number: int) -> None:
    if pair.heard:
        pair.allow(sorted(pair.heard)[number % len(pair.heard)], number)


def deliver(pair: Pair, number: int) -> None:
    if pair.wire:
        pair.deliver(number % len(pair.wire) if number % 3 == 0 else 0)


def deliver_twice(pair: Pair, number: int) -> None:
    if pair.wire:
        pair.deliver(number % len(pair.wire), keep=True)


def damage(pair: Pair, number: int) -> None:
    if pair.wire:
        pair.deliver(number % len(pair.wire), damage=True)


def lose(pair: Pair, number: int) -> None:
    if pair.wire:
        pair.wire.pop(number % len(pair.wire))


def begin_step(pair: Pair, number: int) -> None:
    pair.nodes[[Role.PREFILL, Role.DECODE][number % 2]].begin_step(pair.now)
    pair.settle()


def finish_step(pair: Pair, number: int) -> None:
    node = pair.nodes[[Role.PREFILL, Role.DECODE][number % 2]]
    node.finish_step(pair.now, fails=number % 17 == 0)
    pair.settle()


def pass_time(pair: Pair, number: int) -> None:
    pair.pass_time(number % 4 / 10, beats=number % 9 > 0)


def freeze(pair: Pair, number: int) -> None:
    """Sometimes stop everything for longer than a lease."""
    if number % 20 == 0:
        pair.now += 2.5
        pair.sweep()


EVENTS: dict[Callable[[Pair, int], None], int] = {
    ask: 3,
    ask_again: 1,
    end: 1,
    allow: 3,
    deliver: 20,
    deliver_twice: 1,
    damage: 1,
    lose: 1,
    begin_step: 14,
    finish_step: 14,
    pass_time: 1,
    freeze: 1,
}
"""What may happen, and how often: mostly what lets attempts get far enough to be disturbed."""
EVERY_EVENT = [event for event, weight in EVENTS.items() for _ in range(weight)]
stories = st.lists(
    st.tuples(st.sampled_from(EVERY_EVENT), st.integers(0, 900)), min_size=50, max_size=250
)


@pytest.mark.slow
@settings(
    # Of 150 events each, and of all kinds.
    max_examples=settings().max_examples * 2 // 5,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(stories, st.integers(0, 4), st.sampled_from(["off", "oracle", "drafts"]))
def test_blocks_and_tokens_survive_any_order_of_events(
    story: list[tuple[Callable[[Pair, int], None], int]], wrong_every: int, guesses: str
) -> None:
    eager = SpeculationConfig(pause_rows=1, max_pause_rows=1, draft_chunk_tokens=9)
    oracle = Oracle(wrong_every)
    engine = scripted_engine(12, hashes(wrong_every=wrong_every))
    drafts = Drafts(engine, eager, VOCAB_SIZE)
    source = {"off": None, "oracle": oracle, "drafts": drafts}[guesses]
    pair = Pair(num_blocks=16, max_num_seqs=6, source=source, speculation=eager, host_blocks=3)
    for event, number in story:
        event(pair, number)
        pair.check()
    for node in pair.nodes.values():
        node.finish_step(pair.now)
    pair.live.clear()
    pair.pass_time(6.0)
    while pair.wire:
        pair.deliver()
    pair.pass_time(6.0)
    pair.check_empty()
    assert not oracle.known
    assert engine.ledger.leased_blocks == engine.ledger.num_spoiled == 0
    for key, heard in pair.heard.items():
        if heard.granted and heard.refused is None:
            assert Role.DECODE in heard.ended, key


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=10), st.integers(0, 6))
def test_every_prompt_is_answered_when_nothing_goes_wrong(
    lengths: list[int], num_replayed: int
) -> None:
    pair = Pair(num_blocks=200, max_num_seqs=4)
    for length in lengths:
        prompt = range(length)
        tokens = completion(prompt, 3, 6)
        # Rows are few: a refused request comes again when another has ended.
        key = pair.ask(prompt, replay=tokens[:num_replayed])
        if pair.heard[key].refused is not None:
            pair.run()
            key = pair.ask(prompt, replay=tokens[:num_replayed])
        assert pair.heard[key].granted
    pair.run()
    pair.check_empty()
    for heard in pair.heard.values():
        if heard.granted:
            tokens = completion(heard.prompt, 3, 6)
            new = {position: tokens[position] for position in range(num_replayed, 6)}
            assert {**new, 0: tokens[0]} == {**heard.tokens, 0: heard.tokens[0]}
            assert heard.ended[Role.DECODE].num_tokens == 6
            assert heard.ended[Role.DECODE].reason is EndReason.LENGTH
            assert heard.ended[Role.PREFILL].reason is EndReason.HANDED_OVER
