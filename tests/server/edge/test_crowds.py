"""Tests of many connections from one address, and of clients behind proxies, on real sockets."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import trio
from quart import request as quart_request
from quart import websocket

from server.edge.client_address import PROXY_SIGNATURE
from tests.server.edge.test_client_address import preamble
from tests.server.support.fakes import FakeFleet, by_hand
from tests.server.support.surface import PATIENCE_S, RawClient, Surface, request_bytes, surface
from tests.server.support.tenants import tenancy_of
from tests.server.support.websocket import TEXT, frame_bytes

if TYPE_CHECKING:
    import pytest

HERE = ("127.0.0.0/8",)
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
AUDIT = b"GET /fleet/audit HTTP/1.1\r\nHost: localhost\r\n\r\n"
KEYED = b"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer of-alice\r\n\r\n"
OTHER = "127.0.0.2"
CHAT = request_bytes(
    "POST",
    "/v1/chat/completions",
    body=json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode(),
)


async def connected(server: Surface, stack: AsyncExitStack, source: str | None = None) -> RawClient:
    """Connect, and wait until the server has accepted it."""
    taken = sum(server.edge.places.turned_away.values()) + server.edge.connections
    client = await server.connect(source)
    await stack.enter_async_context(client.stream)
    with trio.fail_after(PATIENCE_S):
        while sum(server.edge.places.turned_away.values()) + server.edge.connections == taken:
            await trio.lowlevel.checkpoint()
    return client


async def asked(client: RawClient, data: bytes) -> int:
    await client.send(data)
    return (await client.answer()).status


async def test_one_address_with_idle_connections_only_keeps_no_other_out() -> None:
    async with surface(max_connections=8) as server, AsyncExitStack() as stack:
        crowd = [await connected(server, stack) for _ in range(12)]
        assert server.edge.connections == 4
        neighbour = await connected(server, stack, OTHER)
        assert await asked(neighbour, GET) == 200
        assert [await client.is_closed() for client in crowd[:8]] == [True] * 8
        assert await asked(crowd[-1], GET) == 200


async def test_a_full_server_closes_who_has_shown_no_key_before_a_tenants_idle_connection() -> None:
    tenancy = tenancy_of(alice="of-alice")
    async with surface(tenancy=tenancy, max_connections=4) as server, AsyncExitStack() as stack:
        tenant = await connected(server, stack, OTHER)
        assert await asked(tenant, KEYED) == 200
        stranger = await connected(server, stack, OTHER)
        assert await asked(stranger, GET) == 401
        crowd = [await connected(server, stack) for _ in range(2)]
        newcomer = await connected(server, stack, "127.0.0.3")
        assert await stranger.is_closed()
        assert await asked(newcomer, KEYED) == 200
        assert await asked(tenant, KEYED) == 200
        assert await asked(crowd[0], GET) == 401


async def test_connections_on_which_something_runs_stay_and_their_address_gets_a_429() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet, max_connections=4) as server, AsyncExitStack() as stack:
        busy = [await connected(server, stack) for _ in range(2)]
        for client in busy:
            await client.send(CHAT)
            assert (await client.head())[0] == 200
        late = await connected(server, stack)
        answer = await late.answer()
        assert (answer.status, answer.error["code"]) == (429, "too_many_connections")
        assert "--trusted-proxies" in answer.error["message"]
        assert await late.is_closed()
        neighbours = [await connected(server, stack, OTHER) for _ in range(3)]
        assert await asked(neighbours[-1], GET) == 200
        assert server.edge.places.turned_away == {"evicted": 1, "address": 1, "server": 0}


async def test_a_refusal_is_read_by_a_client_that_has_sent_its_request_already() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet, max_connections=1) as server, AsyncExitStack() as stack:
        busy = await connected(server, stack)
        await busy.send(CHAT)
        assert (await busy.head())[0] == 200
        for _ in range(20):
            async with await server.connect(OTHER) as client:
                assert await asked(client, CHAT) == 503


async def shown_client(server: Surface, data: bytes, *, is_websocket: bool = False) -> str | None:
    """Return the client's address as a route sees it."""
    async with await server.sent(data) as client:
        if not is_websocket:
            return (await client.answer()).body.decode()
        assert (await client.head())[0] == 101
        head = await client.exactly(2)
        return (await client.exactly(head[1])).decode()


async def test_a_trusted_proxy_names_the_client_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tests.server.support.surface as support

    build = support.build_app

    def with_mirror(services: object, storage: object) -> object:
        app = build(services, storage)  # type: ignore[arg-type]

        @app.get("/v1/mirror")
        async def mirror() -> str:
            return str(quart_request.remote_addr)

        @app.websocket("/v1/mirror")
        async def mirror_socket() -> None:
            await websocket.send(str(websocket.remote_addr))

        return app

    monkeypatch.setattr(support, "build_app", with_mirror)
    get = request_bytes("GET", "/v1/mirror")
    forged = request_bytes("GET", "/v1/mirror", headers={"X-Forwarded-For": "192.0.2.7"})
    upgrade = request_bytes(
        "GET",
        "/v1/mirror",
        headers={
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Forwarded": "for=192.0.2.7",
        },
    )
    async with surface() as server:
        assert await shown_client(server, forged) == "127.0.0.1"
        assert await shown_client(server, upgrade, is_websocket=True) == "127.0.0.1"
        async with await server.sent(preamble("192.0.2.7") + get) as client:
            answer = await client.answer()
            assert answer.status == 400
            assert "--trusted-proxies" in answer.error["message"]
    async with surface(trusted_proxies=HERE) as server:
        assert await shown_client(server, forged) == "192.0.2.7"
        assert await shown_client(server, upgrade, is_websocket=True) == "192.0.2.7"
        assert await shown_client(server, preamble("192.0.2.8") + get) == "192.0.2.8"
        # The client behind PROXY protocol is not a proxy: its headers are its own claim.
        assert await shown_client(server, preamble("192.0.2.8") + forged) == "192.0.2.8"
        assert await shown_client(server, get) == "127.0.0.1"


async def test_a_client_that_a_proxy_calls_local_is_not_from_here() -> None:
    audit = request_bytes("GET", "/fleet/audit", headers={"X-Forwarded-For": "127.0.0.1"})
    for trusted in ((), HERE):
        async with surface(trusted_proxies=trusted) as server, await server.connect() as client:
            assert await asked(client, audit) == 403
    async with surface(trusted_proxies=HERE) as server:
        for data, status in (
            (preamble("127.0.0.1") + AUDIT, 403),
            (preamble("192.0.2.8") + AUDIT, 403),
            (preamble("192.0.2.8", command=0x20) + AUDIT, 200),
        ):
            async with await server.connect() as client:
                assert await asked(client, data) == status


async def test_no_claim_of_an_address_opens_what_siblings_may_ask() -> None:
    tenancy = tenancy_of(alice="of-alice")
    async with surface(tenancy=tenancy, trusted_proxies=HERE) as server:
        for claim in ("<local>", "127.0.0.1", "::1"):
            headers = {"X-Forwarded-For": claim, "X-Triolet-Passed-On": "server-0"}
            answer = await server.request("GET", "/fleet/audit/own", headers=headers)
            assert answer.status == 401


async def test_connections_by_proxy_protocol_count_for_their_client() -> None:
    bounds = {"max_connections": 8, "max_connections_per_address": 2}
    async with (
        surface(FakeFleet(by_hand), trusted_proxies=HERE, **bounds) as server,
        AsyncExitStack() as stack,
    ):
        for _ in range(2):
            client = await connected(server, stack)
            await client.send(preamble("192.0.2.8") + CHAT)
            assert (await client.head())[0] == 200
        third = await connected(server, stack)
        await third.send(preamble("192.0.2.8") + CHAT)
        assert (await third.head())[0] == 429
        others = [await connected(server, stack) for _ in range(4)]
        for client in others:
            assert await asked(client, GET) == 200  # the proxy itself is not limited


async def test_a_preamble_drop_by_drop_ends_with_the_deadline_of_a_head() -> None:
    async with (
        surface(trusted_proxies=HERE, header_timeout_s=0.2) as server,
        await server.sent(PROXY_SIGNATURE[:5]) as client,
    ):
        assert await client.is_closed()


async def test_a_malformed_preamble_closes_the_connection() -> None:
    async with surface(trusted_proxies=HERE) as server, await server.connect() as client:
        assert await asked(client, PROXY_SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12)) == 400
        assert await client.is_closed()


async def test_an_open_websocket_is_not_idle() -> None:
    upgrade = request_bytes(
        "GET",
        "/v1/responses",
        headers={
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        },
    )
    async with surface(max_connections=2) as server, AsyncExitStack() as stack:
        talking = await connected(server, stack)
        await talking.send(upgrade)
        assert (await talking.head())[0] == 101
        late = await connected(server, stack)
        assert (await late.answer()).status == 429
        await talking.send(frame_bytes(TEXT, b"{}"))
        assert await talking.exactly(2)
