"""Tests of a server with hostile tenants: others are served, and memory stays bounded."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest
import trio

from loadtest.harness.servers import cost_of
from triolet.units import MIB

from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, running_fleet
from .tenants import OPERATOR, headers_of, key_of, write_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PLANS: Final = {
    "messages": "requests_per_minute = 3",
    "schemas": "requests_per_minute = 3",
    "bodies": "max_concurrent = 4",
    "victim": "",
}
CHAT: Final = "/v1/chat/completions"
ATTEMPTS: Final = 16
BODY_BYTES: Final = 16 * MIB
NUM_BODIES: Final = 12
MAX_GROWTH_BYTES: Final = 128 * MIB
"""Twice the limit of a tenant; the sent bodies are half as many again."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """A fleet with tenants."""
    folder = tmp_path_factory.mktemp("hostile")
    tenants = write_tenants(folder / "tenants.toml", PLANS)
    options = (*WATCHED, *PATIENT, "--tenants", str(tenants))
    with running_fleet(folder / "fleet.log", *options, key=key_of(OPERATOR)) as fleet:
        yield fleet


def asked(kind: str, number: int) -> dict[str, Any]:
    """Return a unique request of one kind."""
    message = {"role": "user", "content": "a"}
    if kind == "messages":
        return {"messages": [message] * 4096, "seed": number, "max_tokens": 1}
    schema: dict[str, Any] = {"$ref": "#", "title": str(number)}
    if kind == "victim":
        schema = {"type": "object", "properties": {f"n{number}": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    return {"messages": [message], "response_format": form, "max_tokens": 4}


async def statuses(url: str, tenant: str, count: int, at_once: int) -> list[int]:
    """Send requests and return the responses."""
    seen: list[int] = []
    limiter = trio.CapacityLimiter(at_once)
    limits = httpx2.Limits(max_connections=at_once)
    client = httpx2.AsyncClient(
        base_url=url, timeout=PATIENCE_S, headers=headers_of(tenant), limits=limits
    )

    async def ask(number: int) -> None:
        async with limiter:
            seen.append((await client.post(CHAT, json=asked(tenant, number))).status_code)

    async with client, trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(ask, number)
    return seen


@pytest.mark.parametrize("tenant", ["messages", "schemas"])
def test_refused_work_is_charged_until_nothing_is_worked_on(
    fleet: FleetProcess, tenant: str
) -> None:
    """The first few of many identical invalid requests are processed and refused; the rest is
    refused unread, and another tenant is served."""
    seen: dict[str, list[int]] = {}

    async def both() -> None:
        async def ask(name: str, count: int, at_once: int) -> None:
            seen[name] = await statuses(fleet.url, name, count, at_once)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, tenant, ATTEMPTS, ATTEMPTS)
            nursery.start_soon(ask, "victim", 4, 1)

    trio.run(both)
    assert set(seen["victim"]) == {200}
    assert set(seen[tenant]) == {400, 429}
    # During the test, a bucket of three refills by less than one.
    assert 3 <= seen[tenant].count(400) <= 4
    assert fleet.metric("triolet_tenant_unreserved_requests_total", tenant=tenant) <= 4


def test_unfinished_bodies_of_one_tenant_take_so_much_memory_and_no_more(
    fleet: FleetProcess,
) -> None:
    (server,) = fleet.pids("server")
    before = cost_of(server)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key_of('bodies')}\r\ncontent-length: {BODY_BYTES}\r\n\r\n"
    ).encode()
    answers: list[bytes] = []

    async def send(streams: list[trio.SocketStream]) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", fleet.port)
        streams.append(stream)
        with suppress(trio.BrokenResourceError):  # it was refused in the meantime
            await stream.send_all(head + b" " * (BODY_BYTES - 1))

    async def hold() -> tuple[int, int]:
        streams: list[trio.SocketStream] = []
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(NUM_BODIES):
                    nursery.start_soon(send, streams)
        after = cost_of(server)
        assert before is not None
        assert after is not None
        for stream in streams:
            with trio.move_on_after(0.2):
                answers.append(await stream.receive_some(4096))
            await stream.aclose()
        return before.rss_bytes, after.rss_bytes

    rss_before, rss_after = trio.run(hold)
    assert rss_after - rss_before < MAX_GROWTH_BYTES
    assert sum(answer.startswith(b"HTTP/1.1 429") for answer in answers) == NUM_BODIES - 4
