"""Tests of the checks before a request's body is read: limits, concurrency and memory, per
tenant."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.tenants.opening import quotas_in_memory
from server.tenants.tenancy import Tenancy
from server.text.tokenizer import INLINE_CHARS, INLINE_WEIGHT
from triolet.config import DoorConfig
from triolet.errors import overloaded
from triolet.tenants.plans import Plan
from triolet.units import KIB, MIB

from .support.fakes import ChargingFleet, answer_hello, by_hand
from .support.held_work import held_work
from .support.surface import PATIENCE_S, surface
from .support.tenants import LimitedServer, tenant, tenants_of
from .support.websocket import open_socket
from .tiny_text import tiny_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from server.text.tokenizer import TextModel

    from .support.fakes import FakeGeneration
    from .support.surface import Answer, RawClient, Surface

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
BAD: dict[str, Any] = {"messages": [{"role": "user", "content": "\0"}]}
"""A body that is refused once its text is processed."""
PATH = "/v1/chat/completions"
LARGE = 16 * MIB
ROOM_PATIENCE_S = 10.0
"""Timeout for events that take milliseconds."""


class World(LimitedServer):
    """A server with the tenants alice, who has a plan, and bob, who has no limits."""

    async def ask(self, body: object = CHAT, path: str = PATH, name: str = "alice") -> Answer:
        """Send a whole request."""
        return await self.server.post(path, body, headers=key_of(name))

    async def begin(
        self, num_bytes: int, name: str = "alice", *more: str, path: str = PATH
    ) -> RawClient:
        """Send a head that announces a body."""
        client = await self.server.connect()
        length = f"content-length: {num_bytes}"
        key = f"authorization: {key_of(name)['authorization']}"
        kind = "content-type: application/json"
        lines = (f"POST {path} HTTP/1.1", "host: 127.0.0.1", key, kind, *(more or (length,)))
        await client.send("\r\n".join((*lines, "", "")).encode())
        return client


def key_of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


@asynccontextmanager
async def world(
    plan: Plan = Plan("p"),  # noqa: B008 (frozen)
    script: Callable[[FakeGeneration], None] = answer_hello,
    text: TextModel | None = None,
    **changes: object,
) -> AsyncIterator[World]:
    """Run a server; afterwards no request may be in progress and no memory be reserved."""
    quotas = quotas_in_memory()
    names = tenants_of(tenant("alice", "key-of-alice", plan=plan), tenant("bob", "key-of-bob"))
    fleet = ChargingFleet(quotas)
    fleet.script = script
    tenancy = Tenancy(names)
    async with surface(fleet, tenancy=tenancy, quotas=quotas, text=text, **changes) as server:
        yield World(server, quotas, plan)
    assert server.services.bodies.held_bytes == 0
    assert quotas.num_under_way("bob") == 0
    assert quotas.num_under_way("alice") == quotas.num_open


async def refused(client: RawClient) -> tuple[int, dict[str, str]]:
    """Read a refusal sent before any body, and the end of the connection."""
    answer = await client.answer()
    assert answer.headers["connection"] == "close"
    assert int(answer.headers["retry-after"]) >= 1
    assert await client.is_closed()
    return answer.status, answer.error


async def room_is(server: Surface, num_bytes: int) -> None:
    """Wait until bodies occupy this many bytes."""
    with trio.fail_after(ROOM_PATIENCE_S):
        while server.services.bodies.held_bytes != num_bytes:
            await trio.lowlevel.checkpoint()


@pytest.mark.slow
async def test_who_has_no_request_left_is_refused_before_its_body_is_sent() -> None:
    async with world(Plan("p", requests_per_minute=1.0)) as all_of_it:
        assert (await all_of_it.ask()).status == 200
        for more in (("content-length: 100",), ("transfer-encoding: chunked",)):
            client = await all_of_it.begin(0, "alice", "expect: 100-continue", *more)
            async with client.stream:
                status, error = await refused(client)
            assert (status, error["code"]) == (429, "rate_limit_exceeded")


async def test_who_is_let_in_is_asked_for_its_body_where_it_waits_for_that() -> None:
    body = json.dumps(CHAT).encode()
    async with world() as all_of_it:
        length = f"content-length: {len(body)}"
        client = await all_of_it.begin(0, "alice", "expect: 100-continue", length)
        async with client.stream:
            assert (await client.head())[0] == 100
            await client.send(body)
            assert (await client.answer()).status == 200


async def test_bodies_under_way_count_as_requests_at_once_and_end_with_their_clients() -> None:
    async with world(Plan("p", max_concurrent=2)) as all_of_it:
        server, quotas = all_of_it.server, all_of_it.quotas
        first, second = [await all_of_it.begin(LARGE) for _ in range(2)]
        await room_is(server, 2 * LARGE)
        third = await all_of_it.begin(LARGE)
        assert (await refused(third))[0] == 429
        assert (await all_of_it.ask(name="bob")).status == 200
        await first.stream.aclose()
        await room_is(server, LARGE)
        assert quotas.num_under_way("alice") == 1
        assert (await all_of_it.ask()).status == 200
        await second.stream.aclose()
        await third.stream.aclose()
        await room_is(server, 0)


async def test_a_short_request_that_is_refused_leaves_its_connection_usable() -> None:
    body = json.dumps(CHAT).encode()
    async with world(Plan("p", requests_per_minute=1.0)) as all_of_it:
        assert (await all_of_it.ask()).status == 200
        client = await all_of_it.begin(len(body))
        async with client.stream:
            await client.send(body)
            answer = await client.answer()
            assert answer.status == 429
            assert "connection" not in answer.headers
            await client.send(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert (await client.answer()).status == 200


async def test_what_is_refused_after_work_is_a_request_and_what_the_server_fails_is_none() -> None:
    async with world(Plan("p", requests_per_minute=4.0)) as all_of_it:
        for body, status in ((BAD, 400), ({"messages": []}, 400)):
            assert (await all_of_it.ask(body)).status == status
        assert all_of_it.account.requests == pytest.approx(2, abs=0.5)
        all_of_it.server.fleet.refuse_with = overloaded("full", 1.0)
        assert (await all_of_it.ask()).status == 503
        assert all_of_it.account.requests == pytest.approx(2, abs=0.5)
        for _ in range(2):
            assert (await all_of_it.ask(BAD)).status == 400
        assert (await all_of_it.ask(BAD)).status == 429
        assert (await all_of_it.ask(BAD, "/nothing")).status == 404
        assert all_of_it.account.requests >= -0.5, "what was refused at the door costs nothing"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "A"}),
        ("/v1/responses/input_tokens", {"input": "A"}),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    ],
)
async def test_work_on_text_alone_is_a_request(path: str, body: object) -> None:
    plan = Plan("p", requests_per_minute=2.0, tokens_per_minute=1.0, budget=0.0)
    async with world(plan) as all_of_it:
        statuses = [(await all_of_it.ask(body, path)).status for _ in range(3)]
    assert statuses == [200, 200, 429], "it needs no tokens or budget"


async def test_a_client_that_leaves_while_its_text_is_worked_on_pays_one_request() -> None:
    limits = Plan("p", requests_per_minute=4.0, max_concurrent=1)
    long = {"messages": [{"role": "user", "content": "a" * INLINE_WEIGHT}]}
    async with held_work() as held, world(limits, text=tiny_text(do=held.do)) as all_of_it:
        body = json.dumps(CHAT | long).encode()
        client = await all_of_it.begin(len(body))
        await client.send(body)
        with trio.fail_after(PATIENCE_S):
            while not held.turns.num_running:
                await trio.lowlevel.checkpoint()
        await client.stream.aclose()
        with trio.fail_after(PATIENCE_S):
            while all_of_it.quotas.num_under_way("alice"):
                await trio.lowlevel.checkpoint()
        assert all_of_it.account.requests == pytest.approx(3, abs=0.5)
        assert held.turns.num_waiting == 0


async def test_refusals_beyond_a_rate_wait_for_their_answer() -> None:
    async with world(Plan("p", requests_per_minute=1.0)) as all_of_it:
        pace = all_of_it.server.services.refusals
        assert (await all_of_it.ask()).status == 200
        waits = [pace.wait_s("alice", 100.0) for _ in range(100)]
    assert waits[:20] == [0.0] * 20
    assert waits[40] == pytest.approx(1.0, abs=0.1)
    assert max(waits) == 2.0
    assert pace.wait_s("bob", 100.0) == 0.0
    assert pace.wait_s("alice", 104.0) == 0.0


async def test_a_tenant_has_room_for_so_many_bytes_and_all_together_for_more() -> None:
    async with world(door=DoorConfig(max_body_bytes=5 * LARGE)) as all_of_it:
        server = all_of_it.server
        held = [await all_of_it.begin(LARGE) for _ in range(4)]
        await room_is(server, 4 * LARGE)
        one_more = await all_of_it.begin(LARGE)
        assert (await refused(one_more))[0] == 429
        held.append(await all_of_it.begin(LARGE, "bob"))
        await room_is(server, 5 * LARGE)
        beyond_all = await all_of_it.begin(LARGE, "bob")
        assert (await refused(beyond_all))[0] == 503
        for name in ("alice", "bob"):
            assert (await all_of_it.ask(name=name)).status == 200, "a short body always fits"
        assert server.services.bodies.refused == {"own_share": 1, "all": 1}
        for client in (*held, one_more, beyond_all):
            await client.stream.aclose()
        await room_is(server, 0)


async def test_where_there_are_no_tenants_an_address_has_its_room() -> None:
    async with surface() as server:
        clients = []
        for _ in range(5):
            clients.append(await server.connect())
            head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {LARGE}\r\n\r\n"
            head = head.replace("host", "content-type: multipart/b\r\nhost")
            await clients[-1].send(head.encode())
        statuses = [(await client.answer()).status for client in clients]
        for client in clients:
            await client.stream.aclose()
    assert set(statuses) == {415}, "refused for their content, and their memory is released"


async def test_a_body_without_a_length_takes_room_as_it_grows() -> None:
    async with world() as all_of_it:
        server = all_of_it.server
        held = [await all_of_it.begin(LARGE) for _ in range(4)]
        await room_is(server, 4 * LARGE)
        client = await all_of_it.begin(0, "alice", "transfer-encoding: chunked")
        chunk = b"%x\r\n%b\r\n" % (32 * KIB, b" " * (32 * KIB))
        await client.send(chunk)
        await room_is(server, 4 * LARGE + 32 * KIB)
        for _ in range(2):
            await client.send(chunk)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (429, "close")
        for one in (*held, client):
            await one.stream.aclose()
        await room_is(server, 0)


async def test_a_body_without_a_length_is_bounded_like_any_other() -> None:
    async with world(max_body_bytes=100 * KIB) as all_of_it:
        client = await all_of_it.begin(0, "alice", "transfer-encoding: chunked")
        async with client.stream:
            for _ in range(5):
                await client.send(b"%x\r\n%b\r\n" % (32 * KIB, b" " * (32 * KIB)))
            assert (await client.answer()).status == 413


async def test_a_line_of_one_tenants_texts_is_not_in_front_of_anothers() -> None:
    async with (
        held_work() as held,
        world(text=tiny_text(do=held.do)) as all_of_it,
        trio.open_nursery() as nursery,
    ):
        long = "x" * INLINE_CHARS
        for number in range(6):
            body = {"prompt": f"alice {number} {long}", "max_tokens": 1}
            nursery.start_soon(all_of_it.ask, body, "/v1/completions")
        await held.waits(5)
        body = {"prompt": f"bob {long}", "max_tokens": 1}
        nursery.start_soon(all_of_it.ask, body, "/v1/completions", "bob")
        await held.waits(6)
        held.let_all_go()
    texts = [str(args) for _, args in held.done]
    assert ["bob" in text for text in texts].index(True) == 1


@pytest.mark.slow
async def test_a_long_websocket_message_is_refused_unparsed_where_nothing_is_left() -> None:
    nonsense = " " * 5000 + "]"
    create = {"type": "response.create", "input": "Hi", "store": False, "stream_id": "a"}
    async with (
        world(Plan("p", requests_per_minute=1.0)) as all_of_it,
        await open_socket(all_of_it.server, key_of("alice")) as socket,
    ):
        await socket.answer(create)
        await socket.send(json.dumps(create | {"input": "x" * 5000})[:-1] + nonsense)
        refusal = await socket.event()
        assert (refusal["status"], refusal["error"]["code"]) == (429, "rate_limit_exceeded")
        await socket.send(create | {"input": "x" * 5000})
        assert (await socket.event())["stream_id"] == "a"
        await socket.send({"type": "response.cancel", "response_id": 5, "event_id": "r" * 5000})
        assert (await socket.event())["status"] == 400, "control messages are read"
    assert all_of_it.account.requests < 1


async def test_answers_on_a_websocket_count_as_requests_at_once() -> None:
    create = {"type": "response.create", "input": "Hi", "store": False}
    async with (
        world(Plan("p", max_concurrent=1), by_hand) as all_of_it,
        await open_socket(all_of_it.server, key_of("alice")) as socket,
    ):
        await socket.send(create | {"stream_id": "a"})
        await all_of_it.server.fleet.nth(0)
        await socket.send(create | {"stream_id": "b"})
        refusal = (await socket.until("error"))[-1]
        assert (refusal["status"], refusal["stream_id"]) == (429, "b")
        await socket.send(create | {"stream_id": "c", "input": "x" * 100_000})
        await socket.until("error")
        assert all_of_it.server.services.bodies.held_bytes == 0
