"""Tests that the API layer sets a request's tenant, service class and deadline on every path: HTTP,
WebSocket, embeddings and batches."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from server.app import build_app
from server.jobs.runner import InnerRequest
from tests.server.support.surface import asked_of, surface
from tests.server.support.tenants import tenancy_of
from tests.server.support.websocket import open_socket
from triolet.service_class import DEFAULT_SCHEDULING, Scheduling, ServiceClass

KEY: Final = "sk-triolet-alice"
HEADERS: Final = {"Authorization": f"Bearer {KEY}"}
CHAT: Final = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 4, "model": "demo"},
}
OF_ALICE: Final = Scheduling("alice")


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_over_http_claims_for_its_tenant(path: str) -> None:
    request = await asked_of(path, BODIES[path], headers=HEADERS, tenancy=tenancy_of(alice=KEY))
    assert request.scheduling == OF_ALICE


async def test_a_request_with_an_idempotency_key_claims_the_same() -> None:
    path = "/v1/chat/completions"
    headers = HEADERS | {"Idempotency-Key": "one"}
    request = await asked_of(path, CHAT, headers=headers, tenancy=tenancy_of(alice=KEY))
    assert request.scheduling == OF_ALICE


@pytest.mark.parametrize("resumable", [False, True])
async def test_an_answer_on_a_websocket_claims_for_its_tenant(resumable: bool) -> None:
    async with surface(tenancy=tenancy_of(alice=KEY)) as server:
        async with await open_socket(server, HEADERS) as socket:
            await socket.send(
                {"type": "response.create", "input": "hi", "store": False, "resumable": resumable}
            )
            await socket.until("response.completed")
        (generation,) = server.fleet.generations
    assert generation.request.scheduling == OF_ALICE


async def test_an_input_of_embeddings_claims_for_its_tenant() -> None:
    async with surface(tenancy=tenancy_of(alice=KEY)) as server:
        await server.post("/v1/embeddings", {"input": ["a", "b"]}, headers=HEADERS)
        assert [one.scheduling for one in server.fleet.inputs] == [OF_ALICE] * 2


async def test_a_line_of_a_batch_claims_for_its_owner_and_stands_behind() -> None:
    async with surface(tenancy=tenancy_of(alice=KEY)) as server:
        app = build_app(server.services)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            body: dict[str, Any] = {"input": "hi"} if "embed" in path else BODIES[path]
            line = json.dumps(body | {"priority": -100}).encode()
            request = InnerRequest("127.0.0.1", path, line, "r", "alice", within_s=86_400.0)
            assert (await request.ask(app)).status == 200
        requests = [one.request for one in server.fleet.generations] + server.fleet.inputs
    assert {one.deadline_s for one in requests} == {86_400.0}, "the rest of its batch's window"
    assert [one.scheduling for one in requests] == [
        Scheduling("alice", service_class=ServiceClass.BATCH)
    ] * 3
    assert min(one.scheduling.priority(one.priority) for one in requests) > Scheduling(
        service_class=ServiceClass.SHEDDABLE
    ).priority(100)


async def test_without_tenants_nobody_claims_anything() -> None:
    request = await asked_of("/v1/chat/completions", CHAT)
    assert request.scheduling == DEFAULT_SCHEDULING
