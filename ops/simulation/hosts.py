"""Which simulated hosts the workers live on, and memory that processes of one host see.

The twin of transport/shared_ring.py without a kernel: its numbers come from the seed alone, so that
a run's frames do. Knows hosts and rings; knows no processes.
"""

from __future__ import annotations

import random
from itertools import count
from typing import Final

from transport.frames import SharedRing
from transport.shared_ring import TOKEN_BYTES, NotSharedError

NUM_HOSTS: Final = 2
"""About every second pair of workers shares memory; bytes travel between the others."""


class SimulatedRing:
    """A ring, and how whoever found it sees it. See shared_ring.Ring and shared_ring.FoundRing."""

    def __init__(self, host: Host, number: int, num_bytes: int) -> None:
        self._bytes = bytearray(num_bytes)
        self._host = host
        self.offer: SharedRing | None = SharedRing(
            host.number, number, num_bytes, number.to_bytes(TOKEN_BYTES)
        )
        self.memory = memoryview(self._bytes)

    def close(self) -> None:
        """End with its owner's life: nobody finds it any more, readers keep it."""
        self._host.forget(self)


class SeenRing:
    """A ring as another process has it mapped. See shared_ring.FoundRing."""

    def __init__(self, ring: SimulatedRing, host: Host) -> None:
        self._ring = ring
        self._host = host

    @property
    def memory(self) -> memoryview:
        """The ring, for reading."""
        return self._ring.memory.toreadonly()

    @property
    def is_orphaned(self) -> bool:
        """Whether its owner is dead."""
        return not self._host.has(self._ring)

    def close(self) -> None:
        """Let go of it."""


class Host:
    """One host: the rings that its processes offer.

    Args:
      number: its own, from 1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._numbers = count()
        self._rings: dict[SharedRing, SimulatedRing] = {}

    def make_ring(self, num_bytes: int) -> SimulatedRing:
        """Return memory that others here may read."""
        ring = SimulatedRing(self, next(self._numbers), num_bytes)
        assert ring.offer is not None
        self._rings[ring.offer] = ring
        return ring

    def find(self, offer: SharedRing) -> SeenRing:
        """Return what an offer names, if that is on this host.

        Raises:
          NotSharedError: it is not.
        """
        ring = self._rings.get(offer)
        if ring is None:
            raise NotSharedError(f"no such ring on host {self.number}")
        return SeenRing(ring, self)

    def has(self, ring: SimulatedRing) -> bool:
        """Return whether a ring's owner still lives."""
        return ring.offer in self._rings

    def forget(self, ring: SimulatedRing) -> None:
        """Take away the ring of somebody who has died. Idempotent."""
        if ring.offer is not None:
            self._rings.pop(ring.offer, None)


def draw_hosts(seed: int, names: list[str]) -> dict[str, Host]:
    """Return where each worker lives; drawn apart, so that all else stays as it was."""
    rng = random.Random(f"hosts {seed}")
    hosts = [Host(1 + number) for number in range(NUM_HOSTS)]
    return {name: rng.choice(hosts) for name in names}
