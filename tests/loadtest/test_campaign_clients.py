"""Tests that clients of fault campaigns distinguish a broken connection from an error answer."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from loadtest.campaign import client
from loadtest.campaign.answers import Ask
from loadtest.campaign.client import Story, ask_all, tell
from loadtest.harness.http import get

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from loadtest.campaign.answers import Surface

RESET = b"reset"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
HEAD = b"HTTP/1.1 200 \r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = [
    {"choices": [{"delta": {"content": "Once "}, "token_ids": [7], "finish_reason": None}]},
    {"choices": [{"delta": {"content": "upon"}, "token_ids": [8], "finish_reason": None}]},
    {"choices": [{"delta": {}, "finish_reason": "length"}]},
    {"choices": [], "usage": USAGE},
]


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def events(answer: Sequence[object]) -> bytes:
    return b"".join(chunked(f"data: {json.dumps(event)}\n\n".encode()) for event in answer)


WHOLE = [HEAD, events(ANSWER), chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"]
BROKEN = [HEAD, events(ANSWER[:1])]
OVERLOADED = [b"HTTP/1.1 503 \r\ncontent-length: 8\r\n\r\ntoo many"]


@asynccontextmanager
async def scripted(*scripts: list[bytes]) -> AsyncIterator[str]:
    """Answer each connection with the next script, then close it, or reset it."""
    waiting = iter(scripts)

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some(65536)
        for data in next(waiting):
            if data == RESET:
                linger = struct.pack("ii", 1, 0)
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                await stream.send_all(data)
        stream.socket.close()

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


def story(surface: Surface = "sse") -> Story:
    return Story(Ask(0, "ask-00000", surface, {}))


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the delay between retries."""
    monkeypatch.setattr(client, "RETRY_DELAY_S", 0.0)


async def test_a_whole_stream_is_an_answer_and_each_piece_is_timed() -> None:
    told = story()
    async with scripted(WHOLE) as url:
        await tell(url, told, retries_broken=False)
    assert told.failure is None
    assert told.answer is not None
    assert (told.answer.text, told.answer.token_ids, told.answer.end) == (
        "Once upon",
        (7, 8),
        "length",
    )
    assert len(told.arrivals) == 2
    assert told.sent_at <= told.arrivals[0] <= told.arrivals[1]
    assert told.longest_silence_s <= told.arrivals[1] - told.sent_at


@pytest.mark.parametrize("end", [[], [RESET]], ids=["closed", "reset"])
async def test_a_broken_connection_is_tried_again_where_that_is_wanted(end: list[bytes]) -> None:
    told = story()
    async with scripted([*BROKEN, *end], [*end], WHOLE) as url:
        await tell(url, told, retries_broken=True)
    assert told.failure is None
    assert told.answer is not None
    assert len(told.broken) == 2
    assert told.broken[1].token_ids == ()
    if not end:  # a reset may discard data that was sent before it
        assert told.broken[0].token_ids == (7,)


@pytest.mark.parametrize(
    ("surface", "script", "retries_broken", "why"),
    [
        ("sse", BROKEN, False, "connection broken"),
        ("ws", [b"HTTP/1.1 503 \r\ncontent-length: 0\r\n\r\n"], False, "refused with 503"),
        ("sse", OVERLOADED, True, "status 503"),
        ("sse", [HEAD, events(ANSWER), b"0\r\n\r\n"], True, "without a terminal event"),
        (
            "sse",
            [HEAD, events([{"error": {"code": "no_worker"}}]), b"0\r\n\r\n"],
            True,
            "no_worker",
        ),
        ("sse", [HEAD, chunked(b"data: {\n\n"), b"0\r\n\r\n"], True, "cannot be parsed"),
    ],
)
async def test_a_failed_answer_is_not_tried_again_nor_a_broken_connection_unasked(
    surface: Surface, script: list[bytes], retries_broken: bool, why: str
) -> None:
    told = story(surface)
    async with scripted(script) as url:
        await tell(url, told, retries_broken=retries_broken)
    assert told.answer is None
    assert why in (told.failure or "")
    assert bool(told.broken) is not retries_broken


async def test_a_server_that_is_not_there_breaks_the_connection() -> None:
    told = story()
    async with scripted() as url:
        pass
    await tell(url, told, retries_broken=False)
    assert "cannot connect" in (told.failure or "")
    assert not told.broken[0].had_begun


async def test_clients_share_the_requests_and_every_end_is_told() -> None:
    body = json.dumps(
        {
            "choices": [{"message": {"content": "ab"}, "token_ids": [1, 2], "finish_reason": "x"}],
            "usage": USAGE,
        }
    ).encode()
    script = [b"HTTP/1.1 200 \r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)]
    ended: list[str] = []
    asks = [Ask(number, f"ask-{number}", "plain", {}) for number in range(5)]
    async with scripted(*[script] * 5) as url:
        stories = await ask_all(url, asks, 2, lambda told: ended.append(told.ask.name))
    assert [told.ask.number for told in stories] == [0, 1, 2, 3, 4]
    assert all(told.answer is not None for told in stories)
    assert sorted(ended) == [ask.name for ask in asks]


async def test_a_plain_get_gives_status_and_body() -> None:
    async with scripted(OVERLOADED) as url:
        assert await get(url, "/metrics") == (503, b"too many")
