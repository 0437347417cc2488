"""Both worker shells on one in-memory network, with fake engines and a device of virtual time."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import trio

import decode.worker
import prefill.worker
from transport.memory_network import MemoryConnection, MemoryNetwork
from triolet.config import EngineConfig, LinkConfig, WorkerConfig
from triolet.ids import Role

from .client import Client
from .fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from worker.shell import Shell

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEP_S = 0.01
LINK = LinkConfig(kv_chunk_bytes=32, kv_window_bytes=64, kv_ring_bytes=128)
SERVE = {Role.PREFILL: prefill.worker.serve, Role.DECODE: decode.worker.serve}


class FakeDevice:
    """Takes virtual time for each step; can be told to hang."""

    def __init__(self) -> None:
        self.is_hanging = False

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a call after the time that a step takes."""
        if self.is_hanging:
            await trio.sleep_forever()
        await trio.sleep(STEP_S)
        return fn(*args)


class CountingNetwork(MemoryNetwork):
    """Counts how often each address was dialled."""

    def __init__(self) -> None:
        super().__init__()
        self.dials: Counter[str] = Counter()

    def connect(
        self, address: str, identity: bytes, *, hwm: int, max_frame_bytes: int
    ) -> MemoryConnection:
        self.dials[address] += 1
        return super().connect(address, identity, hwm=hwm, max_frame_bytes=max_frame_bytes)


@dataclass(slots=True)
class Fleet:
    """One prefill and one decode worker, and a client of both."""

    network: CountingNetwork
    configs: dict[Role, WorkerConfig]
    engines: dict[Role, FakeEngine]
    devices: dict[Role, FakeDevice]
    shells: dict[Role, Shell]
    client: Client
    nursery: trio.Nursery

    def check_empty(self) -> None:
        """Assert that no block is leased."""
        for engine in self.engines.values():
            engine.ledger.check_invariants()
            assert engine.ledger.leased_blocks == 0


def worker_config(role: Role, link: LinkConfig = LINK) -> WorkerConfig:
    return WorkerConfig(
        name=f"{role}-0",
        model_dir="",
        control_address=f"memory:{role}",
        kv_address="memory:kv" if role is Role.DECODE else None,
        engine=EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=8),
        link=link,
        step_timeout_s=5.0,
    )


@asynccontextmanager
async def open_fleet(
    fingerprints: tuple[str, str] = ("fake", "fake"), link: LinkConfig = LINK
) -> AsyncIterator[Fleet]:
    """Start everything; at the end nothing may be leased."""
    network = CountingNetwork()
    roles = (Role.PREFILL, Role.DECODE)
    configs = {role: worker_config(role, link) for role in roles}
    engines = {
        role: FakeEngine(fingerprint=fingerprint)
        for role, fingerprint in zip(roles, fingerprints, strict=True)
    }
    devices = {role: FakeDevice() for role in roles}
    async with trio.open_nursery() as nursery:
        shells: dict[Role, Shell] = {}
        for role in roles:
            shells[role] = await nursery.start(
                SERVE[role], configs[role], engines[role], devices[role], network, network
            )
        client = Client(network, {role: configs[role].control_address for role in roles})
        await nursery.start(client.run)
        yield Fleet(network, configs, engines, devices, shells, client, nursery)
        nursery.cancel_scope.cancel()
