"""Tests of tenant limits in the API: refused requests, charges, and the limits reported to
clients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from ops.cli.usage_commands import show_usage
from ops.exit_codes import CommandFailed
from server.contract.generation import Usage
from server.tenants.opening import quotas_in_memory
from server.tenants.tenancy import Tenancy
from tests.server.support.fakes import ChargingFleet, FakeRun, by_hand
from tests.server.support.surface import surface
from tests.server.support.tenants import LimitedServer, tenant, tenants_of
from tests.server.support.websocket import open_socket
from triolet.config import ResponseCacheConfig
from triolet.errors import overloaded
from triolet.tenants.plans import Plan, TenantRole
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from server.contract.generation import GenerationRequest
    from server.tenants.quotas import Quotas
    from tests.server.support.surface import Answer, Surface

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
OF_ALICE = {"authorization": "Bearer key-of-alice"}
OF_ROOT = {"authorization": "Bearer key-of-root"}
PLAN = Plan("p", requests_per_minute=4.0, tokens_per_minute=400.0, max_concurrent=2)
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", {"prompt": "Hi", "n": 2}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/responses", {"input": "Hi", "stream": True}),
    ("/v1/messages", CHAT),
    ("/v1/embeddings", {"input": ["a b", "c"]}),
]


class World(LimitedServer):
    """A server with the tenants alice and root, who have limits, and one without limits."""

    def __init__(self, server: Surface, fleet: ChargingFleet, quotas: Quotas, plan: Plan) -> None:
        super().__init__(server, quotas, plan)
        self.fleet = fleet

    async def ask(self, path: str = "/v1/chat/completions", body: Any = CHAT) -> Answer:  # noqa: ANN401
        """Send a request as alice."""
        return await self.server.post(path, body, headers=OF_ALICE)


@pytest.fixture
def plan() -> Plan:
    return PLAN


@pytest.fixture
def cache() -> ResponseCacheConfig:
    return ResponseCacheConfig()


@pytest.fixture
async def world(plan: Plan, cache: ResponseCacheConfig) -> AsyncIterator[World]:
    quotas = quotas_in_memory()
    fleet = ChargingFleet(quotas)
    root = tenant("root", "key-of-root", role=TenantRole.OPERATOR)
    tenancy = Tenancy(tenants_of(tenant("alice", "key-of-alice", plan=plan), root))
    async with surface(fleet, tenancy=tenancy, quotas=quotas, response_cache=cache) as server:
        yield World(server, fleet, quotas, plan)
    assert (quotas.num_open, quotas.store.num_reserved) == (0, 0)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_what_is_charged_is_what_was_used(
    world: World, path: str, body: dict[str, Any]
) -> None:
    answer = await world.ask(path, body)
    assert answer.status == 200
    assert world.fleet.used > 0
    assert world.account.used_tokens == world.fleet.used
    assert answer.headers["x-ratelimit-limit-requests"] == "4"
    assert answer.headers["x-ratelimit-remaining-requests"] == "3"
    assert answer.headers["x-ratelimit-limit-tokens"] == "400"
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= 400
    assert answer.headers["x-ratelimit-reset-requests"].endswith("s")


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_who_has_nothing_left_is_refused_before_its_request_is_worked_on(
    world: World, path: str, body: dict[str, Any]
) -> None:
    for _ in range(4):
        await world.ask()
    num_begun = len(world.fleet.generations)
    answer = await world.ask(path, body)
    assert answer.status == 429
    assert "4 requests a minute" in answer.json["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(world.fleet.generations) == num_begun


@pytest.mark.parametrize("plan", [Plan("p", max_concurrent=2)])
async def test_only_so_many_are_in_flight_and_refusals_cost_nothing(world: World) -> None:
    world.fleet.script = by_hand
    answers = []

    async def ask() -> None:
        answers.append(await world.ask())

    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(ask)
            await world.fleet.nth(number)
        refused = await world.ask()
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        for generation in world.fleet.generations:
            generation.finish()
            world.fleet.end(generation)
    assert [answer.status for answer in answers] == [200, 200]
    assert world.account.in_flight == 0


async def test_what_the_fleet_refuses_is_given_back(world: World) -> None:
    world.fleet.refuse_with = overloaded("full", 1.0)
    for path, body in ROUTES[:6]:
        answer = await world.ask(path, body)
        assert answer.status == 503
    account = world.account
    assert (account.requests, account.tokens, account.in_flight) == (4, 400, 0)


async def test_what_ends_before_a_worker_began_it_is_given_back(world: World) -> None:
    world.fleet.script = by_hand
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.ask)
        generation = await world.fleet.nth(0)
        generation.fail(overloaded("late", 1.0))
        world.fleet.end(generation, is_begun=False)
    account = world.account
    assert (account.requests, account.tokens, account.used_tokens) == (4, 400, 0)


@pytest.mark.parametrize("plan", [Plan("p", requests_per_minute=1.0)])
async def test_an_answer_that_runs_already_can_be_joined_without_limit(world: World) -> None:
    headers = OF_ALICE | {"idempotency-key": "k"}
    answers = [
        await world.server.post("/v1/chat/completions", CHAT, headers=headers) for _ in range(3)
    ]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert len(world.fleet.generations) == 1
    other = await world.server.post(
        "/v1/chat/completions", CHAT, headers=OF_ALICE | {"idempotency-key": "l"}
    )
    assert other.status == 429


@pytest.mark.parametrize("plan", [Plan("p", tokens_per_minute=3.0)])
async def test_a_prompt_beyond_a_minute_is_refused_for_good(world: World) -> None:
    answer = await world.ask("/v1/completions", {"prompt": "a b c d e f g"})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("plan", [Plan("p", budget=0.0)])
async def test_who_has_spent_its_budget_shall_not_try_again(world: World) -> None:
    answer = await world.ask()
    assert (answer.status, answer.error["code"]) == (429, "insufficient_quota")
    assert answer.headers["x-should-retry"] == "false"
    assert "x-ratelimit-limit-requests" not in answer.headers


async def test_a_websocket_says_its_limits_and_refuses_answer_by_answer(world: World) -> None:
    async with await open_socket(world.server, OF_ALICE) as socket:
        assert socket.headers["x-ratelimit-limit-requests"] == "4"
        for number in range(5):
            await socket.send({"type": "response.create", "input": "Hi", "store": False})
            kind = "response.completed" if number < 4 else "error"
            events = await socket.until(kind)
        assert events[-1]["status"] == 429
        assert events[-1]["error"]["code"] == "rate_limit_exceeded"
    assert world.account.used_tokens == world.fleet.used


async def test_usage_is_shown_to_its_tenant_and_everybodys_to_operators(world: World) -> None:
    await world.ask()
    own = await world.server.request("GET", "/v1/usage", headers=OF_ALICE)
    assert own.json["tenant"] == "alice"
    assert own.json["limits"]["requests_per_minute"] == 4.0
    assert own.json["remaining"]["requests"] == 3
    assert own.json["this_month"] == {"tokens": world.fleet.used, "spent": 0.0}
    refused = await world.server.request("GET", "/fleet/usage", headers=OF_ALICE)
    assert refused.status == 403
    everybody = await world.server.request("GET", "/fleet/usage", headers=OF_ROOT)
    assert {one["tenant"] for one in everybody.json["data"]} == {"alice", "root"}
    shown, told = everybody.json["data"][0], {k: v for k, v in own.json.items() if k != "object"}
    # The remaining quota grows with time, also between the two answers on a slow machine.
    later = await world.server.request("GET", "/v1/usage", headers=OF_ALICE)
    first, left, last = told.pop("remaining"), shown.pop("remaining"), later.json["remaining"]
    assert shown == told
    assert first.keys() == left.keys()
    assert all(first[name] <= left[name] <= last[name] for name in left)


async def test_the_command_prints_what_a_key_may_see(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.ask()
    seen = {}
    for name in ("alice", "root"):
        monkeypatch.setenv("TRIOLET_API_KEY", f"key-of-{name}")
        await trio.to_thread.run_sync(partial(show_usage, world.server.url, as_json=False))
        seen[name] = capsys.readouterr().out
    assert "3 of 4" in seen["alice"]
    assert "root" not in seen["alice"]
    assert "alice" in seen["root"]
    assert "root" in seen["root"]
    monkeypatch.setenv("TRIOLET_API_KEY", "wrong")
    with pytest.raises(CommandFailed, match="TRIOLET_API_KEY"):
        await trio.to_thread.run_sync(partial(show_usage, world.server.url, as_json=True))


@pytest.mark.parametrize("plan", [Plan("p", requests_per_minute=2.0, tokens_per_minute=400.0)])
@pytest.mark.parametrize("cache", [ResponseCacheConfig(max_bytes=MIB)])
async def test_an_answer_that_is_given_again_is_a_request_without_tokens(world: World) -> None:
    asked = CHAT | {"temperature": 0, "response_cache": "allow"}
    first = await world.ask(body=asked)
    tokens, used = world.account.tokens, world.account.used_tokens
    again = await world.ask(body=asked)
    assert [one.headers["x-triolet-cache"] for one in (first, again)] == ["miss", "hit"]
    assert world.account.used_tokens == used > 0
    assert world.account.tokens >= tokens
    assert (await world.ask(body=asked)).status == 429


@pytest.mark.parametrize("plan", [Plan("p", max_output_tokens=4)])
async def test_who_asks_for_more_than_its_plan_has_is_told(world: World) -> None:
    for path, body in ROUTES[:6:5]:
        answer = await world.ask(path, body)
        assert answer.status == 400
        assert "allows 4 " in answer.json["error"]["message"]
    assert not world.fleet.generations


@pytest.mark.parametrize("plan", [Plan("p", requests_per_minute=1.0)])
async def test_a_key_by_which_nothing_is_kept_spares_nobody_the_early_refusal(world: World) -> None:
    await world.ask()
    headers = OF_ALICE | {"idempotency-key": "k"}
    unfit = CHAT | {"max_tokens": 10**6}  # refused only after the quota check
    answer = await world.server.post("/v1/chat/completions", unfit, headers=headers)
    assert answer.status == 429


class FullRun(FakeRun):
    """Starts the first input, and refuses the others."""

    async def vectors(self) -> Sequence[bytes]:
        await trio.lowlevel.checkpoint()
        raise overloaded("too many inputs wait already", retry_after_s=1.0)


async def test_inputs_that_were_not_taken_on_any_more_are_given_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def embed(requests: Sequence[GenerationRequest]) -> FakeRun:
        first = requests[0].request_id
        world.fleet.charged.accept(first)
        run = FullRun(len(requests))
        run.inputs = range(1)
        world.fleet.charged.end(first, Usage(0, 0))
        return run

    monkeypatch.setattr(world.fleet, "embed", embed)
    answer = await world.ask("/v1/embeddings", {"input": ["a b c", "d", "e f"]})
    assert answer.status == 503
    assert (world.quotas.num_open, world.quotas.store.num_reserved) == (0, 0)
    assert world.account.used_tokens == 5, "only the first input is charged"
