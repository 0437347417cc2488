"""Takes the frames of workers and delivers their tokens to streams, both by turns of tenants; the
reading ends of completions and vectors.

One turn of one task does all of a small frame, from the worker's message to the clients' sockets.
Where several tenants have streams, the rows of a larger frame are taken some at a time, tenant by
tenant, and are delivered before the next ones: however many streams one tenant has, another one's
token waits for one such turn, and not for a frame.
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
"""Streams that are delivered to before other tasks may run: two or three milliseconds."""


ROWS_PER_TURN: Final = 32
"""Tokens that are taken before others may run, where several tenants have streams: half a
millisecond with the writes that follow. With 16 the turns themselves cost more than the tokens."""


INPUTS_AT_ONCE: Final = 32
"""Inputs that begin, are done or are cancelled before others may run: a few milliseconds. Thousands
at once, as one request may have, would be a silence for which workers give this server up."""


class FleetLinks(Protocol):
    """What the links do for what is here (server/scheduling/links.py)."""

    def take(self, worker: Worker, frame: AnyFrame, now: float) -> None:
        """Act upon a frame of any kind."""
        ...

    def flush(self) -> None:
        """Send what follows."""
        ...


class RequestOutput:
    """A Generation (server/contract/generation.py): the reading end of one request.

    Args:
      running: what it reads.
      delivery: is told what was taken, and of the wish to end it.
    """

    def __init__(self, running: Request, delivery: Delivery) -> None:
        self.running = running
        self._mailbox = running.output
        self._delivery = delivery

    @property
    def request(self) -> GenerationRequest:
        """What was asked for."""
        return self.running.spec

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute it."""
        return self.running.is_begun

    @property
    def has_events(self) -> bool:
        """Whether events are here."""
        return self._mailbox.waiting_since is not None

    def attach(self, reader: OutputReader, index: int) -> None:
        """Tell a reader when events are here where there were none."""
        self._mailbox.attach(reader, index)

    def take_now(self) -> Sequence[Event]:
        """Return all events that are here, or as many as are light enough."""
        events = self._mailbox.take_one() or self._mailbox.take(trio.current_time())
        self._delivery.taken(self.running)
        return events

    def cancel(self, reason: CancelReason) -> None:
        """End it now. Idempotent."""
        if self.running.terminal is None:
            self._delivery.cancel((self.running,), reason)


class RowQueue:
    """Rows that wait for their turn, by tenant. What a tenant has here goes in its order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[Worker, TokenRow]]] = {}  # in the order of turns
        self._num_of_worker: dict[Worker, int] = {}

    def add(self, tenant: str, worker: Worker, rows: Sequence[TokenRow]) -> None:
        """Put rows behind the others of their tenant."""
        self._waiting.setdefault(tenant, deque()).extend((worker, row) for row in rows)
        self._num_of_worker[worker] = self._num_of_worker.get(worker, 0) + len(rows)

    def has(self, worker: Worker) -> bool:
        """Whether a row of a worker waits."""
        return worker in self._num_of_worker

    def next_turn(self) -> dict[Worker, list[TokenRow]]:
        """Take out the rows of one turn, of each tenant one after the other.

        A turn ends as soon as a tenant has no more rows: they are delivered at once.
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
    """Takes the frames of all workers, each worker's in their order.

    Args:
      requests: take tokens, and say how many tenants have requests and the tenant of a row.
      delivery: delivers what frames bring.
      links: act upon all other frames, and send what follows.
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
        """Give turns until cancelled."""
        while True:
            await self._has_rows.wait()
            self._has_rows = trio.Event()
            while self._give_turn():
                await trio.lowlevel.checkpoint()

    def _without_turns(self, frames: deque[AnyFrame]) -> list[AnyFrame]:
        """Take out the first frames of one turn, up to one with rows that need turns."""
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
            # Choices of one request side by side, so that one write carries what they have.
            own.sort(key=table.origin_of)
            self._rows.add(tenant, worker, own)
        self._has_rows.set()
        while self._rows.has(worker):
            await self._turn_over.park()

    def _give_turn(self) -> bool:
        """Take the rows of one turn; return whether there were any."""
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
    """Streams that have events for their readers, of each tenant the longest due first. Each is
    here at most once. What readers take is credit for workers.

    Args:
      requests: of the streams.
      links: send what follows from a cancel.

    Attributes:
      credit_due: set when there is credit to be sent.
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
        """Note that a reader has taken tokens of a request."""
        if self._requests.taken(request):
            self.credit_due.set()

    def cancel(self, requests: Sequence[Request], reason: CancelReason) -> None:
        """End requests now. Idempotent."""
        now = trio.current_time()
        self._requests.note_pause(now)
        self._requests.cancel(requests, reason, now)
        self._links.flush()

    def collect(self) -> None:
        """Leave what comes from now on to `deliver_collected`."""
        self._is_collecting = True

    def deliver_collected(self) -> None:
        """Deliver what has come since `collect`, without a turn of another task; beyond what one
        turn may deliver, the rest follows as usual."""
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
        # What readers bring about meanwhile waits for its turn.
        num_left = min(sum(map(len, self._due.values())), STREAMS_PER_CHECKPOINT)
        while num_left > 0:
            tenant, of_tenant = next(iter(self._due.items()))
            # One of each tenant; all in one go where there is only one.
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
    """All inputs of one client's request (`Links.embed`).

    It owns nothing: dropping it leaves the inputs to their deadlines.

    Args:
      asked: what is to be computed, and is admitted.
      begin: begins some of them, of which the first has this place; may refuse them.
      delivery: ends inputs.

    Attributes:
      inputs: that will have an end: the first of those that were asked for.
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
          RequestError: one of the inputs was refused, or failed.
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
        """Note that an input has its end."""
        del index
        self._changed.set()

    def cancel(self, reason: CancelReason) -> None:
        """End what is not done. Idempotent."""
        live = [one for one in self.inputs if one.terminal is None]
        self._delivery.cancel(live[:INPUTS_AT_ONCE], reason)
        if len(live) > INPUTS_AT_ONCE:
            # Not a task of the client's request, which is over.
            trio.lowlevel.spawn_system_task(self._cancel_more, reason)

    async def _cancel_more(self, reason: CancelReason) -> None:
        await trio.lowlevel.checkpoint()
        self.cancel(reason)

    def _begin_more(self) -> None:
        first = len(self.inputs)
        self.inputs += self._begin(self._asked[first : first + INPUTS_AT_ONCE], first)
        for one in self.inputs[first:]:
            one.output.attach(self, 0)
