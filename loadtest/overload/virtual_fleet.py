"""A whole fleet in virtual time: the product's server and workers, links in memory, and devices of
modelled time. An hour of overload passes in minutes, and twice the same way.

Knows how the parts are put together; knows no load.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

import decode.worker
import prefill.worker
from ops.simulation.clock import ClockAlarm, VirtualClock
from ops.simulation.faults import CALM
from ops.simulation.hosts import Host
from ops.simulation.text import NumberText
from server.contract.charges import NO_CHARGES
from server.scheduling.links import Links
from transport.memory_network import MemoryNetwork
from transport.memory_pipe import Conditions
from triolet.config import EngineConfig, LinkConfig, ServerConfig, WorkerConfig
from triolet.ids import SECRET_BYTES, Role
from triolet.units import KIB, SECONDS

from .modelled import COST, ModelledDevice, ModelledEngine, StepCost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from server.contract.charges import Charges
    from server.scheduling.observer import Observer
    from server.scheduling.output import RelayText
    from worker.shell import Shell

MODEL: Final = "modelled"
BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class FleetShape:
    """How large a fleet is.

    Attributes:
      prefills: workers.
      decodes: workers.
      max_num_seqs: rows of a decode step.
      num_blocks: of each pool.
      cost: of each worker's steps.
      server: bounds and switches of the server; addresses and links are added.
    """

    prefills: int = 1
    decodes: int = 1
    max_num_seqs: int = 32
    num_blocks: int = 1024
    cost: StepCost = COST
    server: ServerConfig = field(
        default_factory=lambda: ServerConfig(
            model_dir="", model_name=MODEL, prefill_addresses=(), decode_addresses=()
        )
    )


class Front(NamedTuple):
    """What the server is to its fleet, where somebody runs more of it than the fleet.

    Attributes:
      text: the model's.
      observer: told of what happens.
      charges: told what each request used.
    """

    text: RelayText
    observer: Observer | None = None
    charges: Charges = NO_CHARGES


class _Calm(Conditions):
    """A network that loses nothing, in the simulator's own time."""

    def make_alarm(self) -> ClockAlarm:
        return ClockAlarm()


class VirtualFleet:
    """One server, its workers.

    Args:
      shape: how large it is.
      seed: of what is drawn at random.
      front: of the server; None for one that is nothing but its fleet.

    Attributes:
      fleet: takes requests.
    """

    def __init__(self, shape: FleetShape, seed: int, front: Front | None = None) -> None:
        self._shape = shape
        self._network = MemoryNetwork(seed)
        # Elsewhere, in time that passes by itself, links wait as Trio does.
        if isinstance(trio.lowlevel.current_clock(), VirtualClock):
            self._network.conditions = _Calm(seed, CALM)
        self._link = LinkConfig(kv_ring_bytes=1024 * KIB)
        self._host = Host(1)
        self._epochs = iter(range(1, 1_000_000))
        names = {
            Role.PREFILL: [f"prefill-{n}" for n in range(shape.prefills)],
            Role.DECODE: [f"decode-{n}" for n in range(shape.decodes)],
        }
        self._names = names
        config = replace(
            shape.server,
            prefill_addresses=tuple(map(_address, names[Role.PREFILL])),
            decode_addresses=tuple(map(_address, names[Role.DECODE])),
            link=self._link,
        )
        text, observer, charges = front or Front(NumberText())
        self.fleet = Links(
            config,
            text,
            self._network,
            observer,
            draw_epoch=lambda: next(self._epochs),
            charges=charges,
            kv_secret=bytes(SECRET_BYTES),
        )

    async def start(self, nursery: trio.Nursery) -> None:
        """Start everybody and wait until requests are taken."""
        for role, names in self._names.items():
            for name in names:
                await nursery.start(self._serve, role, name)
        await nursery.start(self.fleet.run)
        with trio.fail_after(60 * SECONDS):
            await self.fleet.wait_ready()

    async def _serve(self, role: Role, name: str, *, task_status: trio.TaskStatus[Shell]) -> None:
        shape = self._shape
        engine_config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=shape.max_num_seqs)
        config = WorkerConfig(
            name=name,
            model_dir="",
            control_address=_address(name),
            kv_address=f"{_address(name)}/kv" if role is Role.DECODE else None,
            engine=engine_config,
            link=self._link,
        )
        engine = ModelledEngine(shape.num_blocks, engine_config, shape.cost)
        device = ModelledDevice(shape.cost)
        networks = (self._network, self._network)
        if role is Role.PREFILL:
            await prefill.worker.serve(
                config,
                engine,
                device,
                *networks,
                draw_epoch=lambda: next(self._epochs),
                make_ring=self._host.make_ring,
                task_status=task_status,
            )
        else:
            await decode.worker.serve(
                config,
                engine,
                device,
                *networks,
                draw_epoch=lambda: next(self._epochs),
                find_ring=self._host.find,
                task_status=task_status,
            )


@asynccontextmanager
async def virtual_fleet(
    shape: FleetShape, seed: int, front: Front | None = None
) -> AsyncIterator[VirtualFleet]:
    """Run a fleet. To be used inside `ops.simulation.deterministic.run`, or where the modelled
    time of its devices may pass in truth."""
    async with trio.open_nursery() as nursery:
        running = VirtualFleet(shape, seed, front)
        await running.start(nursery)
        yield running
        nursery.cancel_scope.cancel()


def _address(name: str) -> str:
    return f"memory:{name}"
