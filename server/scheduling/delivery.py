"""Delivers the tokens in workers' frames to clients' streams, taking turns between tenants. Also
defines the objects from which requests read completions and embeddings.

A small frame is handled in one turn of one task, from the worker's message to the clients' sockets.
When several tenants have streams, a larger frame is split: some rows are taken and delivered tenant
by tenant before the next ones. However many streams one tenant has, another tenant's token waits
for one of these turns, not for a whole frame.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import trio
from trio.lowlevel import ParkingLot

from transport.frames import Tokens

from ..contract.generation import Failed
from ..contract.output_stream import StreamDelivery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from transport.frames import AnyFrame, TokenRow
    from transport.link import Connection

    from ..contract.generation import CancelReason, Event, GenerationRequest, OutputReader
    from ..contract.output_stream import OutputStream
    from .request import Request
    from .requests import Requests
    from .workers import Worker


STREAMS_PER_CHECKPOINT: Final = 128
"""Streams delivered to before other tasks may run: two or three milliseconds."""


ROWS_PER_TURN: Final = 32
"""Tokens taken per turn when several tenants have streams: half a millisecond with the writes they
cause. With 16 the turns themselves cost more than the tokens."""


INPUTS_AT_ONCE: Final = 32
"""Inputs started, finished or cancelled before other tasks may run: a few milliseconds. One request
may have thousands; handled together they would delay heartbeats until workers gave this server
up."""


class FleetLinks(Protocol):
    """What this module needs of `Links` (server/scheduling/links.py)."""

    def take(self, worker: Worker, frame: AnyFrame, now: float) -> None:
        """Apply a frame of any kind."""
        ...

    def flush(self) -> None:
        """Send the frames that are due."""
        ...


class RequestOutput:
    """A Generation (server/contract/generation.py): the reading end of one request.

    Args:
      running: the request to read.
      delivery: receives what was read, and cancels.
    """

    def __init__(self, running: Request, delivery: Delivery) -> None:
        self.running = running
        self._mailbox = running.output
        self._delivery = delivery

    @property
    def request(self) -> GenerationRequest:
        """What the client asked for."""
        return self.running.spec

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute it."""
        return self.running.is_begun

    @property
    def has_events(self) -> bool:
        """Whether events wait to be read."""
        return self._mailbox.waiting_since is not None

    def attach(self, reader: OutputReader, index: int) -> None:
        """Notify `reader` when events arrive in an empty mailbox."""
        self._mailbox.attach(reader, index)

    def take_now(self) -> Sequence[Event]:
        """Return the waiting events, up to a size limit."""
        events = self._mailbox.take_one() or self._mailbox.take(trio.current_time())
        self._delivery.taken(self.running)
        return events

    def cancel(self, reason: CancelReason) -> None:
        """End the request now. Idempotent."""
        if self.running.terminal is None:
            self._delivery.cancel((self.running,), reason)


class RowQueue:
    """Token rows that wait for their turn, by tenant. A tenant's rows keep their order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[Worker, TokenRow]]] = {}  # in the order of turns
        self._num_of_worker: dict[Worker, int] = {}

    def add(self, tenant: str, worker: Worker, rows: Sequence[TokenRow]) -> None:
        """Append rows to their tenant's queue."""
        self._waiting.setdefault(tenant, deque()).extend((worker, row) for row in rows)
        self._num_of_worker[worker] = self._num_of_worker.get(worker, 0) + len(rows)

    def has(self, worker: Worker) -> bool:
        """Return whether a row of a worker waits."""
        return worker in self._num_of_worker

    def next_turn(self) -> dict[Worker, list[TokenRow]]:
        """Remove and return the rows of one turn, one per tenant in rotation.

        A turn ends as soon as a tenant runs out of rows, so that they are delivered at once.
        """
        turn: dict[Worker, list[TokenRow]] = {}
        for _ in range(ROWS_PER_TURN):
            if not self._waiting:
                break
            tenant = next(iter(self._waiting))
            of_tenant = self._waiting.pop(tenant)
            worker, row = of_tenant.popleft()
            if of_tenant:
                self._waiting[tenant] = of_tenant
            self._num_of_worker[worker] -= 1
            if not self._num_of_worker[worker]:
                del self._num_of_worker[worker]
            turn.setdefault(worker, []).append(row)
            if not of_tenant:
                break
        return turn


class Intake:
    """Takes the frames of all workers, each worker's in order.

    Args:
      requests: receives tokens; counts tenants and finds the tenant of a row.
      delivery: delivers the resulting events.
      links: handles all other frames and sends the replies.
    """

    def __init__(
        self,
        requests: Requests,
        delivery: Delivery,
        links: FleetLinks,
    ) -> None:
        self._requests = requests
        self._queue = requests.queues[0]
        self._table = requests.table
        self._delivery = delivery
        self._links = links
        self._rows = RowQueue()
        self._has_rows = trio.Event()
        self._turn_over = ParkingLot()

    async def receive(self, worker: Worker, connection: Connection) -> None:
        """Take a worker's frames until cancelled."""
        while True:
            frames = deque(message.frame for message in await connection.receive_many())
            while frames:
                if small := self._without_turns(frames):
                    self._take_now([(worker, frame) for frame in small])
                else:
                    large = frames.popleft()
                    assert isinstance(large, Tokens), "nothing else is large"
                    await self._take_by_turns(worker, large.rows)
                if frames:
                    await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Run turns until cancelled."""
        while True:
            await self._has_rows.wait()
            self._has_rows = trio.Event()
            while self._give_turn():
                await trio.lowlevel.checkpoint()

    def _without_turns(self, frames: deque[AnyFrame]) -> list[AnyFrame]:
        """Remove and return the next frames, at most one turn's, up to a frame with rows that need
        turns."""
        small: list[AnyFrame] = []
        while frames and len(small) < INPUTS_AT_ONCE:
            frame = frames[0]
            is_large = isinstance(frame, Tokens) and len(frame.rows) > ROWS_PER_TURN
            if is_large and self._queue.num_tenants > 1:
                break
            small.append(frames.popleft())
        return small

    async def _take_by_turns(self, worker: Worker, rows: Sequence[TokenRow]) -> None:
        table = self._table
        by_tenant: dict[str, list[TokenRow]] = {}
        for row in rows:
            by_tenant.setdefault(table.tenant_of(row), []).append(row)
        # Tenants with few rows are delivered to before the rows of the others are put in order.
        large: dict[str, list[TokenRow]] = {}
        for tenant, own in by_tenant.items():
            if len(own) > ROWS_PER_TURN:
                large[tenant] = own
            else:
                self._rows.add(tenant, worker, own)
        self._give_turn()
        for tenant, own in large.items():
            # Put choices of one request side by side, so that one write carries their tokens.
            own.sort(key=table.origin_of)
            self._rows.add(tenant, worker, own)
        self._has_rows.set()
        while self._rows.has(worker):
            await self._turn_over.park()

    def _give_turn(self) -> bool:
        """Run one turn; return whether there were rows."""
        turn = self._rows.next_turn()
        if turn:
            self._take_now([(worker, Tokens(0, tuple(rows))) for worker, rows in turn.items()])
            self._turn_over.unpark_all()
        return bool(turn)

    def _take_now(self, frames: Iterable[tuple[Worker, AnyFrame]]) -> None:
        now, requests = trio.current_time(), self._requests
        has_more = requests.note_pause(now)
        self._delivery.collect()
        try:
            for worker, frame in frames:
                if isinstance(frame, Tokens):
                    has_more |= requests.received(worker, frame, now)
                else:
                    self._links.take(worker, frame, now)
                    has_more = True
            if has_more:
                self._links.flush()
        finally:
            self._delivery.deliver_collected()


class Delivery(StreamDelivery):
    """Streams with events for their readers. Tenants take turns; within a tenant, the stream that
    has waited longest is first. A stream is listed at most once. What readers take becomes token
    credit for workers.

    Args:
      requests: the streams' requests.
      links: sends the frames that a cancel produces.

    Attributes:
      credit_due: set when credit must be sent.
    """

    def __init__(self, requests: Requests, links: FleetLinks) -> None:
        self.credit_due = trio.Event()
        self._requests = requests
        self._links = links
        self._due: dict[str, deque[OutputStream]] = {}  # by tenant; the next turn is the first's
        self._has_due = trio.Event()
        self._is_collecting = False

    def add(self, stream: OutputStream) -> None:
        """Add a stream that has events for its reader."""
        of_tenant = self._due.get(stream.tenant)
        if of_tenant is None:
            of_tenant = self._due[stream.tenant] = deque()
        of_tenant.append(stream)
        if not self._is_collecting:
            self._has_due.set()

    def taken(self, request: Request) -> None:
        """Record that a reader has taken tokens of a request."""
        if self._requests.taken(request):
            self.credit_due.set()

    def cancel(self, requests: Sequence[Request], reason: CancelReason) -> None:
        """End requests now. Idempotent."""
        now = trio.current_time()
        self._requests.note_pause(now)
        self._requests.cancel(requests, reason, now)
        self._links.flush()

    def collect(self) -> None:
        """Hold events from now on for `deliver_collected`."""
        self._is_collecting = True

    def deliver_collected(self) -> None:
        """Deliver what has come since `collect` without a task switch. What exceeds one turn
        follows as usual."""
        self._is_collecting = False
        if self._due and not self._has_due.is_set():
            self._deliver()

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            await self._has_due.wait()
            self._has_due = trio.Event()
            self._deliver()

    def _deliver(self) -> None:
        now = trio.current_time()
        # Events that readers cause during delivery wait for their turn.
        num_left = min(sum(map(len, self._due.values())), STREAMS_PER_CHECKPOINT)
        while num_left > 0:
            tenant, of_tenant = next(iter(self._due.items()))
            # One stream per tenant, or all in one go for a single tenant.
            count = num_left if len(self._due) == 1 else 1
            for _ in range(count):
                of_tenant.popleft().deliver(now)
            num_left -= count
            del self._due[tenant]
            if of_tenant:
                self._due[tenant] = of_tenant
        if self._due:
            self._has_due.set()


class EmbeddingRun:
    """All inputs of one embedding request (`Links.embed`).

    Dropping it does not cancel the inputs; they end at their deadlines.

    Args:
      asked: the admitted inputs.
      begin: starts a slice of inputs, given the index of its first; may refuse it.
      delivery: cancels inputs.

    Attributes:
      inputs: the inputs started so far, in order.
    """

    def __init__(
        self,
        asked: Sequence[GenerationRequest],
        begin: Callable[[Sequence[GenerationRequest], int], Sequence[Request]],
        delivery: Delivery,
    ) -> None:
        self._asked = asked
        self._begin = begin
        self.inputs: list[Request] = []
        self._delivery = delivery
        self._changed = trio.Event()
        self._begin_more()

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute one of them."""
        return any(one.is_begun for one in self.inputs)

    async def vectors(self) -> Sequence[bytes]:
        """Wait for all vectors.

        Raises:
          RequestError: an input was refused or failed.
        """
        while True:
            await trio.lowlevel.checkpoint()
            self._changed = trio.Event()
            ends = [one.terminal for one in self.inputs]
            for end in ends:
                if isinstance(end, Failed):
                    raise end.error
            if len(self.inputs) < len(self._asked):
                self._begin_more()
            elif all(ends):
                return [one.vector for one in self.inputs]
            else:
                await self._changed.wait()

    def note_filled(self, index: int) -> None:
        """Record that an input has ended."""
        del index
        self._changed.set()

    def cancel(self, reason: CancelReason) -> None:
        """End unfinished inputs. Idempotent."""
        live = [one for one in self.inputs if one.terminal is None]
        self._delivery.cancel(live[:INPUTS_AT_ONCE], reason)
        if len(live) > INPUTS_AT_ONCE:
            # A system task, because the client's request is over.
            trio.lowlevel.spawn_system_task(self._cancel_more, reason)

    async def _cancel_more(self, reason: CancelReason) -> None:
        await trio.lowlevel.checkpoint()
        self.cancel(reason)

    def _begin_more(self) -> None:
        first = len(self.inputs)
        self.inputs += self._begin(self._asked[first : first + INPUTS_AT_ONCE], first)
        for one in self.inputs[first:]:
            one.output.attach(self, 0)
