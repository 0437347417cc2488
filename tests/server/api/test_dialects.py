"""Tests of what all APIs have in common: keep-alives, clients that disconnect, and failures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from server.api.anthropic.messages import PING
from server.api.stream import KEEP_ALIVE
from server.contract.generation import CancelReason
from tests.server.support.fakes import FakeFleet, by_hand, saying
from tests.server.support.surface import posted, request_bytes, surface
from triolet.errors import no_worker, overloaded

from .test_cut_tools import ASKS, CHAT, MESSAGES, OLLAMA, RESPONSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.support.surface import Answer

STREAMED = {path: {**body, "stream": True} for path, body in ASKS.items()}
SILENCE = {CHAT: KEEP_ALIVE, MESSAGES: PING, RESPONSES: KEEP_ALIVE, OLLAMA: b'"done":false'}


@pytest.mark.parametrize("has_text", [False, True])
@pytest.mark.parametrize("path", ASKS)
async def test_silence_is_filled_and_a_client_that_leaves_is_noticed(
    path: str, has_text: bool
) -> None:
    fleet = FakeFleet(by_hand)
    request = request_bytes("POST", path, body=json.dumps(STREAMED[path]).encode())
    async with surface(fleet, keep_alive_s=0.01) as server:
        async with await server.sent(request) as client:
            for _ in range(3):
                await client.until(SILENCE[path])
            generation = await fleet.nth(0)
            if has_text:
                generation.say("Hel")
                await client.until(b"Hel")
        assert (await generation.cancellations())[0] is CancelReason.CLIENT_GONE


def of_response(answer: Answer) -> tuple[str, str, str]:
    name, event = answer.named_events[-1]
    error = event["response"]["error"]
    return name, error["code"], error["type"]


@pytest.mark.parametrize(
    ("path", "read", "last", "of_whole", "whole"),
    [
        (
            CHAT,
            lambda answer: (answer.events[-2]["error"]["code"], answer.events[-1]),
            ("no_worker", "[DONE]"),
            lambda answer: answer.error["code"],
            "no_worker",
        ),
        (
            MESSAGES,
            lambda answer: answer.named_events[-1][1]["error"],
            {"type": "overloaded_error", "message": "it died"},
            lambda answer: answer.json["error"],
            {"type": "overloaded_error", "message": "it died"},
        ),
        (
            RESPONSES,
            of_response,
            ("response.failed", "server_error", "no_worker"),
            lambda answer: answer.error["code"],
            "no_worker",
        ),
        (
            OLLAMA,
            lambda answer: json.loads(answer.body.splitlines()[-1]),
            {"error": "it died"},
            lambda answer: answer.json,
            {"error": "it died"},
        ),
    ],
    ids=ASKS,
)
async def test_a_failure_ends_a_stream_and_is_the_status_of_a_whole_answer(
    path: str,
    read: Callable[[Answer], Any],
    last: object,
    of_whole: Callable[[Answer], Any],
    whole: object,
) -> None:
    async with surface(FakeFleet(saying("half", error=no_worker("it died")))) as server:
        streamed = await server.post(path, STREAMED[path])
        answer = await server.post(path, {**ASKS[path], "stream": False})
    assert b"half" in streamed.body
    assert (streamed.status, read(streamed)) == (200, last)
    assert (answer.status, of_whole(answer)) == (503, whole)


@pytest.mark.parametrize("path", ASKS)
async def test_a_refusal_is_decided_before_the_stream_begins(path: str) -> None:
    fleet = FakeFleet()
    fleet.refuse_with = overloaded("too much", 3.0)
    answer = await posted(path, STREAMED[path], fleet=fleet)
    error = answer.json["error"]
    assert error == "too much" if path == OLLAMA else error["message"] == "too much"
    assert path not in (CHAT, RESPONSES) or error["code"] == "overloaded"
    assert answer.status == 503
    assert 3 <= int(answer.headers["retry-after"]) <= 4
    assert 3000 <= int(answer.headers["retry-after-ms"]) <= 3750
