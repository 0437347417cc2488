"""Tests of GET /fleet/audit: its content, and which clients may request it."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from werkzeug.datastructures import Headers

from server.api.body import is_from_here
from server.api.request_scope import ClientConnection
from tests.server.support.surface import posted, surface
from triolet.audit import FleetAudit


async def test_it_tells_the_accounts_and_what_is_wrong_with_them() -> None:
    async with surface() as server:
        well = await server.request("GET", "/fleet/audit")
        server.fleet.accounts = replace(server.fleet.accounts, received=4)
        unwell = await server.request("GET", "/fleet/audit")
    assert (well.status, well.json["violations"]) == (200, [])
    assert set(well.json) == {"violations", "grace_s", "server", "workers", "siblings"}
    [violation] = unwell.json["violations"]
    assert set(violation) == {"invariant", "where", "what", "meaning", "remedy"}
    assert violation["invariant"] == "I9"
    audit = FleetAudit.from_json(unwell.body)
    assert audit.server.received == 4


async def test_it_counts_the_connections_of_clients() -> None:
    async with surface() as server, await server.connect():
        answer = await server.request("GET", "/fleet/audit")
    assert answer.json["server"]["connections"] == 2


@pytest.mark.parametrize(
    ("peer", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("192.168.1.7", False),
        ("8.8.8.8", False),
        ("fe80::1", False),
        ("", False),
    ],
)
def test_peers_from_elsewhere_are_refused(peer: str, is_local: bool) -> None:
    connection = ClientConnection(peer)
    assert is_from_here(connection, Headers({"Host": "a", "Accept": "b"})) is is_local
    assert not is_from_here(connection, Headers({"Forwarded": "for=b"}))


async def test_it_is_only_looked_at() -> None:
    answer = await posted("/fleet/audit", {})
    assert answer.status == 405
    assert json.loads(answer.body)["error"]["code"] == "method_not_allowed"
