"""Tests of many clients that stop reading: bounded memory, no effect on others, no leaked
blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import trio

from loadtest.campaign.answers import Ask
from loadtest.campaign.client import Story, tell
from loadtest.campaign.misbehaving import stall
from loadtest.harness.http import get
from loadtest.harness.metrics import total
from triolet.units import MIB

if TYPE_CHECKING:
    from loadtest.campaign.misbehaving import Stalled

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

CLIENTS = 24
READERS = 2
READER_TOKENS = 150
STALL_TOKENS = 900
"""More than all buffers on the way, but within the demo model's context."""
MAX_GROWTH_BYTES = 64 * MIB
PATIENCE_S = 240.0


async def test_many_stalled_clients_cost_little_memory_and_no_answer(fleet: FleetProcess) -> None:
    texts: list[list[str]] = [[] for _ in range(READERS)]
    clients: list[Stalled] = []
    with trio.fail_after(PATIENCE_S):
        for number, told in enumerate(texts):
            await _read(fleet.url, number, told)  # the answer without stalled clients
        before = seen = await _scrape(fleet.url)
        most_bytes = before.resident_bytes
        all_ended = trio.Event()
        async with trio.open_nursery() as nursery:
            for number, told in enumerate(texts):
                nursery.start_soon(_read_until, all_ended, fleet.url, number, told)
            await _stall_all(fleet.url, clients)
            while seen.stalled < before.stalled + CLIENTS:
                await trio.sleep(0.1)
                seen = await _scrape(fleet.url)
                most_bytes = max(most_bytes, seen.resident_bytes)
            all_ended.set()
        seen = await _scrape(fleet.url)
        # Each connection is reset shortly after its stream, unless it reads again before.
        while seen.connections > 1:
            await trio.sleep(0.1)
            seen = await _scrape(fleet.url)
        ends = [await _read_on(client) for client in clients]
    assert {client.kind for client in clients} == {"sse", "ws"}
    assert set(ends) == {"reset"}
    assert most_bytes - before.resident_bytes < MAX_GROWTH_BYTES
    assert all(len(told) > 1 for told in texts)
    assert [len(set(told)) for told in texts] == [1] * READERS


class Scrape(NamedTuple):
    """From /metrics: memory, requests that ended as stalled, and open connections."""

    resident_bytes: float
    stalled: float
    connections: float


async def _scrape(url: str) -> Scrape:
    metrics = (await get(url, "/metrics"))[1].decode()
    stalled = total(metrics, "triolet_requests_total", 'outcome="stalled"')
    resident_bytes = total(metrics, "process_resident_memory_bytes")
    return Scrape(resident_bytes, stalled, total(metrics, "triolet_connections"))


async def _read(url: str, number: int, told: list[str]) -> None:
    question = f"Tell me a story about dragon number {number}."
    body = {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": READER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    story = Story(Ask(number, f"reader-{number}", "sse", body))
    await tell(url, story, retries_broken=False)
    assert story.answer is not None, story.failure
    told.append(story.answer.text)


async def _read_until(all_ended: trio.Event, url: str, number: int, told: list[str]) -> None:
    while not all_ended.is_set():
        await _read(url, number, told)


async def _read_on(client: Stalled) -> str:
    """Read the rest; return whether the connection was reset or closed."""
    try:
        while await client.stream.receive_some(65536):
            pass
    except trio.BrokenResourceError:
        return "reset"
    finally:
        await trio.aclose_forcefully(client.stream)
    return "closed"


async def _stall_all(url: str, clients: list[Stalled]) -> None:
    async def one(number: int) -> None:
        clients.append(await stall(url, number, STALL_TOKENS))

    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS):
            nursery.start_soon(one, number)
