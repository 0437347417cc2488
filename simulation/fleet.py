"""Run a whole fleet in memory: the product's server and workers on an in-memory network.

`worker_of` builds one worker. `running_fleet` runs a fleet with devices of modelled time, for load
tests of an hour of virtual time.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

import decode.worker
import prefill.worker
from server.scheduling.links import Links
from transport.memory_network import MemoryNetwork
from transport.memory_pipe import Conditions
from triolet.config import EngineConfig, LinkConfig, ServerConfig, WorkerConfig
from triolet.ids import LIVES, SECRET_BYTES, Role
from triolet.units import KIB, SECONDS

from .clock import ClockAlarm, VirtualClock
from .engine import ScriptedEngine
from .faults import CALM
from .modelled import COST, ModelledDevice, StepCost, paced
from .network import Host
from .text import NumberText

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Any

    from decode.speculation import GuessSource
    from server.contract.request_events import RequestEvents
    from server.scheduling.output import RelayText
    from server.scheduling.status import Observer
    from transport.link import Network
    from worker.engine_port import EnginePort
    from worker.worker_loop import Device

KV_SECRET: Final = bytes(SECRET_BYTES)
"""Constant, because no attacker is simulated and the bytes on the wire must depend only on the
seed."""
READY_S: Final = 60 * SECONDS


def worker_of(
    role: Role,
    config: WorkerConfig,
    engine: EnginePort,
    device: Device,
    network: Network,
    *,
    host: Host | None = None,
    draw_epoch: Callable[[], int] | None = None,
    source: GuessSource | None = None,
) -> partial[Any]:
    """Return a worker for `nursery.start`, which returns its WorkerLoop.

    Args:
      role: prefill or decode.
      config: config of the worker.
      engine: engine to use.
      device: device that runs its steps.
      network: network of all its links.
      host: simulated host for shared memory; None for the real machine.
      draw_epoch: returns epochs; None for the default.
      source: source of guessed tokens, for decode; None for the default.
    """
    more: dict[str, Any] = {}
    if draw_epoch is not None:
        more["draw_epoch"] = draw_epoch
    if source is not None:
        more["source"] = source
    if role is Role.PREFILL:
        if host is not None:
            more["make_ring"] = host.make_ring
        return partial(prefill.worker.serve, config, engine, device, network, network, **more)
    if host is not None:
        more["find_ring"] = host.find
    return partial(decode.worker.serve, config, engine, device, network, network, **more)


MODEL: Final = "modelled"
BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Size of a fleet.

    Attributes:
      prefills: number of workers.
      decodes: number of workers.
      max_num_seqs: rows of a decode step.
      num_blocks: blocks of each pool.
      cost: cost of each worker's steps.
      server: config of the server, without addresses and links.
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
    """Components of the server around its fleet.

    Attributes:
      text: text conversion of the model.
      observer: receives metrics events.
      events: publishes request events.
    """

    text: RelayText
    observer: Observer | None = None
    events: RequestEvents | None = None


class CalmConditions(Conditions):
    """Conditions of a network without losses, in virtual time."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, CALM)

    def make_alarm(self) -> ClockAlarm:
        return ClockAlarm()


@asynccontextmanager
async def running_fleet(
    shape: FleetShape,
    seed: int,
    front: Front | None = None,
    crashes: list[Callable[[], None]] | None = None,
) -> AsyncIterator[Links]:
    """Run a fleet with devices of modelled time; yield the server's side once it is ready.

    Runs in virtual time inside `deterministic.run`, elsewhere in real time.

    Args:
      shape: size of the fleet.
      seed: random seed.
      front: further components of the server, or None.
      crashes: gets a function for each worker that ends and restarts it.
    """
    network, host, epochs = MemoryNetwork(seed), Host(1), count(1, LIVES)
    if isinstance(trio.lowlevel.current_clock(), VirtualClock):
        network.conditions = CalmConditions(seed)
    link = LinkConfig(kv_ring_bytes=1024 * KIB)
    names = {
        Role.PREFILL: [f"prefill-{n}" for n in range(shape.prefills)],
        Role.DECODE: [f"decode-{n}" for n in range(shape.decodes)],
    }

    def draw_epoch() -> int:
        return next(epochs)

    server = replace(
        shape.server,
        prefill_addresses=tuple(map(address_of, names[Role.PREFILL])),
        decode_addresses=tuple(map(address_of, names[Role.DECODE])),
        link=link,
    )
    text, observer, events = front or Front(NumberText())
    fleet = Links(
        server,
        text,
        network,
        observer,
        draw_epoch=draw_epoch,
        events=events,
        kv_secret=KV_SECRET,
    )
    async with trio.open_nursery() as nursery:
        for role in names:
            for name in names[role]:
                new_worker = partial(
                    modelled_worker, role, name, shape, link, network, host, draw_epoch
                )
                await nursery.start(_keep, new_worker, [] if crashes is None else crashes)
        await nursery.start(fleet.run)
        with trio.fail_after(READY_S):
            await fleet.wait_ready()
        yield fleet
        nursery.cancel_scope.cancel()


async def _keep(
    new_worker: Callable[[], partial[Any]],
    crashes: list[Callable[[], None]],
    task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a worker, and start it again after each crash."""
    life = trio.CancelScope()
    crashes.append(lambda: life.cancel())
    while True:
        with life:
            await new_worker()(task_status=task_status)
        life, task_status = trio.CancelScope(), trio.TASK_STATUS_IGNORED


def modelled_worker(
    role: Role,
    name: str,
    shape: FleetShape,
    link: LinkConfig,
    network: Network,
    host: Host,
    draw_epoch: Callable[[], int],
) -> partial[Any]:
    """Return a worker with simulated device times; see `worker_of`."""
    config = WorkerConfig(
        name=name,
        model_dir="",
        control_address=address_of(name),
        kv_address=f"{address_of(name)}/kv" if role is Role.DECODE else None,
        engine=EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=shape.max_num_seqs),
        link=link,
    )
    pace = paced(shape.cost, config.engine)
    engine = ScriptedEngine(shape.num_blocks, BLOCK_SIZE, pace, says=None)
    device = ModelledDevice(shape.cost)
    return worker_of(role, config, engine, device, network, host=host, draw_epoch=draw_epoch)


def address_of(name: str) -> str:
    """Return the address of a worker."""
    return f"memory:{name}"
