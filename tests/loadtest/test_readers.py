"""Tests of the load test's stream readers: a stream is complete only if it ends with the end marker
of its API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from loadtest.campaign.answers import (
    AnswerReader,
    ChatLines,
    ResponseMessages,
    StreamFailedError,
    read_stream,
)

from .fake_stream_server import PIECES, TOKENS, chat_events, response_events

if TYPE_CHECKING:
    from collections.abc import Iterable

GOOD = ("".join(PIECES), len(PIECES), TOKENS)
"""A complete answer: its text, the number of events with text, and the number of tokens."""
CHAT = list(chat_events(is_broken=False))
RESPONSE = list(response_events(is_broken=False))
ERROR = {"error": {"code": "overloaded", "message": "42 others wait"}}


def lines(events: Iterable[str]) -> list[bytes]:
    return [line for data in events for line in (f"data: {data}".encode(), b"")]


def read(messages: Iterable[str | bytes], reader: AnswerReader) -> tuple[str, int, int]:
    times: list[float] = []
    tokens = read_stream(messages, reader, times.append)
    return reader.text, len(times), tokens


def test_a_chat_stream_is_its_text_and_its_end() -> None:
    assert read(lines(CHAT), ChatLines()) == GOOD


def test_keep_alive_comments_and_the_role_are_no_text() -> None:
    role = json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    assert read([b": keep-alive", b"", *lines([role, *CHAT])], ChatLines()) == GOOD


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        pytest.param([], "without a terminal event", id="nothing"),
        pytest.param(CHAT[:-1], "without a terminal event", id="no DONE"),
        pytest.param([CHAT[0], *CHAT[-2:]], "without finish_reason", id="no reason"),
        pytest.param([*CHAT[:-2], "[DONE]"], "without usage", id="no usage"),
        pytest.param([CHAT[0], json.dumps(ERROR), "[DONE]"], "overloaded", id="error event"),
    ],
)
def test_a_chat_stream_that_ends_otherwise_has_failed(events: list[str], reason: str) -> None:
    with pytest.raises(StreamFailedError, match=reason):
        read(lines(events), ChatLines())


def test_a_response_is_its_text_and_its_end() -> None:
    assert read(map(json.dumps, RESPONSE), ResponseMessages()) == GOOD


def test_a_response_cut_at_its_limit_has_ended_well() -> None:
    usage = {"input_tokens": 1, "output_tokens": 3}
    response = {"status": "incomplete", "usage": usage}
    cut = {"type": "response.incomplete", "response": response}
    assert read([json.dumps(cut)], ResponseMessages()) == ("", 0, 3)


def test_what_comes_after_a_response_is_left_for_the_next() -> None:
    messages = iter([*map(json.dumps, RESPONSE), "the next"])
    assert read(messages, ResponseMessages()) == GOOD
    assert next(messages) == "the next"


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        pytest.param([], "without a terminal event", id="nothing"),
        pytest.param([{"type": "error", "status": 503, **ERROR}], "overloaded", id="error"),
        pytest.param(
            [{"type": "response.failed", "response": {"error": {"type": "overloaded"}}}],
            "overloaded",
            id="failed",
        ),
        pytest.param(
            [{"type": "response.failed", "response": {"error": None}}], "no code", id="no reason"
        ),
    ],
)
def test_a_response_that_ends_otherwise_has_failed(
    last: list[dict[str, object]], reason: str
) -> None:
    with pytest.raises(StreamFailedError, match=reason):
        read(map(json.dumps, [*RESPONSE[:-1], *last]), ResponseMessages())


def test_reasons_hold_no_numbers_that_would_split_a_table_of_failures() -> None:
    with pytest.raises(StreamFailedError) as caught:
        read(lines([json.dumps(ERROR)]), ChatLines())
    assert "42" not in caught.value.reason
