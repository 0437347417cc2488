"""Tests that all servers and workers of a fleet can start at the same time.

Servers and workers are production code, with simulated devices, in-memory links and virtual time.
So the tests show how the protocol handles a storm, not whether a machine is fast enough.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import pytest
import trio

from server.scheduling.links import Links
from server.scheduling.status import Observer
from simulation.campaign import keep_quiet
from simulation.deterministic import run
from simulation.fleet import (
    KV_SECRET,
    MODEL,
    CalmConditions,
    FleetShape,
    address_of,
    modelled_worker,
)
from simulation.network import Host
from simulation.text import NumberText
from transport.liveness import PeerMonitor
from transport.memory_network import MemoryNetwork
from triolet.config import LinkConfig, ServerConfig
from triolet.ids import LIVES, Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

STORM_S = 1.0
"""All processes start within this time."""
STAY_S = 8.0
"""Time to watch, from the start: several peer timeouts."""
LOOK_S = 0.05
KNOWN_S = STORM_S + 0.5
RING_BYTES = 1 << 14
"""Little host memory for each prefill worker, because no prompt is computed."""
LINK = LinkConfig(kv_chunk_bytes=RING_BYTES, kv_ring_bytes=RING_BYTES)
PER_BEAT_S = LINK.heartbeat_interval_s + LOOK_S
"""Longest silence in which no heartbeat was missed."""


class Storm(NamedTuple):
    """What the servers saw.

    Attributes:
      known_s: seconds from the first start until every server could use every worker.
      lost: workers that a server considered lost.
      silence_s: longest time without a message from a connected worker.
    """

    known_s: float
    lost: tuple[str, ...]
    silence_s: float

    @property
    def is_calm(self) -> bool:
        return self.known_s <= KNOWN_S and not self.lost and self.silence_s <= PER_BEAT_S


class LossObserver(Observer):
    """Records the workers that a server considers lost."""

    def __init__(self, lost: list[str]) -> None:
        super().__init__()
        self.lost = lost

    def worker_lost(self, worker: str, cause: str, num_requests: int = 0) -> None:
        self.lost.append(f"{worker}: {cause}")


def storm_of(num_servers: int, num_of_role: int) -> Storm:
    keep_quiet()
    shape = FleetShape(prefills=num_of_role, decodes=num_of_role)
    return run(partial(watch, num_servers, shape), 1)


async def watch(num_servers: int, shape: FleetShape) -> Storm:
    """Start a fleet, and watch it for `STAY_S`."""
    began_at, rng, lost = trio.current_time(), random.Random(1), list[str]()
    network, host, epochs = MemoryNetwork(1), Host(1), count(1, LIVES)
    network.conditions = CalmConditions(1)
    names = {
        Role.PREFILL: [f"prefill-{n}" for n in range(shape.prefills)],
        Role.DECODE: [f"decode-{n}" for n in range(shape.decodes)],
    }
    prefills, decodes = (tuple(map(address_of, of_role)) for of_role in names.values())
    config = ServerConfig("", MODEL, prefills, decodes, link=LINK)
    fleets = [
        Links(
            config,
            NumberText(),
            network,
            LossObserver(lost),
            f"server-{n}",
            partial(next, epochs),
            kv_secret=KV_SECRET,
        )
        for n in range(num_servers)
    ]
    serves: list[Callable[..., Awaitable[object]]] = [fleet.run for fleet in fleets]
    serves += [
        modelled_worker(role, name, shape, LINK, network, host, partial(next, epochs))
        for role, of_role in names.items()
        for name in of_role
    ]
    known_s, silence_s = float("inf"), 0.0
    async with trio.open_nursery() as nursery:

        async def start(serve: Callable[..., Awaitable[object]]) -> None:
            await trio.sleep(STORM_S * rng.random())
            await nursery.start(serve)

        for serve in serves:
            nursery.start_soon(start, serve)
        while (now := trio.current_time()) < began_at + STAY_S:
            workers = [worker for fleet in fleets for worker in fleet._workers]
            greeted = [worker.monitor.silence_s(now) for worker in workers if worker.welcome]
            silence_s = max(silence_s, *greeted, 0.0)
            if all(worker.is_usable for worker in workers):
                known_s = min(known_s, now - began_at)
            await trio.sleep(LOOK_S)
        storm = Storm(known_s, tuple(lost), silence_s)
        nursery.cancel_scope.cancel()
    return storm


def test_a_few_processes_that_start_together_find_each_other() -> None:
    storm = storm_of(2, 3)
    assert storm.is_calm, storm


def test_a_server_that_hears_nothing_every_other_second_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = PeerMonitor.heard
    monkeypatch.setattr(
        PeerMonitor, "heard", lambda self, now: heard(self, now) if int(now) % 2 else False
    )
    storm = storm_of(1, 1)
    assert storm.silence_s > PER_BEAT_S, storm


@pytest.mark.slow
@pytest.mark.proof
def test_a_join_storm_costs_no_heartbeat(whole: bool) -> None:
    """The whole form has 8 servers and 200 workers."""
    storm = storm_of(8, 100) if whole else storm_of(3, 16)
    assert storm.is_calm, storm
