"""Tests of access control: every route, every spelling of its path, every way to send no valid
key."""

from __future__ import annotations

import ast
import base64
import hmac
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest
import trio

from server.api.access import KEY_SUBPROTOCOL, SUBPROTOCOL, sent_key
from server.api.proxying import PROXIED
from server.api.route import WS, Permission
from server.routes import ROUTES
from server.tenants.tenancy import Tenancy
from tests.server.support.fakes import FakeFleet
from tests.server.support.surface import PATIENCE_S, RawClient, Surface, request_bytes, surface
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import handshake, open_socket
from tests.server.test_peers import two_servers
from triolet.errors import RequestError
from triolet.tenants.api_keys import digest_of
from triolet.tenants.plans import TenantRole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.api.route import Route

Case = TypeVar("Case")
ALICE, BOB = "sk-triolet-alice", "sk-triolet-bob"
OPERATOR = "sk-triolet-operator"
RING = Tenancy(
    tenants_of(
        tenant("alice", ALICE),
        tenant("bob", BOB),
        tenant("root", OPERATOR, role=TenantRole.OPERATOR),
    )
)
WRONG: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": f"Basic {ALICE}"},
    {"Authorization": ALICE},
    {"Authorization": f"Bearer {ALICE}x"},
    {"Authorization": f"Bearer {digest_of(ALICE)}"},
    {"Authorization": f"Bearer {ALICE[:-1]}"},
    {"Authorization": "Bearer " + "x" * 5000},
    {"X-Api-Key": "x"},
    {"X-Forwarded-For": "127.0.0.1"},
]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def path_of(route: Route) -> str:
    """Return a route's path, with values for its variable parts."""
    return re.sub(r"<[^>]*>", "x", route.path)


def closed_routes() -> Iterator[tuple[str, str]]:
    """Yield every route that needs a key."""
    for route in ROUTES.rows:
        if route.permission is not Permission.NONE:
            yield ("GET" if route.method == WS else route.method), path_of(route)


def spellings(path: str) -> list[str]:
    """Return other spellings of a path; some of them have bypassed checks that compare paths."""
    return [
        path,
        f"{path}?",
        f"{path}?api_key={ALICE}",
        f"{path}/",
        f"/.{path}",
        f"/static/..{path}",
        f"/health/live/..{path}",
        f"/%2e{path}",
        f"/%{ord(path[1]):02x}{path[2:]}",
        f"{path};/health/live",
        f"{path}%00",
        path.upper(),
    ]


IN_TURN: Final = 3
"""Spellings and wrong keys per route in the short form, so that each is used on many routes.
Parsing of paths and keys does not depend on the route."""


def in_turn(cases: list[Case], turn: int, *, whole: bool) -> list[Case]:
    """Return the first case, and those of the others whose turn it is; all of them in the whole
    form."""
    if whole:
        return cases
    first, *others = cases
    return [first, *(others[(IN_TURN * turn + n) % len(others)] for n in range(IN_TURN))]


@pytest.mark.proof
@pytest.mark.slow
async def test_no_route_is_open_that_is_not_named_as_open(whole: bool) -> None:
    async with surface(tenancy=RING) as server:
        routes = sorted(set(closed_routes()))
        assert len(routes) > 2 * max(len(WRONG), len(spellings("/x")))
        for turn, (method, path) in enumerate(routes):
            for target in in_turn(spellings(path), turn, whole=whole):
                answer = await server.request(method, target, body=b"{}")
                assert answer.status in {400, 401, 404}, (method, target, answer)
            for headers in in_turn(WRONG, turn, whole=whole):
                answer = await server.request(method, path, body=b"{}", headers=headers)
                assert answer.status == 401, (method, path, headers)
        assert server.fleet.generations == []


def paths_with(permission: Permission) -> set[str]:
    return {route.path for route in ROUTES.rows if route.permission is permission}


def test_what_is_open_to_all_is_health_and_what_pages_are_made_of() -> None:
    assert paths_with(Permission.NONE) == {
        *("/health/live", "/health/ready", "/health", "/ping"),
        *("/", "/dashboard", "/docs", "/static/<path:name>", "/openapi.json"),
    }


ALL: Final = frozenset(Permission)
FOR_USERS: Final = frozenset({Permission.NONE, Permission.USER})
OVER_TCP: Final = (
    ({}, {Permission.NONE}),
    (bearer("wrong"), {Permission.NONE}),
    (bearer(ALICE), FOR_USERS),
    (bearer(OPERATOR), ALL),
)
"""Headers of a caller, and the permissions of the routes that answer it."""
OVER_OWN_SOCKET: Final = (
    ({}, ALL),
    (bearer("wrong"), ALL),
    ({PROXIED: "server-1"}, frozenset()),
    (bearer("wrong") | {PROXIED: "server-1"}, frozenset()),
    (bearer(ALICE) | {PROXIED: "server-1"}, FOR_USERS),
    (bearer(OPERATOR) | {PROXIED: "server-1"}, ALL),
)
"""The same for callers on the peer socket. A request passed on for a client always needs the
client's key."""


async def asked(stream: trio.SocketStream, route: Route, headers: dict[str, str]) -> int:
    """Return the status with which a route answers an empty request."""
    body = b"{}" if route.method == "POST" else None
    async with RawClient(stream) as client:
        await client.send(request_bytes(route.method, path_of(route), body=body, headers=headers))
        return (await client.answer()).status


async def test_every_route_answers_the_callers_of_its_permission_and_no_others(
    tmp_path: Path,
) -> None:
    routes = [route for route in ROUTES.rows if route.method != WS]
    found, expected = {}, {}
    async with surface(tenancy=RING) as server, two_servers(tmp_path, tenancy=[RING, RING]):
        own_socket = str(tmp_path / "server-0")
        for route in routes:
            for number, (headers, opened) in enumerate((*OVER_TCP, *OVER_OWN_SOCKET)):
                if number < len(OVER_TCP):
                    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
                else:
                    stream = await trio.open_unix_socket(own_socket)
                status = await asked(stream, route, headers)
                found[route.endpoint, number] = status if status in {401, 403} else 0
                refusal = 403 if ALICE in str(headers) else 401
                expected[route.endpoint, number] = 0 if route.permission in opened else refusal
    assert found == expected


async def test_without_tenants_every_route_answers_a_local_caller_without_a_key() -> None:
    async with surface() as server:
        for route in ROUTES.rows:
            if route.method != WS:
                stream = await trio.open_tcp_stream("127.0.0.1", server.port)
                assert await asked(stream, route, {}) not in {401, 403}, route.endpoint


async def test_a_server_with_tenants_says_that_it_is_a_triolet_without_a_key() -> None:
    async with surface(tenancy=RING) as server:
        for path, status in (("/health/live", "live"), ("/health/ready", "ready")):
            told = (await server.request("GET", path)).json
            assert (told["status"], told["version"]) == (status, version("triolet"))
        assert (await server.request("GET", "/version")).status == 401


async def test_a_refusal_says_what_to_send_and_nothing_of_the_key() -> None:
    async with surface(tenancy=RING) as server:
        for headers in WRONG:
            answer = await server.post("/v1/chat/completions", CHAT, headers=headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            message = answer.error["message"]
            assert ("Bearer KEY" in message) is not ("is wrong, or has expired" in message)
            assert "alice" not in answer.body.decode()


@pytest.mark.parametrize("headers", [bearer(ALICE), {"X-Api-Key": ALICE}])
async def test_a_key_opens_every_endpoint(headers: dict[str, str]) -> None:
    async with surface(tenancy=RING) as server:
        assert (await server.request("GET", "/v1/models", headers=headers)).status == 200
        assert (await server.post("/v1/chat/completions", CHAT, headers=headers)).status == 200
        assert (await server.request("GET", "/nothing", headers=headers)).status == 404


async def test_what_concerns_everybody_needs_an_operators_key() -> None:
    for_operators = paths_with(Permission.OPERATOR)
    assert for_operators == {"/admin/scale", "/fleet/rollouts"} | {
        f"{path}{own}"
        for path in (
            *("/metrics", "/load", "/admin/slo"),
            *(
                "/fleet/audit",
                "/fleet/history",
                "/fleet/status",
                "/fleet/usage",
            ),
        )
        for own in ("", "/own")
    }
    async with surface(tenancy=RING) as server:
        for path in for_operators:
            answer = await server.request("GET", path, headers=bearer(ALICE))
            assert (answer.status, answer.error["code"]) == (403, "permission_denied"), path
            assert (await server.request("GET", path, headers=bearer(OPERATOR))).status == 200
        assert (await server.post("/v1/chat/completions", CHAT, headers=bearer(OPERATOR))).status


async def test_without_keys_everybody_on_this_machine_is_let_in() -> None:
    async with surface() as server:
        assert (await server.request("GET", "/v1/models")).status == 200


def offered(key: str) -> dict[str, str]:
    word = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
    return {"Sec-WebSocket-Protocol": f"{SUBPROTOCOL}, {KEY_SUBPROTOCOL}{word}"}


async def test_a_websocket_needs_a_key_too_and_never_in_its_address() -> None:
    async with surface(tenancy=RING) as server:
        for headers in (*WRONG, offered("x"), {"Sec-WebSocket-Protocol": "triolet, triolet-key.é"}):
            async with await server.connect() as client:
                in_address = b"/responses?api_key=" + ALICE.encode()
                await client.send(handshake(headers).replace(b"/responses", in_address))
                assert (await client.answer()).status in {400, 401}
        for headers in (bearer(ALICE), offered(ALICE)):
            async with await open_socket(server, headers) as socket:
                await socket.send({"type": "response.create", "input": "hi"})
                await socket.until("response.completed")
            is_browser = "Sec-WebSocket-Protocol" in headers
            assert socket.headers.get("sec-websocket-protocol") == (
                SUBPROTOCOL if is_browser else None
            )


async def salts(server: Surface, key: str, **more: Any) -> set[bytes]:  # noqa: ANN401
    """Return the cache salts of the same question sent in every way."""
    begun = len(server.fleet.generations)
    await server.post("/v1/chat/completions", CHAT | more, headers=bearer(key))
    await server.post("/v1/completions", {"prompt": "hi"} | more, headers=bearer(key))
    async with await open_socket(server, bearer(key)) as socket:
        await socket.send({"type": "response.create", "input": "hi"} | more)
        with trio.fail_after(PATIENCE_S):
            await socket.until("response.completed")
    fresh = server.fleet.generations[begun:]
    assert len(fresh) == 3
    return {generation.request.cache_salt for generation in fresh}


async def test_tenants_share_no_kv_and_a_tenant_shares_with_itself() -> None:
    async with surface(FakeFleet(), tenancy=RING) as server:
        plain = {key: await salts(server, key) for key in (ALICE, BOB)}
        named = {key: await salts(server, key, cache_salt="s") for key in (ALICE, BOB)}
        assert await salts(server, ALICE) == plain[ALICE]
    every = [*plain.values(), *named.values()]
    assert all(len(one) == 1 and all(one) for one in every)
    assert len(set.union(*every)) == 4


async def test_without_keys_salts_are_what_clients_call_them() -> None:
    async with surface(FakeFleet()) as server:
        await server.post("/v1/completions", {"prompt": "hi"})
        await server.post("/v1/completions", {"prompt": "hi", "cache_salt": "s"})
        nobody, named = (generation.request.cache_salt for generation in server.fleet.generations)
    assert nobody == b""
    assert len(named) == 16


def test_digests_are_compared_in_constant_time_for_right_and_wrong_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[Any, Any]] = []
    real = hmac.compare_digest

    def record(one: Any, other: Any) -> bool:  # noqa: ANN401
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", record)
    assert RING.tenant_of(ALICE, 0.0).name == "alice"
    for key in ("", None, "x" * 257, "x", ALICE[:-1]):
        with pytest.raises(RequestError):
            RING.tenant_of(key, 0.0)
    assert len(compared) == 3
    assert {len(side) for pair in compared for side in pair} == {64}


def test_a_key_itself_is_compared_with_nothing() -> None:
    tree = ast.parse((Path(__file__).parents[2] / "server/tenants/tenancy.py").read_text())
    names = [
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In)
        for name in [node.left, *node.comparators]
        if isinstance(name, ast.Name)
    ]
    assert not {"key", "digest", "found"} & set(names)


def test_two_keys_in_two_headers_are_one() -> None:
    assert sent_key(f"bearer {ALICE}", BOB) == ALICE
    assert sent_key(None, BOB) == BOB
    assert sent_key("Basic x", BOB) is None
