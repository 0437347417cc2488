"""Takes the frames of workers and delivers their tokens to streams, both by turns of tenants; the
reading ends of completions and vectors.

One turn of one task does all of a small frame, from the worker's message to the clients' sockets.
Where several tenants have streams, the rows of a larger frame are taken some at a time, tenant by
tenant, and are delivered before the next ones: however many streams one tenant has, another one's
token waits for one such turn, and not for a frame.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import trio
from trio.lowlevel import ParkingLot

from transport.frames import Tokens

from ..contract.generation import Failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from transport.frames import AnyFrame, TokenRow
    from transport.link import Connection

    from ..contract.generation import CancelReason, Event, GenerationRequest
    from ..contract.output_stream import OutputStream
    from .queue import FairQueue
    from .request import Request, RequestTable
    from .workers import Worker


STREAMS_PER_CHECKPOINT: Final = 128
"""Streams that are delivered to before other tasks may run: two or three milliseconds."""


ROWS_PER_TURN: Final = 32
"""Tokens that are taken before others may run, where several tenants have streams: half a
millisecond with the writes that follow. With 16 the turns themselves cost more than the tokens."""


FRAMES_PER_TURN: Final = 16
"""Frames that are taken before others may run. One may end a request and begin another one, which
takes a millisecond: answers to thousands of inputs come in hundreds at once."""


class RequestOutput:
    """A Generation (server/contract/generation.py): the reading end of one request.

    Args:
      running: what it reads.
      on_taken: called when events were taken.
      on_cancel: called when it shall end.
    """

    def __init__(
        self,
        running: Request,
        on_taken: Callable[[Request], None],
        on_cancel: Callable[[Sequence[Request], CancelReason], None],
    ) -> None:
        self.running = running
        self._mailbox = running.output
        self._on_taken = on_taken
        self._on_cancel = on_cancel

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

    def bind(self, on_filled: Callable[[], None]) -> None:
        """Have this called when events are here where there were none."""
        self._mailbox.bind(on_filled)

    def take_now(self) -> Sequence[Event]:
        """Return all events that are here, or as many as are light enough."""
        events = self._mailbox.take_one() or self._mailbox.take(trio.current_time())
        self._on_taken(self.running)
        return events

    def cancel(self, reason: CancelReason) -> None:
        """End it now. Idempotent."""
        self._on_cancel((self.running,), reason)


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
      clock: tells the time, as the first thing in every turn.
      queue: says how many tenants have requests.
      table: says the tenant of a row.
      delivery: delivers what frames bring.
      take: acts upon one frame.
      flush: sends what follows.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        queue: FairQueue[Request],
        table: RequestTable,
        delivery: Delivery,
        take: Callable[[Worker, AnyFrame, float], None],
        flush: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._queue = queue
        self._table = table
        self._delivery = delivery
        self._take = take
        self._flush = flush
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
        """Take out the first few frames, up to one with rows that need turns."""
        small: list[AnyFrame] = []
        while frames and len(small) < FRAMES_PER_TURN:
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
        now = self._clock()
        self._delivery.collect()
        try:
            for worker, frame in frames:
                self._take(worker, frame, now)
            self._flush()
        finally:
            self._delivery.deliver_collected()


class Delivery:
    """Streams that have events for their readers, of each tenant the longest due first. Each is
    here at most once."""

    def __init__(self) -> None:
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
      inputs: that were accepted.
      on_cancel: called when inputs shall end.
    """

    def __init__(
        self,
        inputs: Sequence[Request],
        on_cancel: Callable[[Sequence[Request], CancelReason], None],
    ) -> None:
        self._inputs = inputs
        self._on_cancel = on_cancel
        self._changed = trio.Event()
        for one in inputs:
            one.output.bind(self._note)

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute one of them."""
        return any(one.is_begun for one in self._inputs)

    async def vectors(self) -> Sequence[bytes]:
        """Wait for all vectors.

        Raises:
          RequestError: one of the inputs failed.
        """
        while True:
            await trio.lowlevel.checkpoint()
            self._changed = trio.Event()
            ends = [one.terminal for one in self._inputs]
            for end in ends:
                if isinstance(end, Failed):
                    raise end.error
            if all(ends):
                return [one.vector for one in self._inputs]
            await self._changed.wait()

    def cancel(self, reason: CancelReason) -> None:
        """End what is not done. Idempotent."""
        self._on_cancel([one for one in self._inputs if one.terminal is None], reason)

    def _note(self) -> None:
        self._changed.set()
