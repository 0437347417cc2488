"""A prefill and a decode worker with real engines over sockets, for tests, and a client of both."""

from __future__ import annotations

from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

import trio

from engine.device_thread import DeviceThread
from tests.engine.driver import open_engine
from transport.zmq_network import ZmqNetwork
from triolet.config import OFF, EngineConfig, LinkConfig, SpeculationConfig, WorkerConfig
from triolet.ids import Role
from triolet.units import KIB
from worker.local_engine import LocalEngine

from .client import Client
from .fleet import SERVE
from .patience import unhurried

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Engines = dict[Role, LocalEngine]

SMALL_LINK = unhurried(
    LinkConfig(kv_chunk_bytes=32 * KIB, kv_window_bytes=64 * KIB, kv_ring_bytes=128 * KIB)
)
"""Two blocks per chunk, so that prompts travel in several and out of step with their compute."""


def open_engines(model: Path, settings: EngineConfig) -> Engines:
    return {role: LocalEngine(open_engine(model, settings)) for role in SERVE}


@asynccontextmanager
async def open_workers(
    engines: Engines,
    model: Path,
    settings: EngineConfig,
    directory: Path,
    link: LinkConfig = SMALL_LINK,
    speculation: SpeculationConfig = OFF,
) -> AsyncIterator[Client]:
    """Run both workers with sockets in a folder; at the end no block is leased."""
    sockets = directory / "s"
    sockets.mkdir(mode=0o700)
    configs = {
        role: WorkerConfig(
            name=role,
            model_dir=str(model),
            control_address=f"ipc://{sockets}/{role}",
            kv_address=f"ipc://{sockets}/kv" if role is Role.DECODE else None,
            engine=settings,
            link=link,
            speculation=speculation,
        )
        for role in SERVE
    }
    with closing(ZmqNetwork(link)) as control, closing(ZmqNetwork(link)) as kv:
        async with DeviceThread(1, 1, 10.0) as device, trio.open_nursery() as nursery:
            for role, serve in SERVE.items():
                await nursery.start(serve, configs[role], engines[role], device, control, kv)
            client = Client(control, {role: c.control_address for role, c in configs.items()})
            await nursery.start(client.run)
            yield client
            nursery.cancel_scope.cancel()
    for engine in engines.values():
        engine.ledger.check_invariants()
        assert engine.ledger.leased_blocks == 0
