"""Tests of problems of hypercorn and Quart over HTTP/1.1, with raw sockets."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import trio
from quart import Quart

from server.contract.generation import CancelReason
from server.edge.tcp import GOODBYE_TIMEOUT_S
from tests.server.support.clock import pass_time
from tests.server.support.fakes import FakeFleet, by_hand
from tests.server.support.surface import PATIENCE_S, request_bytes, surface
from triolet.config import ServerConfig

if TYPE_CHECKING:
    from trio.testing import MockClock


GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLOSE = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def post(body: dict[str, Any]) -> bytes:
    return request_bytes("POST", "/v1/chat/completions", body=json.dumps(body).encode())


def chat(**more: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **more}


async def test_a_connection_is_used_again() -> None:
    async with surface() as server, await server.connect() as client:
        for request in (GET, post(chat()), post(chat(stream=True)), GET, GET):
            await client.send(request)
            assert (await client.answer()).status == 200
        assert server.edge.connections == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_connection_close_is_heeded(is_streamed: bool) -> None:
    body = json.dumps(chat(stream=is_streamed)).encode()
    async with surface() as server:
        for request in (
            CLOSE,
            request_bytes(
                "POST", "/v1/chat/completions", body=body, headers={"Connection": "close"}
            ),
        ):
            async with await server.sent(request) as client:
                assert (await client.answer()).status == 200
                assert await client.is_closed()


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"GET /version HTTP/1.0\r\n\r\n", [200]),
        (GET + b"GET /version HTTP/1.1\nHost: a\n\n", [200, 400]),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            [400],
        ),
    ],
    ids=["http-1.0", "second-request", "broken-chunk"],
)
async def test_the_last_answer_of_a_connection_is_followed_by_its_end(
    data: bytes, statuses: list[int]
) -> None:
    async with surface() as server, await server.sent(data) as client:
        assert [(await client.answer()).status for _ in statuses] == statuses
        assert await client.is_closed()


async def test_an_idle_connection_is_closed_after_its_time_and_not_before() -> None:
    async with surface(idle_connection_s=0.1) as server, await server.connect() as client:
        began = trio.current_time()
        await client.send(GET)
        await client.answer()
        assert await client.is_closed()
        assert trio.current_time() - began >= 0.1


def test_idle_connections_outlive_those_of_load_balancers() -> None:
    assert ServerConfig("", "", (), ()).idle_connection_s > 60


async def test_a_connection_that_its_client_closed_is_not_kept_for_the_idle_time() -> None:
    async with surface(idle_connection_s=60) as server:
        client = await server.sent(GET)
        await client.answer()
        await client.stream.aclose()
        await server.all_connections_closed()


@pytest.mark.parametrize(
    "headers",
    ["Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__"],
)
async def test_http_2_is_not_spoken(headers: str) -> None:
    upgrade = f"GET /version HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode()
    async with surface() as server:
        async with await server.sent(upgrade) as client:
            assert (await client.answer()).json["version"]
        async with await server.sent(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
        ) as client:
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (505, "http_version_not_supported")
            assert await client.is_closed()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /version HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400),
        (b"GET http://localhost/version HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
            400,
        ),
        (b"GET /version HTTP/1.1\r\n" + b"X: y\r\n" * 65 + b"\r\n", 431),
        (b"GET /version HTTP/1.1\r\nX: " + b"y" * 20_000, 431),
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
        (b"GET /version HTTP/3.0\r\nHost: a\r\n\r\n", 505),
    ],
    ids=["bare-lf", "absolute", "smuggling", "many", "large", "no-host", "version"],
)
async def test_a_refused_head_gets_one_answer_and_the_end(head: bytes, status: int) -> None:
    async with surface() as server, await server.sent(head) as client:
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert answer.error["message"]
        assert await client.is_closed()


@pytest.mark.slow
@pytest.mark.parametrize("begin", [b"", b"G", b"GET /version HTTP/1.1\r\nHost: "])
async def test_a_slow_head_is_ended(begin: bytes) -> None:
    async with (
        surface(header_timeout_s=0.2) as server,
        await server.sent(begin) if begin else await server.connect() as client,
    ):
        if begin:
            assert (await client.answer()).error["code"] == "request_timeout"
        assert await client.is_closed()


@pytest.mark.slow
async def test_drops_of_a_head_do_not_win_time() -> None:
    async with (
        surface(header_timeout_s=0.3) as server,
        await server.sent(GET) as client,
        trio.open_nursery() as nursery,
    ):
        await client.answer()

        async def drip() -> None:
            for byte in b"GET /version HTTP/1.1\r\n" + b"X: " + b"y" * 10_000:
                await client.send(bytes([byte]))
                await trio.sleep(0.02)
            pytest.fail("each drop extended the deadline")

        nursery.start_soon(drip)
        assert (await client.answer()).status == 408
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_slow_body_is_ended() -> None:
    async with surface(body_grace_s=0.2, body_min_bytes_per_s=1000) as server:
        request = post(chat())
        async with await server.sent(request[:-5]) as client:
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (408, "request_timeout")
            assert await client.is_closed()
        assert server.fleet.generations == []


@pytest.mark.slow
async def test_a_body_with_a_steady_rate_is_not_ended(mock_clock: MockClock) -> None:
    body = json.dumps(chat(stop="x" * 60, metadata={"pad": "x" * 400})).encode()
    request = request_bytes("POST", "/v1/chat/completions", body=body)
    async with (
        surface(body_grace_s=0.2, body_min_bytes_per_s=500) as server,
        await server.connect() as client,
    ):
        for start in range(0, len(request), 100):
            await client.send(request[start : start + 100])
            await pass_time(mock_clock, 0.05)
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("pieces", ["together", "apart", "in the middle"])
async def test_requests_behind_one_another_are_answered_in_turn(pieces: str) -> None:
    fleet = FakeFleet(by_hand)
    requests = [post(chat()), post(chat(stream=True)), GET, CLOSE]
    data = b"".join(requests)
    async with surface(fleet) as server, await server.connect() as client:
        if pieces == "together":
            await client.send(data)
        elif pieces == "apart":
            for request in requests:
                await client.send(request)
        else:
            await client.send(data[:-20])
        first = await fleet.nth(0)
        assert len(fleet.generations) == 1
        first.say("one")
        first.finish()
        assert (await client.answer()).json["choices"][0]["message"]["content"] == "one"
        second = await fleet.nth(1)
        second.say("two")
        second.finish()
        assert b"two" in (await client.answer()).body
        assert (await client.answer()).json["version"]
        if pieces == "in the middle":
            await client.send(data[-20:])
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.is_closed()


@pytest.mark.slow
@pytest.mark.proof
async def test_a_client_faster_than_our_bookkeeping_is_answered(whole: bool) -> None:
    """With Content-Length a client has the answer before the server has finished with the
    request."""
    count = 500 if whole else 150

    def hurry(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(count):
                connection.sendall(GET)
                answer = b""
                while b"}" not in answer:
                    data = connection.recv(65536)
                    assert data, "closed instead of answered"
                    answer += data

    async with surface() as server, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(trio.to_thread.run_sync, hurry, server.port)


async def test_a_client_that_floods_behind_its_request_is_cut() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server, await server.sent(post(chat())) as client:
        generation = await fleet.nth(0)
        with trio.fail_after(PATIENCE_S):
            try:
                while True:
                    await client.send(b"x" * 65536)
            except trio.BrokenResourceError:
                await generation.was_cancelled.wait()
    assert generation.cancelled == [CancelReason.CLIENT_GONE]


async def test_connections_beyond_the_limit_are_told() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet, max_connections=2, max_connections_per_address=2) as server:
        first, second = await server.connect(), await server.connect()
        async with first.stream, second.stream:
            for client in (first, second):
                await client.send(post(chat(stream=True)))
                assert (await client.head())[0] == 200
            async with await server.connect() as third:
                answer = await third.answer()
                assert (answer.status, answer.error["code"]) == (503, "overloaded")
                assert await third.is_closed()
        await server.all_connections_closed()
        assert (await server.request("GET", "/version")).status == 200


async def test_expect_continue_is_answered_before_the_body() -> None:
    request = post(chat())
    head, _, body = request.partition(b"\r\n\r\n")
    async with (
        surface() as server,
        await server.sent(head + b"\r\nExpect: 100-continue\r\n\r\n") as client,
    ):
        assert (await client.head())[0] == 100
        await client.send(body)
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("status", [404, 413, 415])
async def test_a_client_that_is_still_sending_sees_why_it_is_refused(status: int) -> None:
    path, kind = {
        404: ("/nope", "application/json"),
        413: ("/tokenize", "application/json"),
        415: ("/tokenize", "multipart/form-data; boundary=b"),
    }[status]
    body = b"x" * 4_000_000
    bound = 1000 if status == 413 else len(body)

    def post_all(url: str) -> int:
        with httpx2.Client(base_url=url, timeout=PATIENCE_S) as client:
            return client.post(path, content=body, headers={"content-type": kind}).status_code

    async with surface(max_body_bytes=bound) as server:
        for _ in range(5):
            assert await trio.to_thread.run_sync(post_all, server.url) == status


async def test_a_client_that_never_stops_sending_is_cut() -> None:
    async with (
        surface(max_body_bytes=1000) as server,
        await server.sent(b"POST /tokenize HTTP/1.1\r\nContent-Length: 9999\r\n\r\n") as client,
    ):
        assert (await client.answer()).status == 413
        assert await client.is_closed()
        await server.all_connections_closed(GOODBYE_TIMEOUT_S + PATIENCE_S)


@pytest.mark.slow
async def test_a_stream_may_be_longer_than_quart_lets_answers_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quart's default is a minute; a moment here keeps the test short."""
    short = Quart.default_config | {"RESPONSE_TIMEOUT": 0.05, "BODY_TIMEOUT": 0.05}
    monkeypatch.setattr(Quart, "default_config", short)
    fleet = FakeFleet(by_hand)
    async with surface(fleet, keep_alive_s=0.05) as server:
        request = post(chat(stream=True))
        async with await server.sent(request[:-5]) as client:
            await trio.sleep(0.15)  # a slow body: only our limits apply to it
            await client.send(request[-5:])
            generation = await fleet.nth(0)
            await client.head()
            while await client.chunk() != b": keep-alive\n\n":
                pass
            for _ in range(3):
                assert await client.chunk() == b": keep-alive\n\n"
            generation.say("at last")
            generation.finish()
            rest = b""
            while data := await client.chunk():
                rest += data
            assert b"at last" in rest
            assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
async def test_hundreds_of_dropped_streams_leave_nothing() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server:

        async def drop(index: int) -> None:
            client = await server.sent(post(chat(stream=index % 2 == 0, n=1 + index % 3)))
            if index % 2 == 0:
                await client.head()
            await client.stream.aclose()

        async with trio.open_nursery() as nursery:
            for index in range(200):
                nursery.start_soon(drop, index)
        with trio.fail_after(PATIENCE_S):
            for generation in fleet.generations:
                await generation.was_cancelled.wait()
        await server.all_connections_closed()
        fleet.script = lambda generation: generation.finish()
        assert (await server.post("/v1/chat/completions", chat())).status == 200
