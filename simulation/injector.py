"""Inject faults into the simulated fleet at random times, undo them, and count them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from triolet.ids import Role

from .faults import CALM, TIMED, Fault

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Awaitable, Callable

    from .faults import FaultPlan, Loss, ZoneLoss
    from .process import Process
    from .roles import WorkerProcess
    from .world import World


class Injector:
    """The faults of one run.

    Args:
      world: the fleet.
      plan: kinds of faults and their rate.
      rng: random source of victims and times.
      happened: counts of faults.
    """

    def __init__(
        self, world: World, plan: FaultPlan, rng: random.Random, happened: Counter[Fault]
    ) -> None:
        self._world = world
        self._plan = plan
        self._rng = rng
        self._happened = happened
        self._timed = [fault for fault in TIMED if fault in plan.enabled]
        self._inject: dict[Fault, Callable[[], Awaitable[None]]] = {
            Fault.PARTITION: self._partition,
            Fault.ONE_WAY: partial(self._partition, is_one_way=True),
            Fault.CRASH: self._crash,
            Fault.FREEZE: self._freeze,
            Fault.ZOMBIE: partial(self._freeze, is_long=True),
            Fault.WEDGE: self._wedge,
            Fault.STEP_ERROR: self._fail_step,
            Fault.DRAIN: self._drain,
            Fault.LEAVE: self._leave,
            Fault.SERVER_CRASH: self._crash_server,
            Fault.SERVER_FREEZE: self._freeze_server,
        }

    async def run(self, seconds: float) -> None:
        """Inject faults for a while, then undo all of them."""
        self._world.weather.faults = self._plan.network
        self._world.weather.outlives_links = Fault.AFTERLIFE in self._plan.enabled
        try:
            with trio.move_on_after(seconds):
                async with trio.open_nursery() as nursery:
                    if self._plan.once is not None:
                        nursery.start_soon(self._inject_once, self._plan.once, seconds)
                    if self._plan.loss is not None:
                        nursery.start_soon(self._lose, self._plan.loss)
                    if self._plan.zone_loss is not None:
                        nursery.start_soon(self._lose_zone, self._plan.zone_loss)
                    while True:
                        await trio.sleep(self._rng.expovariate(1 / self._plan.every_s))
                        if self._timed:
                            fault = self._rng.choice(self._timed)
                            nursery.start_soon(self._inject[fault])
        finally:
            self.heal()

    async def _inject_once(self, fault: Fault, within_s: float) -> None:
        await trio.sleep(self._rng.uniform(0.0, within_s))
        await self._inject[fault]()

    async def _lose(self, loss: Loss) -> None:
        await self._world.weather.lose(loss)
        self._tell(Fault.LOSS, loss.kind.__name__)
        if loss.stops_s:
            await trio.sleep(loss.stops_after_s)
            processes = self._world.processes
            victim = processes[loss.victim % len(processes)]
            fault = Fault.SERVER_FREEZE if victim.role is Role.SERVER else Fault.FREEZE
            await self._stop(fault, victim if victim.is_running else None, loss.stops_s)

    async def _lose_zone(self, loss: ZoneLoss) -> None:
        await trio.sleep(loss.begins_s)
        self._tell(Fault.ZONE, loss)
        members = [one for one in self._world.workers if one.zone == loss.zone]
        async with trio.open_nursery() as nursery:
            for number, worker in enumerate(members):
                seconds = loss.silent_s + number * loss.apart_s
                if loss.is_death:
                    worker.restart_s = seconds
                    worker.kill()
                    self._happened[Fault.ZONE] += 1
                else:
                    nursery.start_soon(self._stop, Fault.ZONE, worker, seconds)

    def heal(self) -> None:
        """Undo all faults, and continue all stopped processes."""
        self._world.weather.faults = CALM
        self._world.weather.outlives_links = False
        self._world.weather.partitions.clear()
        for process in (*self._world.workers, *self._world.servers):
            process.thaw()
        for server in self._world.servers:
            server.use(self._world.workers)
        for worker in self._world.workers:
            if worker.engine is not None and worker.device is not None:
                worker.engine.fail_steps = 0
                worker.device.wedge(0.0)
        self._world.note("everything is healed")

    def _tell(self, fault: Fault, target: object) -> None:
        self._world.note(f"FAULT {fault.value}: {target}")

    def _victim(self) -> WorkerProcess | None:
        running = [worker for worker in self._world.workers if worker.is_running]
        return self._rng.choice(running) if running else None

    async def _partition(self, *, is_one_way: bool = False) -> None:
        one, other = _connected(self._world, self._rng)
        ways = ((one, other), (other, one))
        if is_one_way:
            await self._cut(Fault.ONE_WAY, {self._rng.choice(ways)})
        else:
            await self._cut(Fault.PARTITION, set(ways))

    async def _cut(self, fault: Fault, ways: set[tuple[str, str]]) -> None:
        self._tell(fault, sorted(ways))
        partitions = self._world.weather.partitions
        partitions |= ways
        try:
            await trio.sleep(self._rng.uniform(0.3, 5.0))
        finally:
            partitions -= ways
            self._world.note(f"healed {sorted(ways)}")

    async def _crash(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._kill(Fault.CRASH, victim)

    async def _crash_server(self) -> None:
        victim = self._rng.choice(self._world.servers)
        if victim.is_running:
            self._kill(Fault.SERVER_CRASH, victim)

    def _kill(self, fault: Fault, victim: Process) -> None:
        self._tell(fault, victim)
        self._happened[fault] += 1
        victim.restart_s = self._rng.choice((0.0, 0.1, 0.5, 1.0, 3.0))
        victim.kill()

    async def _freeze(self, *, is_long: bool = False) -> None:
        if is_long:
            seconds = self._world.link.lease_ttl_s + self._rng.uniform(0.1, 4.0)
            await self._stop(Fault.ZOMBIE, self._victim(), seconds)
        else:
            await self._stop(Fault.FREEZE, self._victim(), self._rng.uniform(0.2, 1.9))

    async def _freeze_server(self) -> None:
        victim = self._rng.choice(self._world.servers)
        seconds = self._rng.uniform(0.2, 5.0)
        await self._stop(Fault.SERVER_FREEZE, victim if victim.is_running else None, seconds)

    async def _stop(self, fault: Fault, victim: Process | None, seconds: float) -> None:
        if victim is None:
            return
        self._tell(fault, f"{victim} for {seconds:.3f} s")
        life = victim.lives
        victim.freeze()
        await trio.sleep(seconds)
        if victim.lives == life and victim.is_frozen:
            self._happened[fault] += 1
            self._world.note(f"{victim} continues")
            victim.thaw()

    async def _wedge(self) -> None:
        victim = self._victim()
        if victim is not None and victim.device is not None:
            seconds = self._rng.uniform(0.5, 8.0)
            self._tell(Fault.WEDGE, f"{victim} for {seconds:.3f} s")
            victim.device.wedge(seconds)

    async def _fail_step(self) -> None:
        victim = self._victim()
        if victim is not None and victim.engine is not None:
            self._tell(Fault.STEP_ERROR, victim)
            victim.engine.fail_steps += 1

    async def _drain(self) -> None:
        victim = self._victim()
        if victim is not None:
            seconds = self._rng.choice((0.0, 0.5, 3.0))
            self._tell(Fault.DRAIN, f"{victim} within {seconds} s")
            self._happened[Fault.DRAIN] += 1
            victim.restart_s = self._rng.choice((0.1, 1.0))
            victim.drain(seconds)

    async def _leave(self) -> None:
        server, worker = (
            self._rng.choice(self._world.servers),
            self._rng.choice(self._world.workers),
        )
        others = [one for one in self._world.workers if one is not worker]
        if server.fleet is None or not any(one.role is worker.role for one in others):
            return
        self._tell(Fault.LEAVE, f"{worker} for {server}")
        self._happened[Fault.LEAVE] += 1
        server.use(others)
        await trio.sleep(self._rng.uniform(0.2, 4.0))
        server.use(self._world.workers)


def _connected(world: World, rng: random.Random) -> tuple[str, str]:
    """Draw two connected processes."""
    names = {
        role: [worker.name for worker in world.workers if worker.role is role]
        for role in (Role.PREFILL, Role.DECODE)
    }
    bound = rng.choice(names[Role.DECODE])
    if rng.random() < 0.5:
        return rng.choice(names[Role.PREFILL]), bound
    return rng.choice(world.servers).name, rng.choice([bound, *names[Role.PREFILL]])
