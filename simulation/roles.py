"""Simulated processes: a worker with a simulated engine, and a server with its clients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from engine.pace import pace_of
from server.contract.request_events import AttemptFailed, RequestEvents
from server.scheduling.links import Links
from server.scheduling.status import Observer
from triolet.config import LabelsConfig, WorkerConfig
from triolet.ids import Role

from .charges import RecordingCharges
from .engine import EAGER, Guesses, ScriptedEngine, SimulatedDevice
from .fleet import KV_SECRET, worker_of
from .network import control_address, kv_address
from .overseer import Overseer, RouteOverseer
from .process import Process
from .text import NumberText

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from decode.core import DecodeCore
    from prefill.core import PrefillCore
    from triolet.config import EngineConfig, ServerConfig
    from worker.worker_loop import WorkerLoop

    from .engine import SimulatedCost
    from .faults import Tally
    from .network import Host
    from .process import Surroundings


class WorkerProcess(Process):
    """A prefill or decode worker: the production loop and core with a simulated engine.

    Args:
      role: prefill or decode.
      name: its name in the fleet.
      around: state shared by all processes.
      config: config of blocks and rows.
      num_blocks: blocks of its pool.
      cost: cost of its steps.
      host: host that it runs on.
      guesses: whether it guesses coming tokens; decode only.
      zone: its zone; empty for none.
    """

    def __init__(
        self,
        role: Role,
        name: str,
        around: Surroundings,
        config: EngineConfig,
        num_blocks: int,
        cost: SimulatedCost,
        host: Host,
        *,
        guesses: bool = False,
        zone: str = "",
    ) -> None:
        super().__init__(role, name, around)
        self.engine: ScriptedEngine | None = None
        self.device: SimulatedDevice | None = None
        self.loop: WorkerLoop | None = None
        self._num_blocks = num_blocks
        self._cost = cost
        self._guesses = guesses
        self._host = host
        self.zone = zone
        self._config = WorkerConfig(
            name=name,
            model_dir="",
            control_address=control_address(name),
            kv_address=kv_address(name) if role is Role.DECODE else None,
            engine=config,
            link=around.link,
            max_waiting_tokens=256,
            step_timeout_s=6.0,
            speculation=EAGER,
            labels=LabelsConfig(zone=zone),
        )

    @property
    def is_up(self) -> bool:
        """Return whether it is serving."""
        return self.loop is not None

    @property
    def core(self) -> PrefillCore | DecodeCore:
        """The current state machine."""
        assert self.loop is not None, "only a running worker has a core"
        return self.loop._core  # type: ignore[return-value]

    def drain(self, deadline_s: float) -> None:
        """Drain it, as SIGTERM does."""
        if self.loop is not None:
            self.loop.drain(deadline_s)

    async def _live(self) -> None:
        around = self._around

        def report(what: str) -> None:
            around.report(f"{self.name}: {what}")

        config, happened = self._config.engine, around.tally.happened
        most_tokens = config.max_num_batched_tokens
        engine = ScriptedEngine(
            self._num_blocks,
            config.block_size,
            pace_of(most_tokens, self._cost.of(most_tokens), config),
            host_bytes=config.host_cache_bytes,
            report=report,
            happened=happened,
        )
        device = SimulatedDevice(engine, self._cost, happened)
        serve = worker_of(
            self.role,
            self._config,
            engine,
            device,
            self._wiring,
            host=self._host,
            draw_epoch=self.draw_epoch,
            source=Guesses() if self._guesses else None,
        )
        async with trio.open_nursery() as nursery:
            loop = await nursery.start(serve)
            loop.exit_process = lambda _: self.kill()
            self.engine, self.device, self.loop = engine, device, loop
            overseer = Overseer(self, self.core, around, zone=self.zone)
            device.on_step = overseer.look_at_step
            around.note(f"{self.name} serves")

    def _gone(self) -> None:
        self.engine = self.device = self.loop = None


class Causes(Observer):
    """Counts the causes of failed attempts and the routes of prompts."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def attempt_failed(self, event: AttemptFailed) -> None:
        """Count the cause."""
        self._tally.causes[event.cause] += 1

    def prompt_routed(self, role: str, why: str) -> None:
        """Count the route."""
        self._tally.routes[f"{role}: {why}"] += 1


class ServerProcess(Process):
    """A server: production code without HTTP, with its clients as tasks.

    Args:
      name: its name in the fleet.
      around: state shared by all processes.
      config: config of the server.

    Attributes:
      charges: usage of its clients, one entry per start.
      routes: watches the attempts of the current life; None before the first.
    """

    def __init__(self, name: str, around: Surroundings, config: ServerConfig) -> None:
        super().__init__(Role.SERVER, name, around)
        self.fleet: Links | None = None
        self.handlers: trio.Nursery | None = None
        self.charges: list[RecordingCharges] = []
        self.routes: RouteOverseer | None = None
        self._up = trio.Event()
        self._config = config

    @property
    def is_up(self) -> bool:
        """Return whether it accepts requests."""
        return self.fleet is not None

    async def serve(self, handler: Callable[[Links], Awaitable[object]]) -> None:
        """Wait until the server accepts requests, and run a client."""
        while self.fleet is None or self.handlers is None:
            await self._up.wait()
        self.spawn(self.handlers, partial(handler, self.fleet))

    def use(self, workers: Iterable[WorkerProcess]) -> None:
        """Use these workers from now on, as after a change of the members file."""
        if self.fleet is None or self.handlers is None:
            return
        fleet = self.fleet
        members = [(worker.role, control_address(worker.name)) for worker in workers]

        async def change() -> None:
            fleet.set_members(members)

        self.spawn(self.handlers, change)

    async def _live(self) -> None:
        charges = RecordingCharges(lambda what: self._around.report(f"{self.name}: {what}"))
        self.charges.append(charges)
        causes, events = Causes(self._around.tally), RequestEvents()
        charges.subscribe_to(events)
        events.subscribe(AttemptFailed, causes.attempt_failed)
        fleet = Links(
            self._config,
            NumberText(),
            self._wiring,
            causes,
            name=self.name,
            draw_epoch=self.draw_epoch,
            events=events,
            kv_secret=KV_SECRET,
        )
        self.routes = RouteOverseer(self.name, fleet, self._config, self._around.report)
        async with trio.open_nursery() as nursery:
            await nursery.start(fleet.run)
            async with trio.open_nursery() as handlers:
                self.fleet, self.handlers = fleet, handlers
                self._up.set()
                self._around.note(f"{self.name} serves")
                await trio.sleep_forever()

    def _gone(self) -> None:
        self.fleet = self.handlers = None
        if self._up.is_set():
            self._up = trio.Event()
