"""Leases of KV blocks: every block is free, leased or cached, and exactly one of these.

Knows block numbers, owners and reference counts; knows no bytes, no tensors, no tokens and no time.
Block 0 is scratch: padding may point at it, so it is never handed out and not counted.

A lease belongs to one owner, which alone may write its own blocks. Blocks that are finished may be
shared by several leases (reference count > 1). What is *kept* outlives its leases as a cached
block, which still holds KV that may be shared again; cached blocks are taken back when free
ones run out, of the keeper that has most for its share, the least recently used first. Which KV is
in a kept block is prefix_cache.py's business.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final, Protocol

from triolet.errors import CapacityError, LeaseError
from triolet.fair_lru import ANYBODY, FairLru

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from triolet.fair_lru import Keeper

SCRATCH_BLOCK: Final = 0


class Poison(Protocol):
    """Marks freed blocks, so that it shows if anybody writes into them all the same."""

    def poison(self, block_ids: Sequence[int]) -> None:
        """Mark blocks that have no owner any more."""
        ...

    def count_spoiled(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks do not bear the mark any more."""
        ...


class BlockLedger:
    """The one place where blocks change hands. Synchronous, so that freeing needs no await.

    Args:
      num_blocks: blocks of the pool, the scratch block included.
      poison: marks free blocks, from the beginning; None to leave in them what was there.

    Attributes:
      total_blocks: blocks that can be leased at all.
      kept: blocks, leased or cached, that hold finished KV, with their tenants; changed through
        `keep` only.
      cached: of these, those that no lease names; changed here only.
      on_evict: told of each cached block that is about to hold something else.
    """

    def __init__(self, num_blocks: int, poison: Poison | None = None) -> None:
        if num_blocks < 2:
            raise CapacityError(f"a pool of {num_blocks} blocks has none beside the scratch block")
        self.total_blocks = num_blocks - 1
        self.kept: dict[int, Keeper] = {}
        self.on_evict: Callable[[int], None] | None = None
        # First in, first out: a freed block is reused as late as possible, so that a stray read of
        # it shows as poison in tests instead of plausible KV.
        self._free: deque[int] = deque(range(1, num_blocks))
        self._leases: dict[Hashable, list[int]] = {}
        self._references: Counter[int] = Counter()
        self.cached: FairLru[int] = FairLru()
        self._poison = poison
        if poison is not None:
            poison.poison(tuple(self._free))

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def leased_blocks(self) -> int:
        """Blocks that at least one lease names."""
        return len(self._references)

    @property
    def cached_blocks(self) -> int:
        """Blocks that no lease names but whose KV is kept for a later one."""
        return len(self.cached)

    @property
    def available_blocks(self) -> int:
        """What the next lease can get: free blocks and cached ones that it may push out."""
        return len(self._free) + len(self.cached)

    @property
    def num_leases(self) -> int:
        """Owners that hold a lease, also one of no blocks."""
        return len(self._leases)

    @property
    def num_references(self) -> int:
        """Blocks of all leases, a shared one counted once for each lease that names it."""
        return self._references.total()

    @property
    def num_spoiled(self) -> int | None:
        """Free blocks that were written since they were freed; None where they are not marked."""
        return None if self._poison is None else self._poison.count_spoiled(tuple(self._free))

    def lease(self, owner: Hashable, num_blocks: int, shared: Sequence[int] = ()) -> list[int]:
        """Open a lease.

        Args:
          owner: of the new lease; holds none yet.
          num_blocks: new blocks wanted, 0 or more.
          shared: leased or cached blocks whose KV the owner reads and does not write.

        Returns:
          The shared blocks in the order given, then the new ones.

        Raises:
          CapacityError: fewer blocks are available; nothing has changed.
          LeaseError: the owner has a lease already, or a shared block is neither leased nor cached.
        """
        self.check_lease(owner, num_blocks, shared)
        revived = [block for block in shared if block not in self._references]
        if revived:
            self.cached.remove(revived, self.kept[revived[0]].tenant)
        self._references.update(shared)
        self._leases[owner] = [*shared, *self._take(num_blocks)]
        return list(self._leases[owner])

    def check_lease(self, owner: Hashable, num_blocks: int, shared: Sequence[int] = ()) -> None:
        """Raise what `lease` with the same arguments would raise. Changes nothing."""
        if owner in self._leases:
            raise LeaseError(f"{owner} has a lease already")
        for block in shared:
            if block not in self._references and block not in self.kept:
                raise LeaseError(f"block {block} is free: there is nothing in it to share")
        revived = {block for block in shared if block not in self._references}
        _require(num_blocks, self.available_blocks - len(revived))

    def extend(self, owner: Hashable, num_blocks: int, shared: Sequence[int] = ()) -> list[int]:
        """Add blocks to a lease.

        Args:
          owner: of the lease.
          num_blocks: new ones, at its end.
          shared: finished blocks of other leases, which the owner reads and does not write; they
            come before all that it has.

        Returns:
          The new ones.

        Raises:
          CapacityError: fewer blocks are available; nothing has changed.
          LeaseError: the owner has no lease, or a shared block is not leased.
        """
        blocks = self._lease_of(owner)
        _require(num_blocks, self.available_blocks)
        for block in shared:
            if block not in self._references:
                raise LeaseError(f"block {block} is not leased: nothing vouches for what is in it")
        self._references.update(shared)
        added = self._take(num_blocks)
        blocks[:0] = shared
        blocks.extend(added)
        return added

    def keep(self, block: int, keeper: Keeper = ANYBODY) -> None:
        """Note that a leased block holds finished KV: it is cached once no lease names it.

        Args:
          block: which.
          keeper: the tenant; one lease names kept blocks of one tenant only.

        Raises:
          LeaseError: it is not leased.
        """
        if block not in self._references:
            raise LeaseError(f"block {block} is not leased: nothing vouches for what is in it")
        self.kept[block] = keeper

    def release(self, owner: Hashable) -> int:
        """End a lease. Idempotent: an owner without one releases nothing.

        Returns:
          How many blocks no lease names any more.
        """
        unnamed = []
        for block in self._leases.pop(owner, ()):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                unnamed.append(block)
        freed = [block for block in unnamed if block not in self.kept]
        # The end of a sequence is pushed out before its beginning, without which it is of no use.
        cached = [block for block in reversed(unnamed) if block in self.kept]
        if cached:
            self.cached.add(cached, self.kept[cached[0]])
        self._free += freed
        if freed and self._poison is not None:
            self._poison.poison(freed)
        return len(unnamed)

    def num_only_of(self, owners: Iterable[Hashable]) -> int:
        """Return how many blocks no other lease names: what ending these leases makes available."""
        named = Counter(block for owner in owners for block in self._leases.get(owner, ()))
        return sum(self._references[block] == count for block, count in named.items())

    def num_leases_of(self, block: int) -> int:
        """Return how many leases name the block."""
        return self._references[block]

    def blocks_of(self, owner: Hashable) -> tuple[int, ...]:
        """Return a lease's blocks in sequence order.

        Raises:
          LeaseError: the owner has no lease.
        """
        return tuple(self._lease_of(owner))

    def has_lease(self, owner: Hashable) -> bool:
        """Return whether the owner holds a lease."""
        return owner in self._leases

    def check_invariants(self) -> None:
        """Assert that each block is in one state and each count is the number of its leases."""
        free, cached, leased = set(self._free), set(self.cached), set(self._references)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(leased) == self.total_blocks, (
            "a block has no or two states"
        )
        assert free | cached | leased == set(range(1, self.total_blocks + 1)), "a block is lost"
        named = Counter(block for blocks in self._leases.values() for block in blocks)
        assert named == self._references, "a reference count is not the number of leases"
        self.cached.check_invariants()
        for tenant in {self.kept[block].tenant for block in cached}:
            for block in self.cached.names_of(tenant):
                assert self.kept[block].tenant == tenant, "a block is cached for another tenant"
        assert cached <= self.kept.keys(), "a block is cached that was never kept"
        assert self.kept.keys() <= cached | leased, "a block is kept although it is free"

    def _lease_of(self, owner: Hashable) -> list[int]:
        try:
            return self._leases[owner]
        except KeyError:
            raise LeaseError(f"{owner} has no lease") from None

    def _take(self, num_blocks: int) -> list[int]:
        taken = [self._free.popleft() for _ in range(min(num_blocks, len(self._free)))]
        for _ in range(num_blocks - len(taken)):
            block = self.cached.pop()
            del self.kept[block]
            if self.on_evict is not None:
                self.on_evict(block)
            taken.append(block)
        self._references.update(taken)
        return taken


def _require(num_blocks: int, available: int) -> None:
    if num_blocks > available:
        raise CapacityError(f"{num_blocks} blocks wanted, {available} available")
