"""Tests of service classes in the API: how a request asks for one, which are allowed, and how the
answer reports it."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from server.app import build_app
from server.jobs.runner import InnerRequest
from server.tenants.memory_store import MemoryStore, QuotaObserver, SpendWatch
from server.tenants.quotas import Quotas
from server.tenants.tenancy import Tenancy
from tests.server.api.test_claims import BODIES as CLAIMED
from tests.server.api.test_claims import CHAT, HEADERS, KEY
from tests.server.support.fakes import FakeText
from tests.server.support.surface import Answer, Surface, surface
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import open_socket
from triolet.config import QuotaConfig
from triolet.service_class import Scheduling, ServiceClass
from triolet.tenants.plans import Plan, Prices

BODIES: Final[dict[str, dict[str, Any]]] = {**CLAIMED, "/v1/embeddings": {"input": "hi"}}
GOLD: Final = Plan(
    "gold",
    weight=4.0,
    classes=(ServiceClass.SHEDDABLE, ServiceClass.CRITICAL),
    max_running=3,
    kv_share=0.5,
    cache_share=0.25,
    max_context_tokens=40,
    max_output_tokens=20,
)


def tenancy(plan: Plan = GOLD) -> Tenancy:
    return Tenancy(tenants_of(tenant("alice", KEY, plan=plan)))


async def post(server: Surface, path: str, **more: object) -> Answer:
    return await server.post(path, BODIES[path] | more, headers=HEADERS)


def schedulings(server: Surface) -> list[Scheduling]:
    return [one.request.scheduling for one in server.fleet.generations] + [
        one.scheduling for one in server.fleet.inputs
    ]


@pytest.mark.parametrize("path", BODIES)
async def test_a_class_of_the_plan_is_what_the_tier_says(path: str) -> None:
    async with surface(tenancy=tenancy()) as server:
        for tier in (None, "auto", "default", "scale", "priority", "flex"):
            assert (await post(server, path, service_tier=tier)).status == 200
        usual = Scheduling("alice", 4.0, ServiceClass.SHEDDABLE, 3, 0.5, 0.25)
        critical = Scheduling("alice", 4.0, ServiceClass.CRITICAL, 3, 0.5, 0.25)
        assert schedulings(server) == [usual] * 4 + [critical, usual]
        assert (await post(server, path, service_tier="urgent")).status == 400


@pytest.mark.parametrize("path", BODIES)
async def test_a_class_outside_the_plan_is_a_403_that_names_it(path: str) -> None:
    async with surface(tenancy=tenancy(Plan("basic"))) as server:
        answer = await post(server, path, service_tier="priority")
        assert answer.status == 403
        error = answer.json["error"]
        assert error.get("code", "permission_denied") == "permission_denied"
        assert "critical is not in the plan basic" in error["message"]
        assert schedulings(server) == []


async def test_an_answer_says_which_class_it_was_if_it_was_asked() -> None:
    async with surface(tenancy=tenancy()) as server:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            assert "service_tier" not in (await post(server, path)).json
            answer = (await post(server, path, service_tier="auto")).json
            assert answer["service_tier"] == "flex"
            stream = await post(server, path, service_tier="priority", stream=True)
            assert b'"service_tier":"priority"' in stream.body
        path = "/v1/messages"
        assert "service_tier" not in (await post(server, path)).json["usage"]
        for tier, shown in (("standard_only", "standard"), ("priority", "priority")):
            answer = (await post(server, path, service_tier=tier)).json
            assert answer["usage"]["service_tier"] == shown
            stream = await post(server, path, service_tier=tier, stream=True)
            assert f'"service_tier":"{shown}"'.encode() in stream.body


async def test_a_batch_needs_its_class_in_the_plan_and_has_no_other() -> None:
    basic = Plan("basic", classes=(ServiceClass.DEFAULT, ServiceClass.BATCH))
    line = json.dumps(CHAT | {"service_tier": "priority"}).encode()
    path = "/v1/chat/completions"
    async with surface(tenancy=tenancy(basic)) as server:
        line_request = InnerRequest("127.0.0.1", path, line, "r", "alice", 60.0)
        answer = await line_request.ask(build_app(server.services))
        assert (answer.status, json.loads(answer.body)["service_tier"]) == (200, "batch")
        assert [one.service_class for one in schedulings(server)] == [ServiceClass.BATCH]
    async with surface(tenancy=tenancy()) as server:
        line_request = InnerRequest("127.0.0.1", path, line, "r", "alice", 60.0)
        answer = await line_request.ask(build_app(server.services))
        assert answer.status == 403
        assert schedulings(server) == []
        answer2 = await server.post("/v1/batches", {}, headers=HEADERS)
        assert (answer2.status, answer2.error["code"]) == (403, "permission_denied")


async def test_without_tenants_every_class_may_be_asked_for() -> None:
    async with surface() as server:
        answer = await server.post("/v1/chat/completions", CHAT | {"service_tier": "priority"})
        assert answer.json["service_tier"] == "priority"


@pytest.mark.parametrize(
    ("path", "more", "param", "numbers"),
    [
        ("/v1/chat/completions", {"max_tokens": 21}, "max_tokens", ("20", "21")),
        (
            "/v1/chat/completions",
            {"max_completion_tokens": 21},
            "max_completion_tokens",
            ("20", "21"),
        ),
        ("/v1/completions", {"max_tokens": 21}, "max_tokens", ("20", "21")),
        ("/v1/responses", {"max_output_tokens": 21}, "max_output_tokens", ("20", "21")),
        ("/v1/completions", {"prompt": "x" * 30, "max_tokens": 11}, "prompt", ("30", "11", "40")),
        ("/v1/completions", {"prompt": "x" * 40}, "prompt", ("40",)),
        ("/v1/embeddings", {"input": ["x", "y" * 41]}, "input", ("41", "40")),
    ],
)
async def test_what_a_plan_does_not_allow_is_a_400_with_the_numbers(
    path: str, more: dict[str, object], param: str, numbers: tuple[str, ...]
) -> None:
    async with surface(tenancy=tenancy()) as server:
        answer = await post(server, path, **more)
        assert (answer.status, answer.error["param"]) == (400, param)
        for word in ("plan gold", *numbers):
            assert word in answer.error["message"]
        assert schedulings(server) == []


async def test_who_names_no_length_gets_what_the_plan_allows() -> None:
    async with surface(tenancy=tenancy()) as server:
        assert (await post(server, "/v1/responses")).status == 200
        assert (await post(server, "/v1/completions", prompt="x" * 30)).status == 200
        assert (await post(server, "/v1/messages", max_tokens=20)).status == 200
        lengths = [one.request.sampling.max_tokens for one in server.fleet.generations]
    assert lengths == [20, 10, 20]


async def test_a_change_counts_on_an_open_websocket_from_the_next_message_on() -> None:
    who = tenancy()
    async with surface(tenancy=who) as server, await open_socket(server, HEADERS) as socket:
        await socket.answer({"type": "response.create", "input": "hi"})
        who.replace(tenants_of(tenant("alice", KEY, plan=Plan("basic", weight=7.0))))
        await socket.answer({"type": "response.create", "input": "hi"})
        assert [one.weight for one in schedulings(server)] == [4.0, 7.0]
        for change, status in (
            (tenant("alice", KEY, is_disabled=True), 403),
            (tenant("alice", "another"), 401),
        ):
            who.replace(tenants_of(change))
            await socket.send({"type": "response.create", "input": "hi"})
            event = await socket.event()
            assert (event["type"], event.get("status")) == ("error", status)
        assert len(server.fleet.generations) == 2


class ShuttingText(FakeText):
    """Slow text processing, during which its tenant is disabled."""

    def __init__(self, who: Tenancy) -> None:
        super().__init__()
        self._who = who

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        self._who.replace(tenants_of(tenant("alice", KEY, is_disabled=True)))
        return await super().encode(
            text, add_special_tokens=add_special_tokens, param=param, max_tokens=max_tokens
        )


@pytest.mark.parametrize("path", BODIES)
async def test_who_is_shut_out_while_the_request_is_read_begins_nothing(path: str) -> None:
    who = tenancy()
    async with surface(tenancy=who, text=ShuttingText(who)) as server:
        assert (await post(server, path)).status == 403
        assert schedulings(server) == []


async def test_of_several_servers_each_lets_a_tenant_have_its_part() -> None:
    config, watch = QuotaConfig(servers=2), SpendWatch(QuotaObserver())
    quotas = Quotas(MemoryStore(config, watch), watch, QuotaObserver(), lambda model: Prices())
    async with surface(tenancy=tenancy(), quotas=quotas) as server:
        for path in BODIES:
            assert (await post(server, path)).status == 200
        assert {(one.max_running, one.kv_share) for one in schedulings(server)} == {(1, 0.25)}
