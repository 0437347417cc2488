"""Weighted fair LRU: an eviction policy for a cache that several keepers (tenants) share.

The keeper with the most relative to its share loses its least recently used item first. Unused
capacity may be borrowed and is returned on demand: a keeper below its part (its share over the sum
of the shares of all keepers with items) loses nothing to others. With one keeper it is plain LRU.
This file has names, weights and shares, but not the items themselves.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

K = TypeVar("K", bound="Hashable")

MIN_STALE: Final = 64
"""Outdated heap entries that do not justify rebuilding the heap."""


class Keeper(NamedTuple):
    """The owner of kept items.

    Attributes:
      tenant: its name, or a digest of it; empty where there are no tenants.
      share: share of the capacity, above 0 and up to 1.
    """

    tenant: bytes = b""
    share: float = 1.0


ANYBODY: Final = Keeper()


@dataclass(slots=True, eq=False)
class _Held(Generic[K]):
    """The items of one keeper.

    Attributes:
      share: share of the capacity.
      weights: by name, least recently used first.
      weight: sum of the weights.
      listed: its load in the heap, never below its load; None if it is not in the heap.
    """

    share: float
    weights: dict[K, int] = field(default_factory=dict)
    weight: int = 0
    listed: float | None = None

    @property
    def load(self) -> float:
        """Weight held relative to the share."""
        return self.weight / self.share


class FairLru(Generic[K]):
    """Names of kept items in order of eviction. Each name has one keeper."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Held[K]] = {}
        # Largest load first. An entry that differs from its keeper's `listed` is outdated.
        self._heap: list[tuple[float, bytes]] = []
        self._grown: set[bytes] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        return (name for held in self._held.values() for name in held.weights)

    @property
    def num_tenants(self) -> int:
        """Number of keepers that hold something."""
        return len(self._held)

    def names_of(self, tenant: bytes) -> list[K]:
        """Return a tenant's names, least recently used first."""
        held = self._held.get(tenant)
        return [] if held is None else list(held.weights)

    def held_by(self, tenant: bytes) -> int:
        """Return the total weight of a tenant's items."""
        held = self._held.get(tenant)
        return 0 if held is None else held.weight

    def add(self, names: Iterable[K], keeper: Keeper, weight: int = 1) -> None:
        """Add names as the most recently used ones, in this order.

        Args:
          names: names that are not present yet.
          keeper: their owner; its share applies from now on.
          weight: weight of each name, above 0.
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
        """Remove names of one tenant. All must be present."""
        held = self._held[tenant]
        weights = held.weights
        num_before = len(weights)
        held.weight -= sum(map(weights.pop, names))
        self._count -= num_before - len(weights)
        if not weights:
            del self._held[tenant]

    def touch(self, name: K, tenant: bytes) -> None:
        """Mark a name as the most recently used one of its keeper."""
        weights = self._held[tenant].weights
        weights[name] = weights.pop(name)

    def pop(self) -> K:
        """Remove and return the name to evict next.

        Raises:
          KeyError: nothing is kept.
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
        """Assert that every sum equals the sum of its parts."""
        assert self._count == sum(len(held.weights) for held in self._held.values()), "lost count"
        for held in self._held.values():
            assert held.weights, "a keeper without items is remembered"
            assert held.weight == sum(held.weights.values()), "a keeper's weight is wrong"

    def _heaviest(self) -> bytes:
        """Return the keeper to evict from, among several that hold something."""
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
        """Update the heap for keepers with a grown load."""
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
