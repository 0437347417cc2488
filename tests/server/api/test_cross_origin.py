"""Tests of CORS: what `--allow-origin` permits pages of other origins to do, and what it does
not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from server.tenants.opening import quotas_in_memory
from server.tenants.tenancy import Tenancy
from tests.server.support.fakes import ChargingFleet, FakeFleet
from tests.server.support.surface import CONFIG, surface
from tests.server.support.tenants import tenancy_of, tenant, tenants_of
from tests.server.support.websocket import handshake, open_socket
from triolet.config import ANY_ORIGIN, ServerConfig
from triolet.errors import ConfigError, overloaded
from triolet.tenants.plans import Plan, TenantRole

if TYPE_CHECKING:
    from tests.server.support.surface import Answer

PAGE = "https://app.example:8443"
EDITOR = "vscode-webview://editor"
ALLOWED = (PAGE, EDITOR)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "surprise": 1}
KEY = {"Authorization": "Bearer key-of-alice"}
ASKED = "Authorization, X-Stainless-Lang,content-type"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": ASKED,
}
ADMIN = (
    "/metrics",
    "/metrics/own",
    "/load",
    "/fleet/status",
    "/fleet/audit",
    "/fleet/usage",
    "/fleet/rollouts",
    "/admin/slo",
)


def exposed(answer: Answer) -> set[str]:
    return set(answer.headers["access-control-expose-headers"].split(", "))


async def test_a_preflight_needs_no_key_and_its_request_does() -> None:
    async with surface(tenancy=tenancy_of(alice="key-of-alice"), allow_origins=ALLOWED) as server:
        path = "/v1/chat/completions"
        first = await server.request("OPTIONS", path, headers=PREFLIGHT)
        assert (first.status, first.body) == (204, b"")
        assert first.headers["access-control-allow-origin"] == PAGE
        assert "POST" in first.headers["access-control-allow-methods"].split(", ")
        assert first.headers["access-control-allow-headers"] == ASKED
        assert first.headers["access-control-max-age"] == str(CONFIG.preflight_max_age_s)
        assert first.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in first.headers

        refused = await server.post(path, CHAT, headers={"Origin": PAGE})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        assert {"x-request-id", "www-authenticate"} <= exposed(refused)

        answer = await server.post(path, CHAT, headers={"Origin": PAGE} | KEY)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert exposed(answer) >= {"x-request-id", "x-triolet-ignored", "openai-processing-ms"}


async def test_a_preflight_that_names_no_headers_or_nonsense_gets_the_usual_ones() -> None:
    async with surface(allow_origins=ALLOWED) as server:
        for asked in ("", "a b", "x" * 5000, ",,"):
            headers = PREFLIGHT | {"Access-Control-Request-Headers": asked}
            answer = await server.request("OPTIONS", "/v1/models", headers=headers)
            assert "authorization" in answer.headers["access-control-allow-headers"]


async def test_errors_and_streams_can_be_read_by_an_allowed_page() -> None:
    plan = Plan("p", requests_per_minute=1.0)
    tenancy = Tenancy(tenants_of(tenant("alice", "key-of-alice", plan=plan)))
    quotas = quotas_in_memory()
    fleet = ChargingFleet(quotas)
    async with surface(fleet, tenancy=tenancy, quotas=quotas, allow_origins=ALLOWED) as server:
        headers = KEY | {"Origin": EDITOR}
        stream = await server.post("/v1/chat/completions", CHAT | {"stream": True}, headers=headers)
        assert stream.events[-1] == "[DONE]"
        assert stream.headers["access-control-allow-origin"] == EDITOR
        limited = await server.post("/v1/chat/completions", CHAT, headers=headers)
        assert limited.status == 429
        assert exposed(limited) >= {"retry-after", "retry-after-ms", "x-ratelimit-limit-requests"}
        missing = await server.request("GET", "/v1/nothing", headers=headers)
        assert (missing.status, missing.headers["access-control-allow-origin"]) == (404, EDITOR)
    async with surface(allow_origins=ALLOWED) as server:
        server.fleet.refuse_with = overloaded("no room", retry_after_s=1.0)
        busy = await server.post("/v1/chat/completions", CHAT, headers={"Origin": EDITOR})
        assert (busy.status, busy.headers["access-control-allow-origin"]) == (503, EDITOR)
        assert exposed(busy) >= {"retry-after", "retry-after-ms"}


@pytest.mark.parametrize(
    ("allowed", "origin"),
    [
        ((), PAGE),
        (ALLOWED, "https://app.example"),
        (ALLOWED, "https://evil.example"),
        (ALLOWED, PAGE.upper()),
        (ALLOWED, "null"),
        (ALLOWED, f"{PAGE}.evil.example"),
    ],
)
async def test_a_page_that_is_not_allowed_is_refused_as_before(
    allowed: tuple[str, ...], origin: str
) -> None:
    async with surface(allow_origins=allowed) as server:
        headers = PREFLIGHT | {"Origin": origin}
        first = await server.request("OPTIONS", "/v1/chat/completions", headers=headers)
        answer = await server.post("/v1/chat/completions", CHAT, headers={"Origin": origin})
        listed = await server.request("GET", "/v1/models", headers={"Origin": origin})
        assert not server.fleet.generations
    assert (first.status, answer.status, listed.status) == (403, 403, 200)
    for one in (first, answer, listed):
        assert not [name for name in one.headers if name.startswith("access-control-")]
    assert listed.headers.get("vary") == ("Origin" if allowed else None)


async def test_any_origin_may_be_allowed() -> None:
    async with surface(allow_origins=(ANY_ORIGIN,)) as server:
        answer = await server.post("/v1/chat/completions", CHAT, headers={"Origin": "null"})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, ANY_ORIGIN)
        assert "access-control-allow-credentials" not in answer.headers


async def test_no_page_of_another_origin_reads_what_is_for_operators() -> None:
    root = tenant("root", "key-of-root", role=TenantRole.OPERATOR)
    async with surface(tenancy=Tenancy(tenants_of(root)), allow_origins=(ANY_ORIGIN,)) as server:
        key = {"Authorization": "Bearer key-of-root"}
        for path in ADMIN:
            first = await server.request("OPTIONS", path, headers=PREFLIGHT)
            answer = await server.request("GET", path, headers=key | {"Origin": PAGE})
            assert (first.status, answer.status) == (401, 200), path
            for one in (first, answer):
                assert not [name for name in one.headers if name.startswith("access-control-")]
        document = await server.request("GET", "/openapi.json", headers={"Origin": PAGE})
        assert document.headers["access-control-allow-origin"] == ANY_ORIGIN


async def test_a_websocket_obeys_the_same_option() -> None:
    async with surface(FakeFleet(), allow_origins=ALLOWED) as server:
        socket = await open_socket(server, {"Origin": EDITOR})
        await socket.answer({"type": "response.create", "input": "hi"})
        await socket.client.stream.aclose()
        async with await server.sent(handshake({"Origin": "https://evil.example"})) as client:
            assert (await client.answer()).status == 403


@pytest.mark.parametrize(
    "origin",
    ["", "null", "app.example", "https://app.example/", "https://App.example", "https://a:443"],
)
def test_what_no_browser_sends_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="allow_origins"):
        ServerConfig("", "", (), (), allow_origins=(origin,))
