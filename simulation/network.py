"""The simulated network, which loses and delays frames, and hosts with shared memory.

Hosts replace transport/shared_ring.py without a kernel. The host of a worker comes from the seed.
"""

from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from transport.codec import decode
from transport.frames import SharedRing
from transport.memory_network import MemoryNetwork
from transport.memory_pipe import Conditions
from transport.shared_ring import TOKEN_BYTES, NotSharedError

from .clock import ClockAlarm
from .faults import CALM, Fault
from .trace import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from transport.memory_pipe import LinkName

    from .faults import Loss
    from .trace import Trace


NUM_HOSTS: Final = 2
"""About half of the worker pairs share memory; the others send bytes."""


class SimulatedRing:
    """A ring in its owner's process. See shared_ring.OwnRing."""

    def __init__(self, host: Host, number: int, num_bytes: int) -> None:
        self._bytes = bytearray(num_bytes)
        self._host = host
        self.offer: SharedRing | None = SharedRing(
            host.number, number, num_bytes, number.to_bytes(TOKEN_BYTES)
        )
        self.memory = memoryview(self._bytes)

    def close(self) -> None:
        """Remove the ring, as its owner's exit does. Readers keep it mapped."""
        self._host.forget(self)


class SeenRing:
    """A ring that another process has mapped. See shared_ring.FoundRing."""

    def __init__(self, ring: SimulatedRing, host: Host) -> None:
        self._ring = ring
        self._host = host

    @property
    def memory(self) -> memoryview:
        """The ring, for reading."""
        return self._ring.memory.toreadonly()

    @property
    def is_orphaned(self) -> bool:
        """Return whether its owner is dead."""
        return not self._host.has(self._ring)

    def close(self) -> None:
        """Unmap it."""


class Host:
    """A host with the rings of its processes.

    Args:
      number: number of the host, from 1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._numbers = count()
        self._rings: dict[SharedRing, SimulatedRing] = {}

    def make_ring(self, num_bytes: int) -> SimulatedRing:
        """Return a ring that other processes on this host can read."""
        ring = SimulatedRing(self, next(self._numbers), num_bytes)
        assert ring.offer is not None
        self._rings[ring.offer] = ring
        return ring

    def find(self, offer: SharedRing) -> SeenRing:
        """Return the offered ring.

        Raises:
          NotSharedError: it is not on this host.
        """
        ring = self._rings.get(offer)
        if ring is None:
            raise NotSharedError(f"no such ring on host {self.number}")
        return SeenRing(ring, self)

    def has(self, ring: SimulatedRing) -> bool:
        """Return whether a ring's owner is live."""
        return ring.offer in self._rings

    def forget(self, ring: SimulatedRing) -> None:
        """Remove the ring of a dead process. Idempotent."""
        if ring.offer is not None:
            self._rings.pop(ring.offer, None)


def draw_hosts(seed: int, names: list[str]) -> dict[str, Host]:
    """Draw the host of each worker, with a separate generator so that other draws do not change."""
    rng = random.Random(f"hosts {seed}")
    hosts = [Host(1 + number) for number in range(NUM_HOSTS)]
    return {name: rng.choice(hosts) for name in names}


PREFIX = "memory:"
KV = "/kv"


def control_address(name: str) -> str:
    """Return a worker's address for servers."""
    return f"{PREFIX}{name}"


def kv_address(name: str) -> str:
    """Return a decode worker's address for prefill workers."""
    return f"{PREFIX}{name}{KV}"


class _Route(NamedTuple):
    """One direction of a link: sender, receiver, and its name in the trace."""

    ends: tuple[str, str]
    text: str


class Weather(Conditions):
    """See transport.memory_pipe.Conditions.

    Args:
      seed: random seed of the faults.
      trace: records messages.

    Attributes:
      partitions: (sender, receiver) pairs that cannot communicate.
      num_delayed: frames sent into a slow network.
      num_cut_one_way: frames lost while the opposite direction was open.
      num_lost_alone: frames lost in a healthy network.
    """

    def __init__(self, seed: int, trace: Trace) -> None:
        super().__init__(seed, CALM)
        self.partitions: set[tuple[str, str]] = set()
        self.num_delayed = 0
        self.num_cut_one_way = 0
        self.num_lost_alone = 0
        self._loss: Loss | None = None
        self._num_spared = 0
        self._is_lost = False
        self._lost = trio.Event()
        self._trace = trace
        self._routes: dict[tuple[LinkName, str], _Route] = {}

    async def lose(self, loss: Loss) -> None:
        """Lose one frame; return once it is lost."""
        self._loss = loss
        await self._lost.wait()

    def is_cut(self, link: LinkName, direction: str) -> bool:
        """Return whether a partition separates sender and receiver, or this frame is the one to
        lose."""
        if self._is_lost:
            self._is_lost = False
            self.num_lost_alone += 1
            self._lost.set()
            return True
        if not self.partitions:
            return False
        ends = self._route(link, direction).ends
        if ends not in self.partitions:
            return False
        if ends[::-1] not in self.partitions:
            self.num_cut_one_way += 1
        return True

    def make_alarm(self) -> ClockAlarm:
        """Return an alarm on the virtual clock."""
        return ClockAlarm()

    def on_put(self, link: LinkName, direction: str, parts: Sequence[bytes | memoryview]) -> None:
        """Record a message."""
        route = self._route(link, direction)
        if self.faults.max_delay_s > CALM.max_delay_s:
            self.num_delayed += 1
        fate = "CUT " if route.ends in self.partitions else ""
        if self._loss is not None and isinstance(
            decode(parts[0], MAX_FRAME_BYTES), self._loss.kind
        ):
            self._num_spared += 1
            if self._num_spared > self._loss.num_spared:
                self._loss, self._is_lost, fate = None, True, "LOST "
        self._trace.sent(route.text, parts, fate)

    def count(self, happened: Counter[Fault]) -> None:
        """Add the network's faults to the counts."""
        counts = self.counts
        happened[Fault.LOSS] += counts.lost + self.num_lost_alone
        happened[Fault.DUPLICATION] += counts.duplicated
        happened[Fault.REORDER] += counts.reordered
        happened[Fault.CORRUPTION] += counts.corrupted
        happened[Fault.AFTERLIFE] += counts.outlived
        happened[Fault.DELAY] += self.num_delayed
        happened[Fault.ONE_WAY] += self.num_cut_one_way
        happened[Fault.PARTITION] += counts.cut - self.num_cut_one_way - self.num_lost_alone

    def _route(self, link: LinkName, direction: str) -> _Route:
        route = self._routes.get((link, direction))
        if route is None:
            bound = link[0].removeprefix(PREFIX).removesuffix(KV)
            connecting = link[1].split(b":")[1].decode()
            sender, receiver = (connecting, bound) if direction == "up" else (bound, connecting)
            route = _Route((sender, receiver), f"{sender} > {receiver}")
            self._routes[link, direction] = route
        return route


def make_network(seed: int, trace: Trace) -> tuple[MemoryNetwork, Weather]:
    """Return a network and its conditions."""
    network = MemoryNetwork(seed)
    weather = Weather(seed, trace)
    network.conditions = weather
    return network, weather
