"""Tests that a tenant bound to other zones gets 421 on every path, before the body is read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.tenants.tenancy import Tenancy
from tests.server.support.surface import surface
from tests.server.support.tenants import tenant, tenants_of
from triolet.service_class import Placement

from .test_claims import BODIES, HEADERS, KEY

ALICE = replace(tenant("alice", KEY), placement=Placement(frozenset({"eu"})))


@pytest.mark.parametrize("path", BODIES)
async def test_a_server_of_another_zone_refuses_and_says_where_to_go(path: str) -> None:
    async with surface(tenancy=Tenancy(tenants_of(ALICE), "us")) as server:
        answer = await server.post(path, BODIES[path], headers=HEADERS)
        assert answer.status == 421
        assert b"must stay in the zone eu, and this server is in us" in answer.body
        assert server.fleet.generations == []


async def test_a_server_of_its_zone_passes_its_zones_to_the_scheduler() -> None:
    async with surface(tenancy=Tenancy(tenants_of(ALICE), "eu")) as server:
        path = "/v1/chat/completions"
        assert (await server.post(path, BODIES[path], headers=HEADERS)).status == 200
        [generation] = server.fleet.generations
        assert generation.request.scheduling.placement is ALICE.placement
