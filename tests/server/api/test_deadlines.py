"""Tests of a request's deadline: the shortest of the client's, the tenant's and the model's."""

from __future__ import annotations

import pytest

from server.tenants.tenancy import Tenancy
from tests.server.api.test_claims import HEADERS, KEY
from tests.server.api.test_service_tier import BODIES
from tests.server.support.surface import surface
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import open_socket
from triolet.tenants.plans import Plan


def tenancy(deadline_s: float | None) -> Tenancy:
    return Tenancy(tenants_of(tenant("alice", KEY, plan=Plan("gold", deadline_s=deadline_s))))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("client_s", "tenant_s", "model_s", "is_shortest"),
    [(1.5, 2.0, 3.0, 1.5), (4.0, 2.0, 3.0, 2.0), (4.0, 5.0, 3.0, 3.0), (None, None, 3.0, 3.0)],
)
async def test_the_shortest_of_three_deadlines_applies(
    path: str,
    client_s: float | None,
    tenant_s: float | None,
    model_s: float,
    is_shortest: float,
) -> None:
    own = {} if client_s is None else {"X-Request-Timeout-Ms": f"{1000 * client_s:.0f}"}
    async with surface(tenancy=tenancy(tenant_s), default_deadline_s=model_s) as server:
        await server.post(path, BODIES[path], headers={**HEADERS, **own})
        requests = [one.request for one in server.fleet.generations]
        [request] = [*requests, *server.fleet.inputs]
    assert request.deadline_s == is_shortest


async def test_a_socket_has_no_deadline_of_a_client() -> None:
    async with (
        surface(tenancy=tenancy(2.0), default_deadline_s=3.0) as server,
        await open_socket(server, HEADERS) as socket,
    ):
        await socket.answer({"type": "response.create", "input": "hi"})
        assert [one.request.deadline_s for one in server.fleet.generations] == [2.0]
