"""Simulated processes: production code behind a gate, which can be killed, stopped and continued,
and which is started anew when it has ended.

Knows how a worker and a server are put together; decides nothing about when what happens.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio

import decode.worker
import prefill.worker
from server.fleet.fleet import Fleet
from server.fleet.observer import SilentObserver
from triolet.config import WorkerConfig
from triolet.ids import Role

from .deterministic import Gate, behind
from .engine import SimulatedDevice, SimulatedEngine
from .overseer import Overseer
from .text import NumberText
from .weather import control_address, kv_address
from .wiring import Wiring

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Awaitable, Callable

    from decode.core import DecodeCore
    from prefill.core import PrefillCore
    from transport.memory_network import MemoryNetwork
    from triolet.config import EngineConfig, LinkConfig, ServerConfig
    from worker.shell import Shell

    from .engine import Cost
    from .faults import Fault

SERVE = {Role.PREFILL: prefill.worker.serve, Role.DECODE: decode.worker.serve}


class Surroundings(Protocol):
    """What every process of a run shares."""

    @property
    def network(self) -> MemoryNetwork:
        """Between them."""
        ...

    @property
    def link(self) -> LinkConfig:
        """Their deadlines and bounds."""
        ...

    @property
    def rng(self) -> random.Random:
        """Where epochs come from."""
        ...

    @property
    def happened(self) -> Counter[Fault]:
        """Counts faults that come out of the inside."""
        ...

    @property
    def causes(self) -> Counter[str]:
        """Counts why attempts are begun anew."""
        ...

    def report(self, what: str) -> None:
        """Take down what must not happen."""
        ...

    def note(self, what: str) -> None:
        """Take down what happened."""
        ...


class Process:
    """One name in the fleet, through all its lives.

    Args:
      role: what it is.
      name: what others call it.
      around: what all processes share.

    Attributes:
      lives: how often it was started.
      restart_s: from its end to its next start.
      away_until: it was frozen until then.
      stopped_s: for so long.
    """

    def __init__(self, role: Role, name: str, around: Surroundings) -> None:
        self.role = role
        self.name = name
        self.lives = 0
        self.restart_s = 0.5
        self.away_until = 0.0
        self.stopped_s = 0.0
        self._stopped_at = 0.0
        self._around = around
        self._gate = Gate()
        self._scope = trio.CancelScope()
        self._wiring = Wiring(around.network)

    def __str__(self) -> str:
        return self.name

    @property
    def is_up(self) -> bool:
        """Whether it serves in its present life."""
        return False

    @property
    def is_frozen(self) -> bool:
        """Whether it is stopped."""
        return not self._gate.is_open

    @property
    def is_running(self) -> bool:
        """Whether it serves and is not stopped."""
        return self.is_up and not self.is_frozen

    async def keep(self) -> None:
        """Start it again whenever it has ended. Runs outside of the process itself."""
        while True:
            self.lives += 1
            self._gate = Gate()
            self._scope = trio.CancelScope()
            self._wiring = Wiring(self._around.network)
            try:
                with self._scope, behind(self._gate):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._live)
            except* Exception as group:  # noqa: BLE001 (where a real process would die)
                self._around.report(f"{self.name} died of {_innermost(group)}")
            self._gone()
            self._around.note(f"{self.name} has ended")
            await trio.sleep(self.restart_s)

    def kill(self) -> None:
        """End this life without a word, as SIGKILL does, stopped or not."""
        self._gone()
        self._wiring.sever()
        self._scope.cancel()
        self._gate.open()

    def freeze(self) -> None:
        """SIGSTOP. Idempotent."""
        if self._gate.is_open:
            self._stopped_at = trio.current_time()
        self._gate.close()

    def thaw(self) -> None:
        """SIGCONT. Idempotent."""
        if not self._gate.is_open:
            self.away_until = trio.current_time()
            self.stopped_s = self.away_until - self._stopped_at
        self._gate.open()

    def spawn(self, nursery: trio.Nursery, fn: Callable[..., Awaitable[object]]) -> None:
        """Run something as a part of this process."""
        with behind(self._gate):
            nursery.start_soon(fn)

    def draw_epoch(self) -> int:
        """Return the epoch of a new life."""
        return self._around.rng.getrandbits(64) or 1

    async def _live(self) -> None:
        raise AssertionError("each kind of process has its own life")

    def _gone(self) -> None:
        """Forget the life that has ended."""


class WorkerProcess(Process):
    """A prefill or decode worker: the production shell and core, a simulated engine.

    Args:
      role: which.
      name: what others call it.
      around: what all processes share.
      config: blocks and rows.
      num_blocks: of its pool.
      cost: of its steps.
    """

    def __init__(
        self,
        role: Role,
        name: str,
        around: Surroundings,
        config: EngineConfig,
        num_blocks: int,
        cost: Cost,
    ) -> None:
        super().__init__(role, name, around)
        self.engine: SimulatedEngine | None = None
        self.device: SimulatedDevice | None = None
        self.shell: Shell | None = None
        self._num_blocks = num_blocks
        self._cost = cost
        self._config = WorkerConfig(
            name=name,
            model_dir="",
            control_address=control_address(name),
            kv_address=kv_address(name) if role is Role.DECODE else None,
            engine=config,
            link=around.link,
            max_waiting_tokens=256,
            step_timeout_s=6.0,
        )

    @property
    def is_up(self) -> bool:
        """Whether it serves."""
        return self.shell is not None

    @property
    def core(self) -> PrefillCore | DecodeCore:
        """The mind of the present life."""
        assert self.shell is not None, "only a worker that is up has a mind"
        return self.shell._core  # type: ignore[return-value]

    def drain(self, deadline_s: float) -> None:
        """Let it finish and leave, as SIGTERM does."""
        if self.shell is not None:
            self.shell.drain(deadline_s)

    async def _live(self) -> None:
        around = self._around

        def report(what: str) -> None:
            around.report(f"{self.name}: {what}")

        engine = SimulatedEngine(
            self._num_blocks, self._config.engine, self._cost, report, around.happened
        )
        device = SimulatedDevice(engine, self._cost, around.happened)
        serve = partial(
            SERVE[self.role],
            self._config,
            engine,
            device,
            self._wiring,
            self._wiring,
            draw_epoch=self.draw_epoch,
        )
        async with trio.open_nursery() as nursery:
            shell = await nursery.start(serve)
            shell.exit_process = lambda _: self.kill()
            self.engine, self.device, self.shell = engine, device, shell
            overseer = Overseer(self, self.core, around.link, report)
            device.on_step = overseer.look_at_step
            around.note(f"{self.name} serves")

    def _gone(self) -> None:
        self.engine = self.device = self.shell = None


class Causes(SilentObserver):
    """Counts why attempts failed."""

    def __init__(self, causes: Counter[str]) -> None:
        super().__init__()
        self._causes = causes

    def attempt_failed(self, cause: str) -> None:
        """Count it."""
        self._causes[cause] += 1


class ServerProcess(Process):
    """A server: the production fleet without HTTP; its clients are tasks of it.

    Args:
      name: what others call it.
      around: what all processes share.
      config: addresses and bounds.
    """

    def __init__(self, name: str, around: Surroundings, config: ServerConfig) -> None:
        super().__init__(Role.SERVER, name, around)
        self.fleet: Fleet | None = None
        self.handlers: trio.Nursery | None = None
        self._up = trio.Event()
        self._config = config

    @property
    def is_up(self) -> bool:
        """Whether it takes requests."""
        return self.fleet is not None

    async def serve(self, handler: Callable[[Fleet], Awaitable[object]]) -> None:
        """Let a client in, as soon as there is somebody to let it in."""
        while self.fleet is None or self.handlers is None:
            await self._up.wait()
        self.spawn(self.handlers, partial(handler, self.fleet))

    async def _live(self) -> None:
        fleet = Fleet(
            self._config,
            NumberText(),
            self._wiring,
            Causes(self._around.causes),
            name=self.name,
            draw_epoch=self.draw_epoch,
        )
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


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        place = f"{code.co_filename.rsplit('/', 2)[-1]}:{traceback.tb_lineno} {code.co_name}"
        traceback = traceback.tb_next
    return f"{type(error).__name__}: {error} ({place})"
