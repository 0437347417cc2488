"""The server's connections to its workers: connects, greets, sends heartbeats and frames, and
passes received frames to `Requests`.

No task here belongs to a client's request, so no client can delay or cancel one.
"""

from __future__ import annotations

import math
import random
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import structlog
import trio
from trio.lowlevel import ParkingLot

from transport.frames import AttemptRow, Audit, Audited, Goodbye, ServerHeartbeat, Welcome
from transport.handshake import check_version, check_welcome, goodbye, make_hello
from transport.link import PeerBusy, PeerGone
from triolet.config import LABEL_NAMES
from triolet.errors import ConfigError, draining
from triolet.ids import PeerId, Role, new_epoch
from triolet.process import process_facts

from ..contract.output_stream import OutputStream
from ..contract.request_events import RequestEvents
from .adapters import Adapters
from .admission import AdmissionAsk
from .audit import Auditor
from .delivery import Delivery, EmbeddingRun, Intake, RequestOutput
from .presence import ASLEEP
from .requests import FAREWELL, Requests
from .roster import Roster
from .routing import is_ready
from .status import FleetStatus, Observer, present, queued_by_class, worker_status
from .workers import Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence, Set

    from transport.frames import AnyFrame
    from transport.link import Connection, Network
    from triolet.audit import FleetAudit
    from triolet.config import LinkConfig, ServerConfig
    from triolet.errors import RequestError

    from ..contract.generation import GenerationRequest
    from .output import RelayText
    from .request import Request
    from .status import StreamWitness

    Receive: TypeAlias = Callable[[Worker, Connection], Awaitable[None]]

log = structlog.get_logger(__name__)


class _Connections:
    """One connection per worker, including its HELLO handshake.

    Args:
      network: makes connections.
      me: the server's identity in HELLO.
      link: bounds and deadlines.
      now: returns the time; called first in every turn.
      on_lost: called with a worker that is given up, the cause and the time.
      flush: sends the frames that follow from a loss.

    Attributes:
      connections: the current connections.
      nursery: runs the tasks that keep them.
    """

    def __init__(
        self,
        network: Network,
        me: PeerId,
        link: LinkConfig,
        now: Callable[[], float],
        on_lost: Callable[[Worker, str, float], None],
        flush: Callable[[], None],
    ) -> None:
        self.connections: dict[Worker, Connection] = {}
        self.nursery: trio.Nursery | None = None
        self._kept: dict[Worker, trio.CancelScope] = {}
        self._losses: dict[Worker, trio.Event] = {}
        self._network = network
        self._me = me
        self._link = link
        self._now = now
        self._on_lost = on_lost
        self._flush = flush

    def dial(self, worker: Worker) -> None:
        """Connect to a worker, replacing any current connection.

        Raises:
          ConfigError: the address cannot be used.
        """
        older = self.connections.get(worker)
        if older is not None:
            older.close()
        self.connections[worker] = self._network.connect(
            worker.address,
            self._me.identity(),
            hwm=self._link.control_hwm,
            max_frame_bytes=self._link.max_control_frame_bytes,
        )

    def refuse(self, worker: Worker, objection: Goodbye) -> None:
        """Reject a worker and tell it why. Until it receives the reason, it keeps part of its
        credit for this server."""
        worker.trouble = f"cannot be used: {objection.reason}"
        with suppress(PeerGone, PeerBusy):
            self.connections[worker].send_nowait(objection)

    def begin(self, worker: Worker, receive: Receive) -> None:
        """Connect to a worker and keep the connection until `end`.

        Raises:
          ConfigError: the address cannot be used.
        """
        assert self.nursery is not None, "connections are kept only while a nursery is open"
        self.dial(worker)
        scope = self._kept[worker] = trio.CancelScope()
        self.nursery.start_soon(self._keep, worker, receive, scope)

    def end(self, worker: Worker) -> None:
        """Notify a worker that this server stops using it, and close its connection."""
        with suppress(PeerGone, PeerBusy):  # otherwise its leases expire
            self.connections[worker].send_nowait(goodbye("this server no longer uses this worker"))
        self._kept.pop(worker).cancel()

    async def _keep(self, worker: Worker, receive: Receive, scope: trio.CancelScope) -> None:
        """Greet a worker and receive its frames. Reconnect whenever HELLO gets no answer: a live
        connection can be useless for good, for example after a failed handshake."""
        with scope:
            patience_s = self._link.redial_s
            while True:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(receive, worker, self.connections[worker])
                    nursery.start_soon(self._watch, worker)
                    was_answered = await self._greet(worker, patience_s)
                    nursery.cancel_scope.cancel()
                log.info("redialling", worker=str(worker), trouble=worker.trouble)
                self.dial(worker)
                patience_s = min(2 * patience_s, self._link.max_redial_s)
                if was_answered:
                    patience_s = self._link.redial_s
        # Closed here, where no task waits for it any longer.
        self._losses.pop(worker, None)
        self.connections.pop(worker).close()

    def lose(self, worker: Worker, cause: str, now: float) -> None:
        """Give a worker up. HELLO follows soon instead of at the next heartbeat; after a farewell,
        only when the connection breaks."""
        self._on_lost(worker, cause, now)
        if cause != FAREWELL:
            self._hurry(worker)

    def _hurry(self, worker: Worker) -> None:
        if (loss := self._losses.get(worker)) is not None:
            loss.set()

    async def _watch(self, worker: Worker) -> None:
        """Give a worker up as soon as its connection breaks: its process died or frames were
        lost."""
        connection = self.connections[worker]
        while True:
            await connection.wait_broken()
            now = self._now()
            if worker.is_connected:
                self.lose(worker, "link_gone", now)
                self._flush()
            self._hurry(worker)

    async def _greet(self, worker: Worker, patience_s: float) -> bool:
        """Send HELLO until the worker answers, and again whenever it is lost. `send` waits until a
        worker that is away can be reached.

        Returns:
          After `patience_s` without an answer since HELLO was sent or a handshake failed: whether
          this connection brought an answer before.
          whether this connection brought an answer before.
        """
        connection = self.connections[worker]
        was_answered, asked_since = False, math.inf
        while True:
            now = self._now()
            if worker.is_connected:
                was_answered, asked_since = True, math.inf
            else:
                if connection.trouble:
                    worker.trouble = connection.trouble
                    asked_since = min(asked_since, now)
                if now - asked_since >= patience_s:
                    return was_answered
                with trio.move_on_after(self._link.heartbeat_interval_s) as unsent:
                    with suppress(PeerGone):  # cut off because the peer's answer is no valid frame
                        await connection.send(make_hello(self._me))
                if unsent.cancelled_caught:
                    continue
                asked_since = min(asked_since, now)
            loss = self._losses[worker] = trio.Event()
            with trio.move_on_after(self._link.heartbeat_interval_s):
                await loss.wait()
                asked_since = math.inf  # that HELLO is lost, and the connection may recover
                # The pipe of a connection that just broke still accepts frames that it will not
                # send.
                await trio.sleep(self._link.local_reconnect_s)


class Links:
    """Submits requests to workers and returns their tokens.

    Args:
      config: addresses, bounds and deadlines.
      text: the model's tokenizer.
      network: makes connections.
      observer: receives events.
      name: this server's name, as workers see it.
      draw_epoch: returns a new epoch; a simulator supplies its own.
      events: publishes request events; None if there are no subscribers.
      kv_secret: secret from which each attempt's KV key is derived; a simulator supplies its own.
      takes_unversioned: accept workers that name no model version although this model has one.
        False when several models are served: such a worker could belong to another model.

    Attributes:
      admission: accepts or refuses requests before work is spent on them.
      adapters: adapters that requests may name and workers may have.
      events: publishes request events.
      version: the model's digest, or its directory if it is in no store.
      hold_s: returns how long a batch request may be held back for others.
      witness: sees the streams; None if nothing does.
      check_accounting: raises unless every request has or will have exactly one terminal event.
    """

    def __init__(
        self,
        config: ServerConfig,
        text: RelayText,
        network: Network,
        observer: Observer | None = None,
        name: str = "server",
        draw_epoch: Callable[[], int] = new_epoch,
        events: RequestEvents | None = None,
        kv_secret: bytes | None = None,
        *,
        takes_unversioned: bool = True,
    ) -> None:
        now = trio.current_time()
        self._config = config
        self._me = PeerId(Role.SERVER, name, draw_epoch())
        self._check_version = partial(
            check_version,
            me=self._me,
            model=config.model_name,
            compute_digest=config.compute_digest,
            takes_unversioned=takes_unversioned,
        )
        addresses = {Role.PREFILL: config.prefill_addresses, Role.DECODE: config.decode_addresses}
        workers = [
            Worker(role, address, config.link, config.recovery, now)
            for role, of_role in addresses.items()
            for address in of_role
        ]
        # The epoch is random, so servers draw different workers.
        rng = random.Random(self._me.epoch)
        self._roster = Roster(workers, text.max_model_len, config.routing.candidates, rng)
        self._workers = self._roster.workers
        self._observer = observer or Observer()
        self.events = events or RequestEvents()
        self._requests = Requests(
            config, self._roster, text, self._observer, now, self.events, kv_secret
        )
        self.admission = self._requests.admission
        self.hold_s = self._requests.background.hold_s
        self.check_accounting = self._requests.check_accounting
        self._auditor = Auditor(self._me, config, self._workers, self._requests)
        self._links = _Connections(
            network, self._me, config.link, self.now, self._requests.lost, self.flush
        )
        self._delivery = Delivery(self._requests, self)
        self._intake = Intake(self._requests, self._delivery, self)
        self._changed = ParkingLot()
        self.adapters = Adapters(config, self._requests, self.flush)
        self.version = config.model_digest or config.model_dir
        self._until_sweep = trio.CancelScope()
        self.witness: StreamWitness | None = None

    def set_version(self, config: ServerConfig) -> None:
        """Switch to another version of the model that the same workers compute.

        Args:
          config: the server's configuration for that version.
        """
        self._requests.table.model_digest = config.model_digest
        self.version = config.model_digest or config.model_dir

    def submit(self, *requests: GenerationRequest) -> OutputStream:
        """Start the choices of one answer, all or none.

        Raises:
          RequestError: one was refused; nothing was started.
        """
        self.adapters.require_named(requests, self._config.model_name)
        taken = self._requests.submit(requests, self.now())
        self.flush()
        outputs = [RequestOutput(request, self._delivery) for request in taken]
        stream = OutputStream(outputs, self._delivery)
        if self.witness is not None:
            self.witness.submitted(stream)
        return stream

    def embed(self, requests: Sequence[GenerationRequest]) -> EmbeddingRun:
        """Start to embed inputs. The first slice starts now, the others while the caller waits for
        the result.

        Raises:
          RequestError: one was refused; nothing was started.
        """
        self.adapters.require_named(requests, self._config.model_name)
        self.admission.admit(AdmissionAsk.of(tuple(requests)), self.now())

        def begin(some: Sequence[GenerationRequest], first: int) -> list[Request]:
            inputs = self._requests.submit(some, self.now(), first=first)
            self.flush()
            return inputs

        return EmbeddingRun(requests, begin, self._delivery)

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and completion together."""
        return self._requests.max_model_len

    def status(self) -> FleetStatus:
        """Return the state of the fleet."""
        requests, told = self._requests, self.admission.presence.state
        shown = present(self._workers, self._config.spare_addresses, is_asleep=told in ASLEEP)
        return FleetStatus(
            workers=tuple(worker_status(worker) for worker in shown),
            is_ready=is_ready(self._workers, self._config.routing, trio.current_time())
            and not requests.is_draining,
            is_draining=requests.is_draining,
            queued=requests.num_queued,
            running=requests.num_in_flight - requests.num_queued,
            max_model_len=requests.max_model_len,
            received=requests.table.accounting.received,
            accepted=requests.table.accounting.accepted,
            rejected=dict(requests.table.accounting.rejected),
            ended=dict(requests.table.accounting.ended),
            retries_left=requests.recovery.budget.tokens,
            quarantined=requests.recovery.num_quarantined,
            overload=self.admission.overload.status(trio.current_time()),
            queued_by_class=queued_by_class(requests.queues),
            queues=tuple(requests.queues),
            told=told,
            is_coming=self.admission.presence.is_coming(trio.current_time()),
            lost_zones=requests.recovery.lost_zones,
        )

    def in_flight(self, tenant: str | None = None, *, is_waiting: bool = False) -> int:
        """Return how many requests of clients run or wait: of a tenant, or all; or how many of all
        requests wait."""
        if is_waiting:
            return self._requests.num_queued
        specs = (one.spec for one in self._requests.table if not one.spec.is_silent)
        return sum(tenant in (None, one.scheduling.tenant) for one in specs)

    def cancel_tenants(self, tenants: Set[str]) -> None:
        """End all requests of tenants that were disabled or removed."""
        self._requests.cancel_tenants(tenants, self.now())
        self.flush()

    def set_members(self, members: Iterable[tuple[Role, str]]) -> None:
        """Use these workers, given by role and address, while `run` runs. Other workers get no new
        attempts and are dropped once they have none."""
        wanted = set(members)
        for worker in self._workers:
            worker.is_leaving = (worker.role, worker.address) not in wanted
        now = self.now()
        known = {(worker.role, worker.address) for worker in self._workers}
        for role, address in sorted(wanted - known):
            worker = Worker(role, address, self._config.link, self._config.recovery, now)
            try:
                self._links.begin(worker, self._intake.receive)
            except (ConfigError, OSError, ValueError) as error:
                # DNS or Redis may name an address that sockets or file systems reject.
                log.error("member_refused", role=role.value, address=address, reason=str(error))
                continue
            self._roster.add(worker)
            log.info("member_joined", role=role.value, address=address)
        self.flush()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the links until cancelled. Starts at once; `wait_ready` waits for workers."""
        try:
            async with trio.open_nursery() as nursery:
                self._links.nursery = nursery
                for worker in self._workers:
                    self._links.begin(worker, self._intake.receive)
                nursery.start_soon(self._beat)
                nursery.start_soon(self._sweep)
                nursery.start_soon(self._send_credit)
                nursery.start_soon(self._intake.run)
                nursery.start_soon(self._delivery.run)
                task_status.started()
        finally:
            for worker, connection in self._links.connections.items():
                # Frees their blocks at once, instead of when our leases expire.
                self._send(worker, goodbye("this server has shut down"))
                connection.close()
            self._links.connections.clear()

    async def wait_ready(self) -> None:
        """Wait until workers accept requests."""
        while not is_ready(self._workers, self._config.routing, trio.current_time()):
            await self._changed.park()

    async def drain(self, refusal: Callable[[], RequestError] = draining) -> None:
        """Refuse new requests and wait until none is running. Those still running after
        `drain_timeout_s` get their terminal event.

        Args:
          refusal: makes the error for requests that are refused or run too long.
        """
        self._requests.begin_drain(self.now(), refusal)
        self.flush()
        while self._requests.num_in_flight:
            await self._changed.park()

    async def audit(self, connections: int = 0) -> FleetAudit:
        """Ask every connected worker for its account; a silent worker is listed as such.

        Args:
          connections: number of client connections.

        Raises:
          RequestError: too many audits run at once.
        """
        self.now()
        self.flush()  # everything counted below has been sent before the question
        survey = self._auditor.begin()
        try:
            for worker in survey.asked:
                self._send(worker, Audit(survey.serial))
            self.flush()
            with trio.move_on_after(self._config.audit_timeout_s):
                while not survey.is_complete:
                    await self._changed.park()
        finally:
            self._auditor.close(survey)
        process = process_facts(trio.lowlevel.current_statistics().tasks_living)
        return self._auditor.result(survey, trio.current_time(), connections, process)

    def now(self) -> float:
        """Return the time. If the process was paused, the pause is handled first."""
        now = trio.current_time()
        self._requests.note_pause(now)
        return now

    def take(self, worker: Worker, frame: AnyFrame, now: float) -> None:
        """Apply a frame of any kind."""
        match frame:
            case Welcome():
                objection = check_welcome(frame, me=self._me, expected=worker.role)
                objection = objection or self._check_version(frame, adapters=self.adapters.marks)
                if objection is None:
                    worker.adapters = self.adapters.of_worker(frame.fingerprint)
                    self._requests.welcomed(worker, frame, now)
                    if unknown := sorted(frame.labels.keys() - LABEL_NAMES):
                        log.warning("worker_labels_unknown", worker=str(worker), labels=unknown)
                else:
                    before = worker.trouble
                    self._links.refuse(worker, objection)
                    is_again = worker.trouble == before
                    self._observer.worker_refused(str(worker), objection.reason, is_again=is_again)
            case Goodbye() if worker.is_connected:
                log.info("worker_said_goodbye", worker=str(worker), reason=frame.reason)
                if worker.is_draining:
                    # The worker waits for our acknowledgement.
                    self._send(worker, goodbye("heard"))
                self._links.lose(worker, FAREWELL if frame.is_farewell else "goodbye", now)
            case Goodbye():
                worker.trouble = f"refuses: {frame.reason}"
                self._observer.worker_refused(str(worker), frame.reason)
            case Audited():
                self._auditor.take(worker, frame, now)
            case _:
                self._requests.received(worker, frame, now)

    async def _beat(self) -> None:
        """Renew the leases of all wanted attempts."""
        while True:
            self.now()
            for worker in self._workers:
                # A failed heartbeat starts new attempts elsewhere: their RESERVE must precede the
                # heartbeat that names them, or their worker would not know them.
                self.flush()
                if worker.is_connected:
                    live = tuple(AttemptRow(*key) for key in worker.live_keys)
                    self._send(worker, ServerHeartbeat(self._me.epoch, live))
            for worker in [one for one in self._workers if one.is_leaving and not one.shares]:
                self._roster.remove(worker)
                self._requests.forget(worker, trio.current_time())
                self._auditor.forget(worker)
                self._links.end(worker)
                log.info("member_left", worker=str(worker))
            self.flush()
            await trio.sleep(self._config.link.heartbeat_interval_s)

    async def _sweep(self) -> None:
        while True:
            self._requests.sweep(self.now())
            if self._requests.outbox.has_credit:
                self._delivery.credit_due.set()
            with trio.CancelScope() as self._until_sweep:
                self.flush()
                await trio.sleep_forever()

    async def _send_credit(self) -> None:
        """Send credit once per turn of the loop, however many streams were read."""
        while True:
            await self._delivery.credit_due.wait()
            self._delivery.credit_due = trio.Event()
            # A link that broke while this process was paused shows in the first send.
            self.now()
            for worker, frame in self._requests.outbox.drain_credit():
                self._send(worker, frame)
            self.flush()

    def flush(self) -> None:
        """Send pending frames. A worker that cannot take its frame is lost, and what follows from
        that is sent too."""
        while frames := self._requests.outbox.drain_frames():
            for worker, frame in frames:
                self._send(worker, frame)
        sweep_at = self._requests.sweep_times.next_at(is_restless=self._requests.is_restless)
        if sweep_at != self._until_sweep.deadline:
            self._until_sweep.deadline = sweep_at
        if self._changed:
            self._changed.unpark_all()
        if self.witness is not None:
            self.witness.turn_over()

    def _send(self, worker: Worker, frame: AnyFrame) -> None:
        connection = self._links.connections.get(worker)
        try:
            if connection is not None and worker.is_connected:
                connection.send_nowait(frame)
        except PeerGone:
            self._links.lose(worker, "link_gone", trio.current_time())
        except PeerBusy:
            self._links.lose(worker, "link_full", trio.current_time())
