"""Tests of the log of refused requests: one line each, limited in rate, without the request's
content."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from server.api.door import RefusalLog
from server.tenants.opening import quotas_in_memory
from server.tenants.tenancy import Tenancy
from tests.server.support.fakes import FakeFleet
from tests.server.support.surface import surface
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import PATH, handshake
from triolet.config import DoorConfig
from triolet.errors import RequestError, overloaded
from triolet.tenants.plans import Plan

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

CHAT = "/v1/chat/completions"
SECRET = "something private"
KEY = {"authorization": "Bearer key"}


def body(**fields: Any) -> bytes:  # noqa: ANN401 (any JSON)
    return json.dumps({"messages": [{"role": "user", "content": SECRET}], **fields}).encode()


REFUSED: list[tuple[str, str, bytes | None, dict[str, str], int]] = [
    ("POST", CHAT, body(temperature=SECRET), KEY, 400),
    ("POST", CHAT, body(), {}, 401),
    ("POST", CHAT, body(), {"authorization": "Bearer wrong"}, 401),
    ("GET", "/metrics", None, KEY, 403),
    ("GET", "/v1/nothing", None, KEY, 404),
    ("POST", CHAT, body(), KEY | {"Content-Length": "999999999"}, 413),
    ("POST", CHAT, body(), KEY | {"Content-Type": "multipart/mixed"}, 415),
    ("POST", CHAT, body(), {"authorization": "Bearer poor"}, 429),
]


def refusals(logs: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [entry for entry in logs if entry["event"] == "request_refused"]


@pytest.mark.parametrize(("method", "path", "content", "headers", "status"), REFUSED)
async def test_a_refused_request_leaves_one_line(
    method: str, path: str, content: bytes | None, headers: dict[str, str], status: int
) -> None:
    poor = tenant("bob", "poor", plan=Plan("spent", budget=0.0))
    tenancy = Tenancy(tenants_of(tenant("alice", "key"), poor))
    async with surface(FakeFleet(), tenancy=tenancy, quotas=quotas_in_memory()) as server:
        await server.request("POST", CHAT, body=body(), headers={"authorization": "Bearer poor"})
        with capture_logs() as logs:
            answer = await server.request(method, path, body=content, headers=headers)
        assert answer.status == status
        (line,) = refusals(logs)
        assert (line["status"], line["log_level"]) == (status, "info")
        assert line["code"] == answer.error["code"]
        assert SECRET not in str(line)
        if "path" in line:
            assert (line["method"], line["path"]) == (method, path)
            assert line["request_id"] == answer.headers["x-request-id"]


async def test_a_refused_handshake_leaves_a_line_and_is_counted() -> None:
    tenancy = Tenancy(tenants_of(tenant("alice", "key")))
    async with surface(FakeFleet(), tenancy=tenancy) as server:
        client = await server.connect()
        with capture_logs() as logs:
            async with client.stream:
                await client.send(handshake({"Authorization": "Bearer wrong"}))
                status, _ = await client.head()
        (line,) = refusals(logs)
        assert (status, line["status"], line["method"], line["path"]) == (401, 401, "WS", PATH)
        assert server.services.metrics.http.errors()["401"] == 1


def test_lines_have_a_rate_and_the_next_one_counts_those_left_out() -> None:
    error = RequestError("no", status=404, code="not_found")
    log = RefusalLog(DoorConfig(refusals_logged_per_s=2.0))
    with capture_logs() as logs:
        for _ in range(9):
            log.tell(error, 100.0)
        log.tell(overloaded("later", 1.0), 100.0)
        log.tell(error, 100.5)
        log.tell(error, 200.0)
    assert [entry["left_out"] for entry in refusals(logs)] == [0, 0, 7, 0]
