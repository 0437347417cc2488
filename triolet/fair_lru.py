"""Which of the things that are kept has to go next, where several keepers share the room.

Knows names, weights and shares; does not know what is kept, nor when room runs out. Whoever holds
most for its share gives way first, and of what it holds the least recently used. So room that
nobody else wants may be borrowed, and comes back as soon as somebody does: who holds less than its
part, which is its share over the sum of the shares of all that hold something, loses nothing to the
others. With one keeper it is plain LRU.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

K = TypeVar("K", bound="Hashable")

MIN_STALE: Final = 64
"""Outdated entries of the heap that are not worth building it anew."""


class Keeper(NamedTuple):
    """For whom something is kept.

    Attributes:
      tenant: its name, or a digest of it; empty where there are no tenants.
      share: of the room, above 0 and up to 1.
    """

    tenant: bytes = b""
    share: float = 1.0


ANYBODY: Final = Keeper()


@dataclass(slots=True, eq=False)
class _Held(Generic[K]):
    """What one keeper has.

    Attributes:
      share: of the room.
      weights: by name, the least recently used first.
      weight: of all of them.
      listed: its load in the heap; never below its load. None if it is not there.
    """

    share: float
    weights: dict[K, int] = field(default_factory=dict)
    weight: int = 0
    listed: float | None = None

    @property
    def load(self) -> float:
        """What it holds for its share."""
        return self.weight / self.share


class FairLru(Generic[K]):
    """Names of what is kept, ordered for whoever needs room. Each name has one keeper."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Held[K]] = {}
        # The greatest load first. An entry that is not what its keeper has listed is outdated.
        self._heap: list[tuple[float, bytes]] = []
        self._grown: set[bytes] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        return (name for held in self._held.values() for name in held.weights)

    @property
    def num_tenants(self) -> int:
        """Keepers that hold something."""
        return len(self._held)

    def names_of(self, tenant: bytes) -> list[K]:
        """Return what a tenant holds, the least recently used first."""
        held = self._held.get(tenant)
        return [] if held is None else list(held.weights)

    def held_by(self, tenant: bytes) -> int:
        """Return the weight of what a tenant holds."""
        held = self._held.get(tenant)
        return 0 if held is None else held.weight

    def add(self, names: Iterable[K], keeper: Keeper, weight: int = 1) -> None:
        """Add names as the most recently used ones, in this order.

        Args:
          names: none of them is here.
          keeper: whose they are; its share counts from now on.
          weight: of each of them, above 0.
        """
        held = self._held.get(keeper.tenant)
        if held is None:
            held = self._held[keeper.tenant] = _Held(keeper.share)
        num_before = len(held.weights)
        held.weights.update(dict.fromkeys(names, weight))
        num_added = len(held.weights) - num_before
        held.share = keeper.share
        held.weight += num_added * weight
        self._count += num_added
        self._grown.add(keeper.tenant)
        if not held.weights:
            del self._held[keeper.tenant]

    def remove(self, names: Iterable[K], tenant: bytes) -> None:
        """Take names of one tenant out, all of which are here."""
        held = self._held[tenant]
        weights = held.weights
        num_before = len(weights)
        held.weight -= sum(map(weights.pop, names))
        self._count -= num_before - len(weights)
        if not weights:
            del self._held[tenant]

    def touch(self, name: K, tenant: bytes) -> None:
        """Make a name that is here the most recently used one of its keeper."""
        weights = self._held[tenant].weights
        weights[name] = weights.pop(name)

    def pop(self) -> K:
        """Take out what has to go next.

        Raises:
          KeyError: nothing is here.
        """
        if not self._held:
            raise KeyError("nothing is kept")
        tenant = next(iter(self._held)) if len(self._held) == 1 else self._heaviest()
        held = self._held[tenant]
        weights = held.weights
        name = next(iter(weights))
        held.weight -= weights.pop(name)
        self._count -= 1
        if not weights:
            del self._held[tenant]
        return name

    def check_invariants(self) -> None:
        """Assert that every sum is that of its parts."""
        assert self._count == sum(len(held.weights) for held in self._held.values()), "lost count"
        for held in self._held.values():
            assert held.weights, "a keeper of nothing is remembered"
            assert held.weight == sum(held.weights.values()), "a keeper's weight is wrong"

    def _heaviest(self) -> bytes:
        """Return whose turn it is among several, each of which holds something."""
        self._list_grown()
        while True:
            negative, tenant = self._heap[0]
            held = self._held.get(tenant)
            if held is None or held.listed != -negative:
                heapq.heappop(self._heap)
            elif held.load < held.listed:
                held.listed = held.load
                heapq.heapreplace(self._heap, (-held.load, tenant))
            else:
                return tenant

    def _list_grown(self) -> None:
        """Note the loads of those that hold more than the heap knows."""
        for tenant in self._grown:
            held = self._held.get(tenant)
            if held is not None and (held.listed is None or held.load > held.listed):
                held.listed = held.load
                heapq.heappush(self._heap, (-held.load, tenant))
        self._grown.clear()
        if len(self._heap) > 2 * len(self._held) + MIN_STALE:
            self._heap = [
                (-held.listed, tenant)
                for tenant, held in self._held.items()
                if held.listed is not None
            ]
            heapq.heapify(self._heap)
