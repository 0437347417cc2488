"""Tests of a tenant's limits on several servers that count separately: their parts are added up."""

from __future__ import annotations

import json
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.api.proxying import PROXIED
from server.contract.generation import Usage
from server.peers.peers import Peers
from server.tenants.memory_store import QuotaObserver
from server.tenants.opening import opened_quotas
from server.tenants.quotas import AskedTokens
from server.tenants.tenancy import Tenancy
from tests.server.support.request_lives import ChargedEvents
from tests.server.support.surface import PATIENCE_S, RawClient, request_bytes
from tests.server.support.tenants import tenant, tenants_of
from tests.server.test_peers import NAMES, two_servers
from triolet.config import PeerServersConfig, QuotaConfig
from triolet.tenants.plans import Plan, Prices

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from server.tenants.quotas import Quotas

PLAN = Plan("p", requests_per_minute=6.0, tokens_per_minute=600.0, max_concurrent=4, budget=9.0)
ALICE, BOB = tenant("alice", "key-of-alice", plan=PLAN), tenant("bob", "key-of-bob")


@asynccontextmanager
async def both(folder: Path, **more: Any) -> AsyncIterator[tuple[list[Quotas], list[Peers]]]:  # noqa: ANN401
    """Run two servers with one tenant, which find each other through a file."""
    config = QuotaConfig(servers=2, spend_file=str(folder / "spend"), flush_s=0.01)
    prices = Prices(prompt=1e6)
    with ExitStack() as opened:
        quotas = [
            opened.enter_context(opened_quotas(config, QuotaObserver(), lambda model: prices))
            for _ in NAMES
        ]
        tenancies = [Tenancy(tenants_of(ALICE, BOB)) for _ in NAMES]
        async with trio.open_nursery() as nursery:
            for one in quotas:
                await nursery.start(one.store.run)
            async with two_servers(folder, quotas=quotas, tenancy=tenancies, **more) as servers:
                yield quotas, servers
            nursery.cancel_scope.cancel()


async def use(quotas: Quotas, request_id: bytes, tokens: int) -> None:
    """Use this many of alice's tokens on one server."""
    events = ChargedEvents(quotas)
    with await quotas.reserve(ALICE, [AskedTokens(request_id, tokens, 0)]):
        events.accept(request_id)
    events.end(request_id, Usage(tokens, 0))


async def usage_of_alice(folder: Path, server: str) -> dict[str, Any]:
    client = RawClient(await trio.open_unix_socket(str(folder / server)))
    headers = {"authorization": "Bearer key-of-alice", PROXIED: server}
    async with client.stream:
        await client.send(request_bytes("GET", "/v1/usage", headers=headers))
        answer = await client.answer()
    assert answer.status == 200
    usage: dict[str, Any] = answer.json
    return usage


async def test_whichever_is_asked_the_parts_of_all_are_added_up(tmp_path: Path) -> None:
    async with both(tmp_path) as (quotas, servers):
        await use(quotas[0], b"1", 3)
        await use(quotas[1], b"2", 4)
        held = await quotas[1].reserve(ALICE, [AskedTokens(b"3", 20, 0)])
        with trio.fail_after(PATIENCE_S):
            for name in NAMES:
                while (usage := await usage_of_alice(tmp_path, name))["this_month"]["tokens"] < 7:
                    await trio.lowlevel.checkpoint()
                assert usage["limits"] == {
                    "requests_per_minute": 6.0,
                    "tokens_per_minute": 600.0,
                    "max_concurrent": 4,
                    "budget": 9.0,
                }
                assert usage["remaining"]["requests"] >= 3
                assert 572 <= usage["remaining"]["tokens"] < 600
                assert usage["in_flight"] == 1
                assert usage["this_month"] == {"tokens": 7, "spent": pytest.approx(7.0)}
                assert usage["servers"] == {"counted": 2, "all": 2}
        held.give_back()
        [said] = (await servers[0].ask("/fleet/usage")).values()
        of = {one["tenant"]: one for one in json.loads(said or b"")["data"]}
        assert of["alice"]["this_month"]["tokens"] == 7
        assert of["alice"]["in_flight"] == 0
        assert of["bob"]["limits"]["tokens_per_minute"] is None
        assert {one["servers"]["counted"] for one in of.values()} == {2}


async def test_one_that_does_not_answer_is_not_counted(tmp_path: Path) -> None:
    paths = (("server-0", str(tmp_path / "server-0")), ("nobody", str(tmp_path / "nobody")))
    alone = Peers(PeerServersConfig("server-0", 0, paths))
    async with both(tmp_path, peers=[alone] * 2):
        usage = await usage_of_alice(tmp_path, "server-0")
    assert usage["limits"]["tokens_per_minute"] == 300
    assert usage["servers"] == {"counted": 1, "all": 2}
