"""The lean client against canned bytes, cut where they may be cut."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from loadtest.overload.http_client import Asker, BrokenAnswerError, request_bytes

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
async def saying(*answers: bytes, piece: int) -> AsyncIterator[Asker]:
    """Serve these answers, one for each request, in pieces of so many bytes."""
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
        asker = Asker(listeners[0].socket.getsockname()[1])
        yield asker
        await asker.close()
        nursery.cancel_scope.cancel()


REQUEST = request_bytes(1, {"prompt": [1, 2, 3]}, {"x-request-timeout-ms": "8000"})


@pytest.mark.parametrize("piece", [1, 7, 4096])
async def test_a_stream_is_read_to_its_end_and_its_connection_used_again(piece: int) -> None:
    async with saying(STREAM + END, STREAM + END, piece=piece) as asker:
        before = trio.current_time()
        for _ in range(2):
            answer = await asker.ask(REQUEST)
            assert (answer.status, answer.tokens, answer.code) == (200, 2, "")
            assert answer.first_at is not None
            assert before <= answer.first_at <= trio.current_time()
        assert asker.opened == 1


@pytest.mark.parametrize("piece", [1, 4096])
async def test_a_refusal_says_when_to_come_again(piece: int) -> None:
    async with saying(REFUSAL, STREAM + END, piece=piece) as asker:
        answer = await asker.ask(REQUEST)
        assert (answer.status, answer.code, answer.retry_after_s) == (503, "overloaded", 7.0)
        assert answer.first_at is None
        assert (await asker.ask(REQUEST)).tokens == 2
        assert asker.opened == 1


async def test_a_stream_without_its_end_is_broken_and_its_connection_not_used_again() -> None:
    async with saying(STREAM, STREAM + END, piece=64) as asker:
        with pytest.raises(BrokenAnswerError):
            await asker.ask(REQUEST)
        assert (await asker.ask(REQUEST)).tokens == 2
        assert asker.opened == 2


def test_a_request_carries_its_headers_and_its_length() -> None:
    head, _, body = REQUEST.partition(b"\r\n\r\n")
    assert b"x-request-timeout-ms: 8000" in head
    assert f"content-length: {len(body)}".encode() in head
