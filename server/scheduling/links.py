"""One link per worker, and the tasks that keep them: every frame goes to Requests, and what it
wants sent goes out.

No task here belongs to a request, so no client can hold one up or tear it down.
"""

from __future__ import annotations

import math
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

    Receive: TypeAlias = Callable[[Worker, Connection], Awaitable[None]]

log = structlog.get_logger(__name__)


class _Connections:
    """One connection for each worker, and the HELLO over it.

    Args:
      network: makes connections.
      me: the server, as its HELLO names it.
      link: bounds and deadlines.
      now: tells the time, as the first thing in every turn.
      on_lost: told of a worker that is given up, why, and when.
      flush: sends what follows from it.

    Attributes:
      connections: the present ones.
      nursery: for the tasks that keep them.
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
        """Make a connection in the place of the present one.

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
        """Leave a worker to others, with the reason: until it hears that, this server has a share
        of its credit."""
        worker.trouble = f"cannot be used: {objection.reason}"
        with suppress(PeerGone, PeerBusy):
            self.connections[worker].send_nowait(objection)

    def begin(self, worker: Worker, receive: Receive) -> None:
        """Connect to a worker, and keep the connection until `end`.

        Raises:
          ConfigError: the address cannot be used.
        """
        assert self.nursery is not None, "connections are kept while there is a nursery for them"
        self.dial(worker)
        scope = self._kept[worker] = trio.CancelScope()
        self.nursery.start_soon(self._keep, worker, receive, scope)

    def end(self, worker: Worker) -> None:
        """Tell a worker that it is not used any more, and drop its connection."""
        with suppress(PeerGone, PeerBusy):  # then its leases run out
            self.connections[worker].send_nowait(goodbye("this server uses this worker no more"))
        self._kept.pop(worker).cancel()

    async def _keep(self, worker: Worker, receive: Receive, scope: trio.CancelScope) -> None:
        """Greet a worker and listen to it, over a new connection whenever HELLO gets no answer: the
        old one may lead nowhere for good, as after a handshake that failed, though it lives."""
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
        # Here, where nothing waits for it any more.
        self._losses.pop(worker, None)
        self.connections.pop(worker).close()

    def lose(self, worker: Worker, cause: str, now: float) -> None:
        """Give a worker up. Unless it leaves in order, HELLO is said soon instead of at the next
        heartbeat; else once its end has broken the connection."""
        self._on_lost(worker, cause, now)
        if cause != FAREWELL:
            self._hurry(worker)

    def _hurry(self, worker: Worker) -> None:
        if (loss := self._losses.get(worker)) is not None:
            loss.set()

    async def _watch(self, worker: Worker) -> None:
        """Give a worker up as soon as its connection breaks: its process has died, or what it was
        sent is lost."""
        connection = self.connections[worker]
        while True:
            await connection.wait_broken()
            now = self._now()
            if worker.is_connected:
                self.lose(worker, "link_gone", now)
                self._flush()
            self._hurry(worker)

    async def _greet(self, worker: Worker, patience_s: float) -> bool:
        """Say HELLO whenever the worker is not there, until it answers. A worker that is away gets
        it as soon as it can be reached: `send` waits for that.

        Returns:
          When it has not for `patience_s` since HELLO was sent, or since a handshake failed:
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
                    with suppress(PeerGone):  # cut off: it answers with what is no frame
                        await connection.send(make_hello(self._me))
                if unsent.cancelled_caught:
                    continue
                asked_since = min(asked_since, now)
            loss = self._losses[worker] = trio.Event()
            with trio.move_on_after(self._link.heartbeat_interval_s):
                await loss.wait()
                asked_since = math.inf  # that HELLO is lost, and this connection may be made again
                # The pipe of a connection that has just broken still takes what it will not send.
                await trio.sleep(self._link.local_reconnect_s)


class Links:
    """Submits requests to workers and gives their tokens back.

    Args:
      config: addresses, bounds and deadlines.
      text: the model's text.
      network: makes the links.
      observer: told of what happens.
      name: of this server, as workers see it.
      draw_epoch: where its epoch comes from; a simulator brings its own.
      events: publishes the lives of requests; None where nothing subscribes.
      kv_secret: from which the keys of attempts' KV are made; a simulator brings its own.
      takes_unversioned: whether workers that name no version of the model are used although it has
        one; not where several models are served, of which one could be meant for another.

    Attributes:
      admission: refuses before anything is spent on a request.
      adapters: that requests may name, and that workers may have.
      events: as given.
      version: digest of the model, or its directory where that is in no store.
      hold_s: tells for how long a line of a batch is held for others at most.
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
        self._workers = [
            Worker(role, address, config.link, config.recovery, now)
            for role, of_role in addresses.items()
            for address in of_role
        ]
        self._observer = observer or Observer()
        self.events = events or RequestEvents()
        self._requests = Requests(
            config, self._workers, text, self._observer, now, self.events, kv_secret
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

    def set_version(self, config: ServerConfig) -> None:
        """Have another version of the model, which the same workers compute.

        Args:
          config: of the server, for that version.
        """
        self._requests.table.model_digest = config.model_digest
        self.version = config.model_digest or config.model_dir

    def submit(self, *requests: GenerationRequest) -> OutputStream:
        """Begin the choices of one answer, all of them or none.

        Raises:
          RequestError: one was refused; nothing was begun.
        """
        self.adapters.require_named(requests, self._config.model_name)
        taken = self._requests.submit(requests, self.now())
        self.flush()
        outputs = [RequestOutput(request, self._delivery) for request in taken]
        return OutputStream(outputs, self._delivery)

    def embed(self, requests: Sequence[GenerationRequest]) -> EmbeddingRun:
        """Begin to make vectors of inputs. The first slice begins now, the others while the run is
        waited for.

        Raises:
          RequestError: one was refused; nothing was begun.
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
        """Most tokens of prompt and completion together."""
        return self._requests.max_model_len

    def status(self) -> FleetStatus:
        """Look at the fleet."""
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
        )

    def cancel_tenants(self, tenants: Set[str]) -> None:
        """End all requests of tenants that were disabled or removed."""
        self._requests.cancel_tenants(tenants, self.now())
        self.flush()

    def set_members(self, members: Iterable[tuple[Role, str]]) -> None:
        """Use these workers from now on, by role and address, while `run` runs. Those that are not
        among them get nothing new, and are left once they have no attempt."""
        wanted = set(members)
        for worker in self._workers:
            worker.is_leaving = (worker.role, worker.address) not in wanted
        now = self.now()
        known = {(worker.role, worker.address) for worker in self._workers}
        for role, address in sorted(wanted - known):
            worker = Worker(role, address, self._config.link, self._config.recovery, now)
            try:
                self._links.begin(worker, self._intake.receive)
            except ConfigError as error:
                log.error("member_refused", role=role.value, address=address, reason=str(error))
                continue
            self._workers.append(worker)
            log.info("member_joined", role=role.value, address=address)
        self.flush()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the links until cancelled. Started at once; `wait_ready` waits for workers."""
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
                # Their blocks are free at once, instead of when our leases run out.
                self._send(worker, goodbye("this server has shut down"))
                connection.close()
            self._links.connections.clear()

    async def wait_ready(self) -> None:
        """Wait until workers take requests."""
        while not is_ready(self._workers, self._config.routing, trio.current_time()):
            await self._changed.park()

    async def drain(self, refusal: Callable[[], RequestError] = draining) -> None:
        """Refuse new requests from now on, and wait until none runs. Those that run may finish
        until `drain_timeout_s`, then each gets its terminal event.

        Args:
          refusal: makes the error of what is refused, and of what runs longer.
        """
        self._requests.begin_drain(self.now(), refusal)
        self.flush()
        while self._requests.num_in_flight:
            await self._changed.park()

    async def audit(self, connections: int = 0) -> FleetAudit:
        """Ask every worker that is there for its account; a silent one is listed as such.

        Args:
          connections: of clients, which the fleet does not know.

        Raises:
          RequestError: too many audits at once.
        """
        self.now()
        self.flush()  # what is counted from here on has been sent before the question
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
        """Return the time; where this process stood still, what that means was done before."""
        now = trio.current_time()
        self._requests.note_pause(now)
        return now

    def take(self, worker: Worker, frame: AnyFrame, now: float) -> None:
        """Act upon a frame of any kind."""
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
                    self._links.refuse(worker, objection)
                    self._observer.worker_refused(str(worker), objection.reason)
            case Goodbye() if worker.is_connected:
                log.info("worker_said_goodbye", worker=str(worker), reason=frame.reason)
                if worker.is_draining:
                    # It waits for us to have heard it.
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
        """Renew the leases of everything that is still wanted."""
        while True:
            self.now()
            for worker in self._workers:
                # A heartbeat that fails begins new attempts elsewhere: their RESERVE must go before
                # the heartbeat that names them, or they would be unknown over there.
                self.flush()
                if worker.is_connected:
                    live = tuple(AttemptRow(*key) for key in worker.live_keys)
                    self._send(worker, ServerHeartbeat(self._me.epoch, live))
            for worker in [one for one in self._workers if one.is_leaving and not one.shares]:
                self._workers.remove(worker)
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
        """Send credit once per turn of the loop, whatever the number of streams that were read."""
        while True:
            await self._delivery.credit_due.wait()
            self._delivery.credit_due = trio.Event()
            # A link that broke while this server stood still is noticed by the first send.
            self.now()
            for worker, frame in self._requests.outbox.drain_credit():
                self._send(worker, frame)
            self.flush()

    def flush(self) -> None:
        """Send what Requests wants sent. A worker that cannot take it is lost, and what
        follows from that is sent too."""
        while frames := self._requests.outbox.drain_frames():
            for worker, frame in frames:
                self._send(worker, frame)
        sweep_at = self._requests.sweep_times.next_at(is_restless=self._requests.is_restless)
        if sweep_at != self._until_sweep.deadline:
            self._until_sweep.deadline = sweep_at
        if self._changed:
            self._changed.unpark_all()

    def _send(self, worker: Worker, frame: AnyFrame) -> None:
        connection = self._links.connections.get(worker)
        try:
            if connection is not None and worker.is_connected:
                connection.send_nowait(frame)
        except PeerGone:
            self._links.lose(worker, "link_gone", trio.current_time())
        except PeerBusy:
            self._links.lose(worker, "link_full", trio.current_time())
