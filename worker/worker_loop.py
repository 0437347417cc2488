"""The worker's main loop: receive frames, run steps, send frames; and the interface of its core."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, TypeVarTuple

import structlog
import trio

from transport.link import PeerBusy, PeerGone
from transport.liveness import WEDGED_STEPS
from triolet.errors import DeviceWedged
from triolet.process import process_facts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from engine.batch import Sampled, StepRow
    from transport.frames import AnyFrame
    from transport.link import Listener
    from triolet.audit import ProcessFacts
    from triolet.config import WorkerConfig

    from .counters import Counters
    from .engine_port import EnginePort
    from .outbox import Outbox
    from .server_sessions import ServerSessions


class Stepper(Protocol):
    """Plans steps and processes their results."""

    @property
    def has_work(self) -> bool:
        """Return whether an attempt waits for a step; if not, `plan` finds nothing."""
        ...

    def plan(self, now: float) -> list[StepRow]:
        """Begin the next step; an empty list means that there is nothing to compute."""
        ...

    def due_after(self, now: float) -> float | None:
        """Return when there will be something to plan even if nothing happens; None if never."""
        ...

    def complete(self, results: Sequence[Sampled | None], now: float) -> None:
        """Process the results of the step."""
        ...

    def fail(self, message: str, now: float) -> None:
        """Process the failure of the step."""
        ...


class WorkerCore(Protocol):
    """The decisions of one worker. Every call is synchronous and does no I/O."""

    @property
    def outbox(self) -> Outbox:
        """Frames to send after each call."""
        ...

    @property
    def counters(self) -> Counters:
        """Counters of the worker; the loop adds the device's time."""
        ...

    @property
    def server_sessions(self) -> ServerSessions[Any]:
        """Sessions with servers."""
        ...

    @property
    def stepper(self) -> Stepper:
        """Plans steps."""
        ...

    def wake(self, now: float) -> None:
        """Called before frames are handed in, and whenever a task of the loop runs."""
        ...

    def on_control(self, sender: bytes, frame: AnyFrame, now: float) -> None:
        """Process a frame of a server."""
        ...

    def sweep(self, now: float) -> None:
        """End what is due."""
        ...

    def say_goodbye(self) -> None:
        """Notify all peers that this worker is leaving."""
        ...


log = structlog.get_logger()

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EXIT_WEDGED: Final = 70
"""Exit code of a worker with a hanging device; BSD's "internal software error"."""
EXIT_DEVICE_LOST: Final = 71
"""Exit code of a worker with a failed device; BSD's "system error"."""


class Device(Protocol):
    """Where steps run."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a blocking call and return its result."""
        ...


def read_process() -> ProcessFacts:
    """Return facts about this process from the operating system and Trio."""
    return process_facts(trio.lowlevel.current_statistics().tasks_living)


class WorkerLoop:
    """One worker's tasks.

    Args:
      core: makes the decisions.
      engine: computes steps.
      device: runs them.
      control: listener for servers.
      config: intervals and bounds.
      flush_kv: sends the core's frames for the other side of the KV path.
      before_step: runs on the device before each step is planned, if given.

    Attributes:
      exit_process: exits at once with a code, whatever still runs; for a device that is stuck or
        lost.
    """

    def __init__(
        self,
        core: WorkerCore,
        engine: EnginePort,
        device: Device,
        control: Listener,
        config: WorkerConfig,
        flush_kv: Callable[[float], None],
        before_step: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.exit_process: Callable[[int], object] = os._exit
        self._core = core
        self._engine = engine
        self._device = device
        self._control = control
        self._config = config
        self._flush_kv = flush_kv
        self._before_step = before_step
        self._work = trio.Event()
        self._news = trio.Event()
        self._drained = trio.Event()
        self._step_began_at: float | None = None

    async def run(
        self, *, task_status: trio.TaskStatus[WorkerLoop] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until drained. `nursery.start` gets this loop, so that the caller can drain it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive)
            nursery.start_soon(self._step)
            nursery.start_soon(self._beat)
            nursery.start_soon(self._sweep)
            task_status.started(self)
            await self._drained.wait()
            nursery.cancel_scope.cancel()

    def drain(self, deadline_s: float) -> None:
        """Accept no new work; `run` returns when everything has ended."""
        self._core.server_sessions.drain(trio.current_time(), deadline_s)
        self.settle(trio.current_time())

    @property
    def is_draining(self) -> bool:
        """Return whether it accepts no new work."""
        return self._core.server_sessions.is_draining

    def overdue_s(self, now: float) -> float | None:
        """Return how long the device has been in one step [s], if that is longer than servers wait;
        None otherwise."""
        patience_s = WEDGED_STEPS * self._engine.pace.step_s
        patience_s = max(self._config.link.progress_timeout_s, patience_s)
        step_s = 0.0 if self._step_began_at is None else now - self._step_began_at
        return step_s if step_s > patience_s else None

    def settle(self, now: float) -> None:
        """Send the core's frames, and wake the step loop if an attempt waits for a step.

        Call this after each call of the core.
        """
        self._flush(now)
        if self._core.stepper.has_work:
            self._work.set()

    def _flush(self, now: float) -> None:
        self._say(now)  # first tokens do not wait for KV
        self._flush_kv(now)
        self._say(now)
        if self._core.server_sessions.has_news:
            self._news.set()

    def _say(self, now: float) -> None:
        # A failed send ends attempts, which sends ENDED frames again; each server is forgotten
        # at its first failure, so this terminates.
        while sends := self._core.outbox.take_for_servers():
            for send in sends:
                try:
                    self._control.send_nowait(send.to, send.frame)
                except (PeerGone, PeerBusy):
                    self._core.server_sessions.on_server_gone(send.to, now)

    async def _receive(self) -> None:
        while True:
            messages = await self._control.receive_many()
            now = trio.current_time()
            self._core.wake(now)
            for message in messages:
                self._core.on_control(message.sender, message.frame, now)
            self.settle(now)

    async def _step(self) -> None:
        while True:
            self._work = trio.Event()
            self._core.wake(trio.current_time())
            if self._before_step is not None:
                self._step_began_at = trio.current_time()
                await self._before_step()
                self._returned()
                self._core.wake(trio.current_time())
            rows = self._core.stepper.plan(trio.current_time())
            self._flush(trio.current_time())
            if not rows:
                self._engine.rest()
                due_at = self._core.stepper.due_after(trio.current_time())
                with trio.CancelScope(deadline=math.inf if due_at is None else due_at):
                    await self._work.wait()
                continue
            self._step_began_at = trio.current_time()
            try:
                results = await self._device.run(self._engine.step, rows)
            except DeviceWedged:  # cancelled while the step still runs: the device is unusable
                raise
            except Exception:
                log.exception("step_failed", rows=len(rows))
                await self._check_device()
                self._returned(len(rows))
                message = "the device step failed; see step_failed in its worker's log"
                self._core.stepper.fail(message, trio.current_time())
            else:
                self._returned(len(rows))
                self._core.wake(trio.current_time())
                self._core.stepper.complete(results, trio.current_time())
            self.settle(trio.current_time())

    def _returned(self, num_rows: int = 0) -> None:
        """Record that the device has returned."""
        assert self._step_began_at is not None, "it was asked for something"
        self._core.counters.used_device(trio.current_time() - self._step_began_at, num_rows)
        self._step_began_at = None

    async def _check_device(self) -> None:
        """Check the device after a failed step; exit if it accepts no more work.

        After a CUDA error that the driver cannot contain, every later call of this process fails.
        Its attempts continue exactly on other workers, and the supervisor starts a new process.
        """
        try:
            await self._device.run(self._engine.check_device)
        except Exception:
            log.exception(
                "device_lost",
                remedy="the supervisor starts a new process; if it repeats, check the driver's log",
            )
            self.exit_process(EXIT_DEVICE_LOST)
            raise

    async def _beat(self) -> None:
        """Send heartbeats: at their interval, and in the turn after leases have ended."""
        link = self._config.link
        while True:
            self._news = trio.Event()
            self._core.wake(trio.current_time())
            self._core.server_sessions.beat()
            self.settle(trio.current_time())
            await trio.sleep(link.load_report_interval_s)
            with trio.move_on_after(link.heartbeat_interval_s - link.load_report_interval_s):
                await self._news.wait()

    async def _sweep(self) -> None:
        while not self._core.server_sessions.is_drained:
            await trio.sleep(self._config.link.sweep_interval_s)
            now = trio.current_time()
            self._core.wake(now)
            self._core.sweep(now)
            self.settle(now)
            self._watch_step(now)
        self._core.say_goodbye()
        self.settle(trio.current_time())
        await self._be_heard()
        self._drained.set()

    async def _be_heard(self) -> None:
        """Keep the control listener open until all peers know that this worker leaves: closing a
        connection discards what the peer has not read yet."""
        link = self._config.link
        with trio.move_on_after(link.farewell_s):
            while not self._core.server_sessions.is_heard:  # noqa: ASYNC110 (it knows no events)
                await trio.sleep(link.sweep_interval_s)

    def _watch_step(self, now: float) -> None:
        began_at = self._step_began_at
        if began_at is not None and now - began_at > self._config.step_timeout_s:
            log.error("device_wedged", step_s=now - began_at)
            self.exit_process(EXIT_WEDGED)
