"""Tests of the store of kept answers: time to live, bytes, and each tenant's share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from server.cache.front import EVENTS_AT_ONCE, Recording, Replay, Script, name_of, size_of
from server.cache.store import ENTRY_BYTES, ResponseStore
from server.contract.generation import (
    CancelReason,
    Delta,
    Events,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    TokenLogprob,
    Usage,
)
from server.contract.output_stream import OutputStream
from tests.server.support.fakes import FakeGeneration
from triolet.config import ResponseCacheConfig
from triolet.fair_lru import ANYBODY, Keeper
from triolet.sampling import Grammar, GrammarKind, SamplingParams
from triolet.service_class import Scheduling, ServiceClass

ANSWER = bytes(1000 - ENTRY_BYTES)
CONFIG = ResponseCacheConfig(max_bytes=10_000, ttl_s=60.0)
REQUEST = GenerationRequest(
    bytes(16), (1, 2, 3), SamplingParams(seed=1), 60.0, scheduling=Scheduling("alice")
)
USAGE = Usage(3, 2, 1, queue_s=0.5, ttft_s=0.7)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_an_answer_is_found_until_it_is_too_old() -> None:
    store = ResponseStore(CONFIG)
    assert store.keep(name(1), ANSWER, ANYBODY, 0.0)
    found = store.find(name(1), 59.9)
    assert found is not None
    assert (found.answer, found.since) == (ANSWER, 0.0)
    assert store.find(name(1), 60.0) is None
    assert (store.used_bytes, len(store), store.gone["expired"]) == (0, 0, 1)


def test_asking_does_not_make_it_younger_and_answering_anew_does() -> None:
    store = ResponseStore(CONFIG)
    store.keep(name(1), ANSWER, ANYBODY, 0.0)
    store.find(name(1), 50.0)
    assert store.find(name(1), 61.0) is None
    store.keep(name(1), ANSWER, ANYBODY, 61.0)
    store.keep(name(1), ANSWER, ANYBODY, 100.0)
    assert store.find(name(1), 130.0) is not None
    assert len(store) == 1


def test_bytes_are_bounded_and_who_was_not_asked_for_goes_first() -> None:
    store = ResponseStore(CONFIG)
    for number in range(10):
        store.keep(name(number), ANSWER, ANYBODY, 0.0)
    store.find(name(0), 0.0)
    store.keep(name(10), ANSWER, ANYBODY, 0.0)
    assert store.used_bytes == 10_000
    assert store.find(name(1), 0.0) is None
    assert store.find(name(0), 0.0) is not None
    assert store.gone["evicted"] == 1
    store.check_invariants()


def test_what_is_too_large_is_not_kept() -> None:
    store = ResponseStore(CONFIG)
    assert not store.keep(name(1), bytes(10_000 // 8), ANYBODY, 0.0)
    assert store.keep(name(1), bytes(10_000 // 8 - ENTRY_BYTES), ANYBODY, 0.0)


def test_a_tenant_that_floods_pushes_out_its_own() -> None:
    store = ResponseStore(CONFIG)
    quiet = [name(number) for number in range(4)]
    for one in quiet:
        store.keep(one, ANSWER, Keeper(b"quiet"), 0.0)
    for number in range(100, 200):
        store.keep(name(number), ANSWER, Keeper(b"loud"), 0.0)
    assert all(store.find(one, 0.0) for one in quiet)
    assert (store.held_by(b"quiet"), store.held_by(b"loud")) == (4000, 6000)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.integers(0, 900), st.sampled_from(b"abc"), st.floats(0, 40)
        ),
        max_size=60,
    )
)
def test_whatever_comes_it_adds_up(steps: list[tuple[int, int, int, float]]) -> None:
    store, now = ResponseStore(replace(CONFIG, max_bytes=6000)), 0.0
    for number, size, tenant, passed_s in steps:
        now += passed_s
        # The tenant's name is part of an answer's key.
        store.keep(name(256 * tenant + number), bytes(size % 200), Keeper(bytes([tenant])), now)
        store.check_invariants()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": (1, 2)},
        {"prompt_ids": (1, 2, 4)},
        {"stop": ("x",)},
        {"cache_salt": b"other"},
        {"skip_special_tokens": False},
        {"include_stop": True},
        {"scheduling": Scheduling("bob")},
        {"sampling": SamplingParams(seed=2)},
        {"sampling": SamplingParams(seed=1, grammar=Grammar(GrammarKind.REGEX, "a"))},
        {"sampling": SamplingParams(seed=1, max_tokens=15)},
        {"sampling": SamplingParams(seed=1, logprobs=0)},
    ],
)
def test_whatever_may_change_an_answer_changes_its_name(change: dict[str, Any]) -> None:
    assert name_of(replace(REQUEST, **change), "model") != name_of(REQUEST, "model")


def test_a_name_is_of_one_model_and_of_nothing_that_changes_no_token() -> None:
    assert name_of(REQUEST, "model") != name_of(REQUEST, "other")
    hurried = Scheduling("alice", weight=3.0, service_class=ServiceClass.CRITICAL)
    same = replace(
        REQUEST, request_id=bytes([1] * 16), deadline_s=1.0, priority=5, scheduling=hurried
    )
    assert name_of(same, "model") == name_of(REQUEST, "model")


def test_where_the_best_token_is_taken_the_seed_is_nothing() -> None:
    one, two = (
        replace(REQUEST, sampling=SamplingParams(temperature=0, seed=seed)) for seed in (1, 2)
    )
    assert name_of(one, "model") == name_of(two, "model")


def script_of(*texts: str) -> Script:
    deltas = tuple(Delta(text, tuple(text.encode())) for text in texts)
    return Script(deltas, Finished(FinishReason.STOP, USAGE, "stop!", "model"))


async def test_a_replay_says_the_same_in_the_same_pieces_and_takes_no_time() -> None:
    texts = [str(number) for number in range(3 * EVENTS_AT_ONCE)]
    replay = Replay(REQUEST, script_of(*texts))
    stream = OutputStream([replay])
    events = [event async for taken in stream for _, event in taken]
    assert [event.text for event in events[:-1] if isinstance(event, Delta)] == texts
    usage = replace(USAGE, queue_s=0.0, ttft_s=0.0)
    assert events[-1] == Finished(FinishReason.STOP, usage, "stop!", "model")
    assert stream.is_over


async def test_a_listener_is_called_until_it_has_all() -> None:
    stream = OutputStream([Replay(REQUEST, script_of(*"x" * 100))])
    done, calls = trio.Event(), 0

    def take(events: Events) -> None:
        nonlocal calls
        calls += 1
        if isinstance(events[-1][1], Finished):
            done.set()

    stream.listen(take)
    assert calls == 0, "called within listen"
    await done.wait()
    assert calls == -(-101 // EVENTS_AT_ONCE)
    await trio.testing.wait_all_tasks_blocked()


async def test_a_replay_can_be_cancelled_once() -> None:
    replay = Replay(REQUEST, script_of("a", "b"))
    replay.cancel(CancelReason.STOPPED)
    replay.cancel(CancelReason.CLIENT_GONE)
    [event] = replay.take_now()
    assert isinstance(event, Failed)
    assert event.error.status == 499
    replay.cancel(CancelReason.STOPPED)


async def test_a_recording_gives_on_everything_and_keeps_no_more_than_it_may() -> None:
    kept: list[Script] = []
    for num_tokens in (10, 10_000):
        generation = FakeGeneration(REQUEST)
        stream = OutputStream([generation])
        recording = Recording(REQUEST, 1000, lambda _, script: kept.append(script))
        stream.add_stage(0, recording)
        generation.push(*(Delta("x", (1,)) for _ in range(num_tokens)))
        assert len(stream.take()) == num_tokens
        generation.finish()
        assert len(stream.take()) == 1
        assert not recording._deltas
    assert [len(script.deltas) for script in kept] == [10]


@pytest.mark.parametrize("num_alternatives", [None, 0, 20])
def test_what_a_token_is_thought_to_take_is_about_what_it_takes(
    num_alternatives: int | None,
) -> None:
    scores: tuple[TokenLogprob, ...] = ()
    if num_alternatives is not None:
        top = ((70_000, " moon", b" moon", -1.25),) * num_alternatives
        scores = (TokenLogprob(70_000, " moon", b" moon", -0.5, top),)
    delta = Delta(" moon", (70_000,), scores)
    sizes = [
        len(msgspec.msgpack.encode(Script((delta,) * count, Finished(FinishReason.STOP, USAGE))))
        for count in (100, 200)
    ]
    assert size_of(delta) == pytest.approx((sizes[1] - sizes[0]) / 100, rel=0.2)


async def test_scores_count_too() -> None:
    kept: list[Script] = []
    generation = FakeGeneration(REQUEST)
    stream = OutputStream([generation])
    recording = Recording(REQUEST, 1000, lambda _, script: kept.append(script))
    stream.add_stage(0, recording)
    score = TokenLogprob(1, "a", b"a", -0.1, top=((1, "a", b"a", -0.1),) * 20)
    generation.push(*(Delta("a", (1,), (score,)) for _ in range(10)))
    generation.finish()
    stream.take()
    assert not kept
