"""Tests of the relay: from token rows to the events that a reader sees."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from server.contract.generation import Delta, FinishReason, GenerationRequest, TokenLogprob, Usage
from server.contract.generation import Finished as FinishedEvent
from server.scheduling.frames import FrameOutbox
from server.scheduling.output import MAX_WEIGHT, Mailbox, Put, Relay, RelayEnd, packed
from tests.server.tiny_text import EOS_ID, PAD_ID
from transport.frames import End, EndReason, TokenRow, TopToken
from triolet.ids import AttemptKey
from triolet.sampling import SamplingParams

from .world import TEXT, World

if TYPE_CHECKING:
    from collections.abc import Sequence

RID = b"r" * 16


def relay_of(**changes: object) -> Relay:
    settings: dict[str, object] = {
        "request_id": RID,
        "prompt_ids": (1,),
        "sampling": SamplingParams(max_tokens=1000),
        "deadline_s": 1.0,
        **changes,
    }
    return Relay(GenerationRequest(**settings), TEXT)  # type: ignore[arg-type]


def run(relay: Relay, ids: list[int]) -> tuple[str, list[int], RelayEnd | None]:
    """Push tokens; return text, token ids and the end."""
    end = None
    for position, token_id in enumerate(ids):
        assert end is None
        end = relay.push(TokenRow(RID, 0, position, token_id), now=1.0)
    [event] = relay.mailbox.take(now=9.0)
    assert isinstance(event, Delta)
    return event.text, list(event.token_ids), end


LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
DOT = {"max_tokens": 9, "stop_token_ids": (0x2E,)}


@pytest.mark.parametrize(
    ("sampling", "changes", "ids", "text", "end"),
    [
        pytest.param({}, {}, "aé日".encode(), "aé日", None, id="deltas are merged"),
        pytest.param(
            {}, {"stop": ("ab!",)}, [*b"xab", EOS_ID], "xab", RelayEnd(STOP),
            id="the end token is hidden and flushes what was held back",
        ),
        pytest.param(
            {"max_tokens": 2}, {}, [0x61, 0xC3], "a\ufffd", RelayEnd(LENGTH),
            id="the last token allowed flushes half a character",
        ),
        pytest.param(
            {"max_tokens": 3}, {"stop": ("c",)}, b"abc", "ab", RelayEnd(STOP, "c"),
            id="a stop string wins over the last token allowed",
        ),
        pytest.param(
            {"max_tokens": 2}, {"stop": ("a\ufffd",)}, [0x61, 0xC3], "", RelayEnd(STOP, "a\ufffd"),
            id="half a character can complete a stop string",
        ),
        pytest.param(
            DOT, {}, b"a.", "a", RelayEnd(STOP, is_by_stop_token=True), id="a stop token is hidden"
        ),
        pytest.param(
            DOT, {"include_stop": True}, b"a.", "a.", RelayEnd(STOP, is_by_stop_token=True),
            id="unless the request includes it",
        ),
        pytest.param(
            DOT | {"min_tokens": 2}, {}, b"...", "..", RelayEnd(STOP, is_by_stop_token=True),
            id="nothing ends before min_tokens",
        ),
        pytest.param(
            {"max_tokens": 9, "stop_token_ids": (EOS_ID,)}, {}, [0x61, EOS_ID], "a",
            RelayEnd(STOP), id="a model's end token stays one if the client names it",
        ),
        pytest.param(
            {"max_tokens": 9, "ignore_eos": True}, {}, [0x61, EOS_ID, 0x62], "ab", None,
            id="ignored end tokens do not end",
        ),
        pytest.param({}, {}, [PAD_ID], "", None, id="special tokens are hidden"),
        pytest.param(
            {}, {"skip_special_tokens": False}, [PAD_ID], "<|pad|>", None, id="or shown on demand"
        ),
    ],
)  # fmt: skip
def test_what_a_reader_sees_of_tokens_and_how_they_end(
    sampling: dict[str, Any], changes: dict[str, object], ids: Sequence[int], text: str,
    end: RelayEnd | None,
) -> None:  # fmt: skip
    relay = relay_of(sampling=SamplingParams(**{"max_tokens": 1000} | sampling), **changes)
    assert run(relay, list(ids)) == (text, list(ids), end)


def test_logprobs_come_with_text_and_bytes() -> None:
    relay = relay_of(sampling=SamplingParams(max_tokens=9, logprobs=1))
    top = (TopToken(0x61, -0.1), TopToken(0xC3, -2.0))
    relay.push(TokenRow(RID, 0, 0, 0xC3, -2.0, top), now=0.0)
    [event] = relay.mailbox.take(now=9.0)
    assert isinstance(event, Delta)
    assert event.logprobs == (
        TokenLogprob(
            0xC3,
            "\ufffd",
            b"\xc3",
            -2.0,
            ((0x61, "a", b"a", -0.1), (0xC3, "\ufffd", b"\xc3", -2.0)),
        ),
    )


def test_logprobs_nobody_asked_for_are_not_shown() -> None:
    relay = relay_of()
    relay.push(TokenRow(RID, 0, 0, 0x61, -2.0), now=0.0)
    [event] = relay.mailbox.take(now=9.0)
    assert isinstance(event, Delta)
    assert event.logprobs == ()


def test_a_mailbox_knows_how_long_its_oldest_event_waits() -> None:
    mailbox = Mailbox(TEXT)
    assert mailbox.waiting_since is None
    mailbox.put(Put("a", (1,), ()), now=5.0)
    mailbox.put(Put("", (2,), ()), now=6.0)
    assert mailbox.waiting_since == 5.0
    assert mailbox.take(now=9.0) == [Delta("a", (1, 2))]
    assert mailbox.waiting_since is None
    assert mailbox.take(now=9.0) == []


def test_heavy_events_are_taken_in_parts_and_nothing_is_lost() -> None:
    """A client that takes the first part must write 20 alternatives for each token."""
    relay = relay_of(sampling=SamplingParams(max_tokens=64, logprobs=20))
    alternatives = tuple(TopToken(0x61, -1.0 - i) for i in range(20))
    for position in range(64):
        relay.push(TokenRow(RID, 0, position, 0x61 + position % 26, -1.0, alternatives), now=1.0)
    mailbox = relay.mailbox
    terminal = FinishedEvent(FinishReason.LENGTH, Usage(1, 64))
    mailbox.close(terminal, now=1.0)
    texts, events = [], []
    while mailbox.waiting_since is not None:
        events = mailbox.take(now=5.0)
        assert isinstance(events[0], Delta)
        assert len(events[0].logprobs) == len(events[0].token_ids) <= MAX_WEIGHT // 21
        texts.append(events[0].text)
        assert mailbox.num_taken == sum(map(len, texts))
        assert mailbox.waiting_since in (5.0, None), "a reader has not stalled"
    assert "".join(texts) == "".join(chr(0x61 + position % 26) for position in range(64))
    assert events[1:] == [terminal]
    assert len(texts) == 6


def test_a_relay_and_what_waits_in_it_hold_nobody_but_their_owner() -> None:
    """They are freed with their last reference; the garbage collector, which frees cycles, runs
    rarely."""
    relay = relay_of(sampling=SamplingParams(max_tokens=9, logprobs=1))
    relay.push(TokenRow(RID, 0, 0, 0x61, -0.5, (TopToken(0x61, -0.5),)), now=1.0)
    seen = weakref.ref(relay)
    gc.disable()
    try:
        del relay
        assert seen() is None
    finally:
        gc.enable()


def test_nothing_comes_behind_the_terminal_event() -> None:
    mailbox = Mailbox(TEXT)
    terminal = FinishedEvent(FinishReason.STOP, Usage(1, 2))
    mailbox.close(terminal, now=1.0)
    with pytest.raises(AssertionError):
        mailbox.put(Put("a", (1,), ()), now=2.0)
    with pytest.raises(AssertionError):
        mailbox.close(terminal, now=2.0)
    assert mailbox.take(now=9.0) == [terminal]
    assert mailbox.waiting_since is None


def test_frames_for_a_worker_that_is_gone_are_not_kept() -> None:
    world = World()
    decode = world.worker(world.decode)
    outbox = FrameOutbox()
    outbox.allow(decode, AttemptKey(RID, 0), 9, 1)
    world.requests.lost(decode, "test", world.now)
    outbox.send(decode, End(RID, 0, EndReason.CANCEL))
    assert outbox.drain_frames() == []
    assert outbox.drain_credit() == []


def test_scores_that_wait_take_little_memory() -> None:
    alternatives = tuple(TopToken(200 + i, -1.0 - i) for i in range(20))
    rows = [TokenRow(RID, 0, position, 200, -1.0, alternatives) for position in range(64)]
    tracemalloc.start()
    try:
        waiting = [packed(row, -1.0) for row in rows]
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(waiting) == 64
    assert num_bytes < 64 * 1024
