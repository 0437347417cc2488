"""Test helper that runs both worker loops on one in-memory network, with scripted engines in
virtual time."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import trio

import decode.worker
import prefill.worker
from transport.memory_network import MemoryConnection, MemoryNetwork
from triolet.config import EngineConfig, LinkConfig, WorkerConfig
from triolet.ids import Role
from triolet.invariants import check_at_rest, check_invariants

from .audits import ask, fleet_of
from .client import Client
from .scripts import scripted_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from simulation.engine import ScriptedEngine
    from triolet.audit import WorkerAudit
    from worker.worker_loop import WorkerLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEP_S = 0.01
REST_S = 5.0
"""Leases run out, and what a lost answer holds of a window is written off."""
LINK = LinkConfig(kv_chunk_bytes=32, kv_window_bytes=64, kv_ring_bytes=128)
SERVE = {Role.PREFILL: prefill.worker.serve, Role.DECODE: decode.worker.serve}


class FakeDevice:
    """Takes virtual time for each step; can be made to hang."""

    def __init__(self) -> None:
        self.is_hanging = False

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a call after the duration of a step."""
        if self.is_hanging:
            await trio.sleep_forever()
        if len(args) > 1:
            # It tells how far it is: time passes behind that, so that other tasks can listen.
            result = fn(*args)
            await trio.sleep(STEP_S)
            return result
        await trio.sleep(STEP_S)
        return fn(*args)


class CountingNetwork(MemoryNetwork):
    """Counts connections per address."""

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
    engines: dict[Role, ScriptedEngine]
    devices: dict[Role, FakeDevice]
    loops: dict[Role, WorkerLoop]
    client: Client
    nursery: trio.Nursery

    def check_empty(self) -> None:
        """Assert that no block is leased."""
        for engine in self.engines.values():
            engine.ledger.check_invariants()
            assert engine.ledger.leased_blocks == 0

    async def check_at_rest(self) -> None:
        """End everything, and assert that the remaining workers keep nothing."""
        assert check_invariants(fleet_of(*await self._accounts())) == []
        self.client.live.clear()
        await trio.sleep(REST_S)
        self.check_empty()
        assert all(engine.ledger.num_spoiled == 0 for engine in self.engines.values())
        accounts = await self._accounts()
        assert check_at_rest(fleet_of(*accounts)) == []

    async def _accounts(self) -> list[WorkerAudit]:
        answers = [
            await ask(self.network, config.control_address) for config in self.configs.values()
        ]
        return [answer for answer in answers if answer is not None]


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
    fingerprints: tuple[str, str] = ("fake", "fake"),
    link: LinkConfig = LINK,
    *,
    network: CountingNetwork | None = None,
    links: dict[Role, LinkConfig] | None = None,
    serve: dict[Role, dict[str, Any]] | None = None,
    **of_decode: Any,  # noqa: ANN401 - fields of WorkerConfig
) -> AsyncIterator[Fleet]:
    """Start a fleet; at the end nothing may be held."""
    network = network or CountingNetwork()
    roles = (Role.PREFILL, Role.DECODE)
    configs = {role: worker_config(role, (links or {}).get(role, link)) for role in roles}
    configs[Role.DECODE] = replace(configs[Role.DECODE], **of_decode)
    engines = {
        role: scripted_engine(fingerprint=fingerprint)
        for role, fingerprint in zip(roles, fingerprints, strict=True)
    }
    devices = {role: FakeDevice() for role in roles}
    async with trio.open_nursery() as nursery:
        loops: dict[Role, WorkerLoop] = {}
        for role in roles:
            start = partial(SERVE[role], **(serve or {}).get(role, {}))
            loops[role] = await nursery.start(
                start, configs[role], engines[role], devices[role], network, network
            )
        client = Client(network, {role: configs[role].control_address for role in roles})
        await nursery.start(client.run)
        fleet = Fleet(network, configs, engines, devices, loops, client, nursery)
        yield fleet
        await fleet.check_at_rest()
        nursery.cancel_scope.cancel()
