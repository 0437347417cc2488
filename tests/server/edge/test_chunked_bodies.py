"""Tests of chunked bodies that end too late or have too many or too large chunks."""

from __future__ import annotations

import json

import pytest
import trio

from server.edge.http import RequestTurns
from tests.server.support.surface import surface, until
from triolet.config import ServerConfig

HEAD = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class HeldTurns(RequestTurns):
    """Lets one request start; the rest waits until released."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_waits = 0
        self.let_go = trio.Event()

    async def wait(self, sender: bytes) -> None:
        del sender
        self.num_waits += 1
        if self.num_waits > 1:
            await self.let_go.wait()


async def test_a_body_whose_end_waits_while_its_request_is_answered_ends_nothing() -> None:
    async with surface(body_grace_s=0.05) as server:
        server.edge.turns = turns = HeldTurns()
        async with await server.sent(HEAD + b"2\r\n{}\r\n") as client:
            await until(lambda: turns.num_waits == 1)
            await client.send(b"0\r\n\r\n")
            await until(lambda: turns.num_waits == 2)
            assert (await client.answer()).error["code"] == "request_timeout"
            turns.let_go.set()
            assert await client.is_closed()
        assert (await server.request("GET", "/version")).status == 200


@pytest.mark.parametrize(
    ("begin", "size"),
    [(b"", "ffffffffffffffff0"), (b"", "10000000000000000"), (b"", "3e9"), (b"2\r\n{}\r\n", "3e7")],
)
async def test_a_chunk_beyond_the_bound_of_bodies_is_refused_by_its_size(
    begin: bytes, size: str
) -> None:
    async with (
        surface(max_body_bytes=1000) as server,
        await server.sent(HEAD + begin + size.encode() + b"\r\n") as client,
    ):
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert answer.error["message"] == "the request's body is larger than 1000 bytes"
        assert await client.is_closed()


async def test_a_size_that_is_no_number_of_ours_is_refused_before_its_chunk() -> None:
    async with surface() as server:
        for size in (b"0" * 21 + b"1", b"-1", b"0x2", b"2 2", b"1_0"):
            async with await server.sent(HEAD + size + b"\r\n") as client:
                answer = await client.answer()
                assert (answer.status, answer.headers["connection"]) == (400, "close"), size
                assert await client.is_closed()


@pytest.mark.parametrize(("chunk_bytes", "refused_at"), [(1, 5), (9, 41), (10, None)])
async def test_small_chunks_are_refused_beyond_a_number_unless_they_are_large_enough_on_average(
    chunk_bytes: int, refused_at: int | None
) -> None:
    text = json.dumps({"prompt": "a" * 600}).encode()
    pieces = [text[at : at + chunk_bytes] for at in range(0, len(text), chunk_bytes)]
    body = b"".join(chunk(piece) for piece in pieces) + chunk(b"")
    async with (
        surface(free_chunks=4, min_chunk_bytes=10) as server,
        await server.connect() as client,
    ):
        for _ in range(2):  # each request of a connection is counted separately
            await client.send(HEAD + body)
            answer = await client.answer()
            if refused_at is None:
                assert answer.status == 200
                continue
            assert answer.status == 400
            assert answer.error["message"].startswith(
                f"the request's body came in {refused_at} chunks of {refused_at * chunk_bytes} "
                "bytes in all; beyond 4 chunks, one more is allowed per 10 bytes: send larger"
            )
            assert await client.is_closed()
            break


async def test_as_many_chunks_as_are_free_are_taken_whatever_their_size() -> None:
    text = b'{"prompt": "a"}'
    async with (
        surface(free_chunks=len(text), min_chunk_bytes=1000) as server,
        await server.connect() as client,
    ):
        body = b"".join(chunk(bytes([byte])) for byte in text)
        await client.send(HEAD + body + chunk(b""))
        assert (await client.answer()).status == 200
        await client.send(HEAD + chunk(b" ") + body)
        assert (await client.answer()).status == 400


def test_uploads_of_usual_clients_have_chunks_to_spare() -> None:
    config = ServerConfig("", "", (), ())
    largest = config.free_chunks + config.max_body_bytes / config.min_chunk_bytes
    assert config.max_body_bytes / 64 <= largest
    assert config.free_chunks >= 1000
