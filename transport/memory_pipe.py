"""In-memory pipes for message parts with simulated faults, used by memory_network.py.

Delay, loss, duplication, reordering and corruption are drawn per pipe from the seed, so links do
not influence one another. There are no tasks: a message stays in its pipe until it is due and the
receiver reads it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import trio
from trio.lowlevel import ParkingLot

if TYPE_CHECKING:
    from collections.abc import Sequence

LinkName: TypeAlias = tuple[str, bytes]
"""Address of the bound side and identity of the connecting side."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What a network does to frames. Each share is a probability per frame.

    Attributes:
      min_delay_s: shortest delay.
      max_delay_s: longest delay, except for reordered frames. Delay alone never reorders.
      loss: share that never arrives.
      duplication: share that arrives twice, the second time out of order.
      reorder: share that is overtaken by others.
      reorder_s: longest extra delay of an overtaken or duplicated frame.
      corruption: share of payloads that arrive with one byte changed.
    """

    min_delay_s: float = 0.0
    max_delay_s: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.1
    corruption: float = 0.0


@dataclass(slots=True)
class FaultCounts:
    """Counts of faults that happened, so that a test can prove that its fault occurred."""

    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    corrupted: int = 0
    cut: int = 0
    outlived: int = 0


class Alarm(Protocol):
    """Where the receivers of one inbox wait for the next message."""

    async def wait(self, due: float) -> None:
        """Wait until `due` (in the future), or until something is expected sooner."""
        ...

    def expect(self, due: float) -> None:
        """End all waits at `due` at the latest."""
        ...

    def ring(self) -> None:
        """End all waits now."""
        ...


class ScopeAlarm:
    """An alarm that works with any clock. See Alarm."""

    def __init__(self) -> None:
        self._waiting: list[trio.CancelScope] = []

    async def wait(self, due: float) -> None:
        """Wait until `due`, or until something is expected sooner."""
        with trio.CancelScope(deadline=due) as scope:
            self._waiting.append(scope)
            try:
                await trio.sleep_forever()
            finally:
                self._waiting.remove(scope)

    def expect(self, due: float) -> None:
        """End all waits at `due` at the latest."""
        for scope in self._waiting:
            scope.deadline = min(scope.deadline, due)

    def ring(self) -> None:
        """End all waits now."""
        for scope in self._waiting:
            scope.cancel()


class Conditions:
    """State shared by all pipes of one network.

    Attributes:
      seed: decides every fault.
      faults: what happens to frames from now on; replaceable at any time.
      counts: faults that happened.
      cut: links that drop all frames, in both directions.
      outlives_links: deliver frames under way when a link breaks to the next link of that name. No
        real link does this; a receiver that checks epochs tolerates it all the same.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed = seed
        self.faults = faults
        self.counts = FaultCounts()
        self.cut: set[LinkName] = set()
        self.outlives_links = False
        self._order = 0

    def next_order(self) -> int:
        """Return a rising number that orders frames due at the same time."""
        self._order += 1
        return self._order

    def is_cut(self, link: LinkName, direction: str) -> bool:
        """Return whether a frame sent now is dropped; `direction` is "up" (from the connecting
        side) or "down". A simulator overrides this with its own partitions."""
        del direction
        return link in self.cut

    def make_alarm(self) -> Alarm:
        """Return the alarm for the receivers of one link; a simulator with its own clock overrides
        this."""
        return ScopeAlarm()

    def on_put(self, link: LinkName, direction: str, parts: Sequence[bytes | memoryview]) -> None:
        """Called with every message before any fault; a simulator overrides this to keep a
        trace."""


class Parcel(NamedTuple):
    """A message under way. Sorts by arrival time."""

    due: float
    order: int
    parts: tuple[bytes, ...]


class Pipe:
    """One direction of one link: messages on their way, in order of arrival.

    Attributes:
      room: event for senders that wait while the pipe is full.
    """

    def __init__(
        self, conditions: Conditions, link: LinkName, direction: str, capacity: int, inbox: Inbox
    ) -> None:
        self.room = ParkingLot()
        self._conditions = conditions
        self._link = link
        self._direction = direction
        self._random = random.Random(f"{conditions.seed} {link[0]} {link[1].hex()} {direction}")
        self._capacity = capacity
        self._inbox = inbox
        self._parcels: list[Parcel] = []
        self._latest_due = 0.0

    @property
    def is_full(self) -> bool:
        return len(self._parcels) >= self._capacity

    def peek(self) -> Parcel | None:
        """Return the next message to arrive."""
        return self._parcels[0] if self._parcels else None

    def inherit(self, older: Pipe) -> None:
        """Take over the messages under way in an older pipe."""
        now = trio.current_time()
        self._parcels = [parcel for parcel in older._parcels if parcel.due > now]
        self._conditions.counts.outlived += len(self._parcels)
        if self._parcels:
            self._inbox.expect(self._parcels[0].due)

    def pop(self) -> None:
        """Remove what `peek` returned."""
        del self._parcels[0]
        if self.room:
            self.room.unpark_all()

    def put(self, parts: Sequence[bytes | memoryview]) -> None:
        """Take a message in and draw its faults."""
        faults, counts = self._conditions.faults, self._conditions.counts
        self._conditions.on_put(self._link, self._direction, parts)
        # Draw every fault for every frame, so that enabling one fault does not shift the others.
        draw = self._random.random
        loss, late, copy, flip, delay, extra = draw(), draw(), draw(), draw(), draw(), draw()
        if self._conditions.is_cut(self._link, self._direction):
            counts.cut += 1
            return
        if loss < faults.loss:
            counts.lost += 1
            return
        if len(parts) > 1 and len(parts[1]) and flip < faults.corruption:
            counts.corrupted += 1
            parts = [parts[0], _flipped(parts[1], extra)]
        due = trio.current_time() + faults.min_delay_s
        due += delay * (faults.max_delay_s - faults.min_delay_s)
        if late < faults.reorder:
            counts.reordered += 1
            self._insert(due + extra * faults.reorder_s, parts)
        else:
            self._latest_due = max(self._latest_due, due)
            self._insert(self._latest_due, parts)
        if copy < faults.duplication:
            counts.duplicated += 1
            self._insert(due + extra * faults.reorder_s, parts)
        self._inbox.expect(self._parcels[0].due)

    def _insert(self, due: float, parts: Sequence[bytes | memoryview]) -> None:
        # Copy the parts: a message under way must not change with the sender's memory.
        parcel = Parcel(due, self._conditions.next_order(), tuple(map(bytes, parts)))
        index = len(self._parcels)
        while index > 0 and self._parcels[index - 1].due > due:
            index -= 1
        self._parcels.insert(index, parcel)


class Inbox:
    """Where the pipes of one link end.

    Args:
      alarm: alarm that receivers wait for.

    Attributes:
      pipes: pipes by sender name.
      is_closed: nothing more is taken out.
      expect: makes receivers look again when something arrives.
      wake: makes receivers look again now, because the link was closed.
    """

    def __init__(self, alarm: Alarm) -> None:
        self.pipes: dict[bytes, Pipe] = {}
        self.is_closed = False
        self.expect = alarm.expect
        self.wake = alarm.ring
        self._alarm = alarm

    def require_open(self) -> None:
        """Raise ClosedResourceError if the link was closed."""
        if self.is_closed:
            raise trio.ClosedResourceError("this link was closed")

    async def take(self, max_messages: int) -> list[tuple[bytes, Parcel]]:
        """Wait until a message is due, then return all due ones. If cancelled, nothing was
        taken."""
        await trio.lowlevel.checkpoint_if_cancelled()
        taken = self._take_due(max_messages)
        if taken:
            await trio.lowlevel.cancel_shielded_checkpoint()
        while not taken:
            parcel, _ = self._next()
            await self._alarm.wait(math.inf if parcel is None else parcel.due)
            taken = self._take_due(max_messages)
        return taken

    def _next(self) -> tuple[Parcel | None, bytes]:
        """Return the next message over all pipes, so that no sender starves another."""
        earliest, from_whom = None, b""
        for sender, pipe in self.pipes.items():
            parcel = pipe.peek()
            if parcel is not None and (earliest is None or parcel < earliest):
                earliest, from_whom = parcel, sender
        return earliest, from_whom

    def _take_due(self, max_messages: int) -> list[tuple[bytes, Parcel]]:
        self.require_open()
        now = trio.current_time()
        taken: list[tuple[bytes, Parcel]] = []
        while len(taken) < max_messages:
            parcel, sender = self._next()
            if parcel is None or parcel.due > now:
                break
            self.pipes[sender].pop()
            taken.append((sender, parcel))
        return taken


def _flipped(payload: bytes | memoryview, where: float) -> bytes:
    """Return the payload with one byte changed; `where` is in [0, 1)."""
    broken = bytearray(payload)
    broken[int(where * len(broken))] ^= 0xFF
    return bytes(broken)
