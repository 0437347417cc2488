"""Tests of the Gateway API Inference Extension's headers: from trusted proxies they set a request's
class and flow; from others they have no effect."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from structlog.testing import capture_logs

from server.api.gateway_hints import FAIRNESS_ID, MAX_LOGGED, OBJECTIVE
from server.edge.client_address import PROXY_SIGNATURE
from server.tenants.tenancy import Tenancy
from tests.server.api.test_service_tier import schedulings
from tests.server.support.surface import CONFIG, request_bytes, surface
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import open_socket
from tests.server.test_proxy_to_owner import ASK, CHAT, pair
from triolet.errors import SettingError
from triolet.service_class import ServiceClass
from triolet.tenants.plans import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.support.surface import Surface

PROXIES: Final = ("127.0.0.0/8",)
OBJECTIVES: Final = {"premium": "critical", "nightly": "sheddable"}
SAID: Final = {OBJECTIVE: "premium", FAIRNESS_ID: "team-a"}


async def said(server: Surface, headers: dict[str, str], **fields: object) -> tuple[str, str]:
    """Send a request; return the class and flow of the generation."""
    assert (await server.post(CHAT, ASK | fields, headers=headers)).status == 200
    scheduling = schedulings(server)[-1]
    return scheduling.service_class.name.lower(), scheduling.flow


async def test_a_trusted_proxy_chooses_the_class_and_the_flow() -> None:
    async with surface(trusted_proxies=PROXIES, gateway_objectives=OBJECTIVES) as server:
        assert await said(server, SAID) == ("critical", "team-a")
        assert await said(server, SAID, service_tier="flex") == ("critical", "team-a")
        assert await said(server, {OBJECTIVE: "nightly"}) == ("sheddable", "")
        assert await said(server, {FAIRNESS_ID: "b"}, service_tier="flex") == ("sheddable", "b")
        assert await said(server, {}) == ("default", "")


@pytest.mark.parametrize("trusted", [(), ("10.0.0.0/8",)])
async def test_from_anyone_else_they_are_removed(trusted: tuple[str, ...]) -> None:
    async with surface(trusted_proxies=trusted, gateway_objectives=OBJECTIVES) as server:
        with capture_logs() as logs:
            assert await said(server, SAID) == ("default", "")
            assert await said(server, {OBJECTIVE: "other"}) == ("default", "")
        assert "objective_unknown" not in {one["event"] for one in logs}


async def test_a_proxy_that_names_no_client_is_not_trusted_for_it() -> None:
    """HAProxy and others send such a header if they do not know the client's address."""
    unnamed = PROXY_SIGNATURE + b"\x21\x00\x00\x00"
    headers = {**SAID, "Connection": "close"}
    request = request_bytes("POST", CHAT, body=json.dumps(ASK).encode(), headers=headers)
    async with surface(trusted_proxies=PROXIES, gateway_objectives=OBJECTIVES) as server:
        async with await server.sent(unnamed + request) as client:
            assert (await client.answer()).status == 200
        [one] = schedulings(server)
    assert (one.service_class, one.flow) == (ServiceClass.DEFAULT, "")


@pytest.mark.parametrize("flow", ["", "two words", "é", "x" * 256])
async def test_a_malformed_fairness_id_is_ignored(flow: str) -> None:
    async with surface(trusted_proxies=PROXIES) as server:
        assert await said(server, {FAIRNESS_ID: flow}) == ("default", "")
        assert await said(server, {FAIRNESS_ID: "x" * 255}) == ("default", "x" * 255)


async def test_an_unknown_objective_has_the_usual_class_and_is_logged_once() -> None:
    async with surface(trusted_proxies=PROXIES, gateway_objectives=OBJECTIVES) as server:
        with capture_logs() as logs:
            for objective in ("Premium", "Premium", "x" * 5000):
                assert await said(server, {OBJECTIVE: objective}) == ("default", "")
            for number in range(MAX_LOGGED):
                await said(server, {OBJECTIVE: f"{number}"})
        told = [one["objective"] for one in logs if one["event"] == "objective_unknown"]
        assert told[0] == "'Premium'"
        assert len(told) == len(set(told)) == MAX_LOGGED
        assert len(told[1]) <= 200


async def test_a_class_outside_of_the_plan_is_refused() -> None:
    plan = Plan("p", classes=(ServiceClass.DEFAULT,))
    tenancy = Tenancy(tenants_of(tenant("alice", "key", plan=plan)))
    async with surface(
        tenancy=tenancy, trusted_proxies=PROXIES, gateway_objectives=OBJECTIVES
    ) as server:
        headers = {"authorization": "Bearer key"}
        answer = await server.post(CHAT, ASK, headers=SAID | headers)
        assert (answer.status, answer.error["param"]) == (403, None)
        assert "critical is not in the plan p" in answer.error["message"]
        answer = await server.post(CHAT, ASK | {"service_tier": "priority"}, headers=headers)
        assert answer.error["param"] == "service_tier"


async def test_they_apply_to_each_answer_of_a_websocket() -> None:
    async with (
        surface(trusted_proxies=PROXIES, gateway_objectives=OBJECTIVES) as server,
        await open_socket(server, SAID) as client,
    ):
        for _ in range(2):
            await client.answer({"type": "response.create", "input": "hi"})
        assert [(one.service_class, one.flow) for one in schedulings(server)] == [
            (ServiceClass.CRITICAL, "team-a")
        ] * 2


async def test_they_go_on_to_the_server_that_owns_the_key(tmp_path: Path) -> None:
    async with pair(tmp_path, trusted_proxies=PROXIES, gateway_objectives=OBJECTIVES) as both:
        key, owner, other = both.by_key(0)
        headers = SAID | {"idempotency-key": key}
        assert (await other.post(CHAT, ASK, headers=headers)).status == 200
        [scheduling] = schedulings(owner)
    assert (scheduling.service_class, scheduling.flow) == (ServiceClass.CRITICAL, "team-a")


def test_a_class_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        SettingError, match=r"gateway_objectives is .*urgent.*; allowed: critical, default"
    ):
        replace(CONFIG, gateway_objectives={"premium": "urgent"})
