"""Tests of the load test's HTTP client for streams, with canned answers split at every possible
byte."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from loadtest.harness.streams import COMPLETIONS, Clients, Stream, StreamBrokenError, post

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EVENTS = (
    b'data: {"choices":[{"text":" star"}]}\n\n',
    b'data: {"choices":[{"text":" star"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
)
STREAM = b"HTTP/1.1 200 \r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%s\r\n" % (len(event), event) for event in (b": ping\n\n", *EVENTS)
)
END = b"0\r\n\r\n"
REFUSAL_BODY = b'{"error":{"code":"overloaded"}}'
REFUSAL = (
    b"HTTP/1.1 503 \r\nretry-after: 7\r\ncontent-length: %d\r\n\r\n" % len(REFUSAL_BODY)
) + REFUSAL_BODY


@asynccontextmanager
async def saying(*answers: bytes, piece: int) -> AsyncIterator[Clients]:
    """Serve these answers, one per request, in pieces of a given size."""
    left = list(answers)

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            while left and await stream.receive_some():
                answer = left.pop(0)
                for at in range(0, len(answer), piece):
                    await stream.send_all(answer[at : at + piece])
                if not answer.endswith((END, REFUSAL_BODY)):
                    return

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        async with Clients(url, trio.current_time).reading() as clients:
            yield clients
        nursery.cancel_scope.cancel()


REQUEST = post(COMPLETIONS, {"prompt": [1, 2, 3]}, {"x-request-timeout-ms": "8000"})


@pytest.mark.parametrize("piece", [1, 7, 4096])
async def test_a_stream_is_read_to_its_end_and_its_connection_used_again(piece: int) -> None:
    async with saying(STREAM + END, STREAM + END, piece=piece) as clients:
        before = trio.current_time()
        for _ in range(2):
            answer = await clients.ask(REQUEST)
            assert (answer.status, answer.num_tokens, answer.code) == (200, 2, "")
            assert before <= answer.times[0] <= trio.current_time()
        assert clients.opened == 1


@pytest.mark.parametrize("piece", [1, 4096])
async def test_a_refusal_says_when_to_come_again(piece: int) -> None:
    async with saying(REFUSAL, STREAM + END, piece=piece) as clients:
        answer = await clients.ask(REQUEST)
        assert (answer.status, answer.code, answer.retry_after_s) == (503, "overloaded", 7.0)
        assert answer.times == []
        assert (await clients.ask(REQUEST)).num_tokens == 2
        assert clients.opened == 1


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    head = b"HTTP/1.1 200 \r\nconnection: close\r\n"
    last = STREAM.replace(b"HTTP/1.1 200 \r\n", head) + END
    async with saying(last, STREAM + END, piece=64) as clients:
        for opened in (1, 2):
            assert (await clients.ask(REQUEST)).num_tokens == 2
            assert clients.opened == opened


async def test_a_stream_without_its_end_is_broken_and_its_connection_not_used_again() -> None:
    async with saying(STREAM, STREAM + END, piece=64) as clients:
        with pytest.raises(StreamBrokenError):
            await clients.ask(REQUEST)
        assert (await clients.ask(REQUEST)).num_tokens == 2
        assert clients.opened == 2


def test_a_request_carries_its_headers_and_its_length() -> None:
    head, _, body = REQUEST.partition(b"\r\n\r\n")
    assert b"x-request-timeout-ms: 8000" in head
    assert f"content-length: {len(body)}".encode() in head


def test_events_are_counted_however_the_bytes_are_cut() -> None:
    body = b"HTTP/1.1 200 OK\r\n\r\n" + b'data: {"choices": []}\n\n' * 5 + b"data: [DONE]\n\n"
    for size in (1, 3, 7, 1000):
        stream = Stream(asked_at=1.0)
        for at in range(0, len(body), size):
            stream.take(body[at : at + size], now=2.0)
        stream.check()
        assert len(list(stream.events())) == len(stream.times) == 5, size
        assert stream.ttft_s == 1.0


def test_an_error_is_not_taken_for_a_stream() -> None:
    stream = Stream()
    stream.take(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}", now=2.0)
    with pytest.raises(StreamBrokenError, match="503"):
        stream.check()
