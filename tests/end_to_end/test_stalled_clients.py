"""Many clients that stop reading at once: little memory, no answer of anybody else, no block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from loadtest.campaign.misbehaving import new_readers, read_on, stall
from loadtest.stalled import (
    MAX_GROWTH_BYTES,
    MAX_GROWTH_PER_ROUND_BYTES,
    STALL_TOKENS,
    StallRun,
    read_scrape,
    scrape,
)

if TYPE_CHECKING:
    from loadtest.campaign.misbehaving import Reader, Stalled

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

CLIENTS = 24
READERS = 2
READER_TOKENS = 150
PATIENCE_S = 240.0


async def test_many_stalled_clients_cost_little_memory_and_no_answer(fleet: FleetProcess) -> None:
    readers = new_readers(READERS, READER_TOKENS)
    clients: list[Stalled] = []
    with trio.fail_after(PATIENCE_S):
        for reader in readers:
            await reader.read_one(fleet.url)  # what the answer is when no client stalls
        before = seen = await scrape(fleet.url)
        most_bytes = before.resident_bytes
        all_ended = trio.Event()
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(_read_until, all_ended, reader, fleet.url)
            await _stall_all(fleet.url, clients)
            while seen.stalled < before.stalled + CLIENTS:
                await trio.sleep(0.1)
                seen = await scrape(fleet.url)
                most_bytes = max(most_bytes, seen.resident_bytes)
            all_ended.set()
        seen = await scrape(fleet.url)
        # Each connection is cut a little after its stream: one that reads on before is let live.
        while seen.connections > 1:
            await trio.sleep(0.1)
            seen = await scrape(fleet.url)
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(read_on, client)
    assert {client.kind for client in clients} == {"sse", "ws"}
    assert {client.ended for client in clients} == {"reset"}
    assert most_bytes - before.resident_bytes < MAX_GROWTH_BYTES
    assert all(reader.num_answers > 1 for reader in readers)
    assert [len(reader.texts) for reader in readers] == [1] * READERS


async def _read_until(all_ended: trio.Event, reader: Reader, url: str) -> None:
    while not all_ended.is_set():
        await reader.read_one(url)


async def _stall_all(url: str, clients: list[Stalled]) -> None:
    async def one(number: int) -> None:
        clients.append(await stall(url, number, STALL_TOKENS))

    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS):
            nursery.start_soon(one, number)


def test_the_report_says_what_went_wrong() -> None:
    metrics = (
        "process_resident_memory_bytes 1.5e+08\n"
        'triolet_worker_sequences{role="decode",state="paused",worker="a"} 3.0\n'
        'triolet_worker_sequences{role="decode",state="paused",worker="b"} 4.0\n'
        'triolet_worker_sequences{role="decode",state="running",worker="b"} 9.0\n'
        'triolet_requests_total{outcome="stalled"} 5.0\n'
        "triolet_connections 6.0\n"
        'triolet_kv_blocks{pool="decode",state="free",worker="b"} 8.0\n'
    )
    seen = read_scrape(metrics)
    assert (seen.resident_bytes, seen.paused, seen.stalled) == (150_000_000, 7, 5)
    assert seen.connections == 6
    run = StallRun(clients=7, readers=1, paused=seen.paused, blocks=seen.blocks, answers=1)
    for phase, milliseconds in (("without", 10), ("while they come", 30), ("with", 11)):
        run.gaps[phase].append([milliseconds / 1000] * 99 + [1.0])
    assert run.failures() == []
    assert run.ratio(50) == pytest.approx(1.1)
    assert run.table().row_count == 3
    assert any("within" in line for line in run.lines())
    run.paused, run.inexact, run.answers = 6, 1, 0
    run.resident = [MAX_GROWTH_BYTES - 1, MAX_GROWTH_BYTES]
    assert [failure.split()[0] for failure in run.failures()] == ["only", "the", "1", "no"]
    run.resident = [0, MAX_GROWTH_PER_ROUND_BYTES]
    assert [failure.split()[0] for failure in run.failures()] == ["only", "each", "1", "no"]
