"""Allocate KV blocks: leases, reference counts and eviction. A block is free, leased or cached.

Block 0 is scratch space for padding: it is never leased and not counted.

A lease belongs to one owner, the only writer of its new blocks. Finished blocks may be shared by
several leases (reference count > 1). A *kept* block outlives its leases as a cached block, and
later leases can share its KV. When free blocks run out, cached blocks are evicted: first from the
tenant furthest above its share, least recently used first. prefix_cache.py records which KV a kept
block holds.
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
    """Marks freed blocks, so that a later write to them can be detected."""

    def poison(self, block_ids: Sequence[int]) -> None:
        """Mark blocks that no lease owns."""
        ...

    def count_spoiled(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks have lost the mark."""
        ...


class BlockLedger:
    """The block allocator. Synchronous, so that freeing needs no await.

    Args:
      num_blocks: blocks of the pool, including the scratch block.
      poison: marks free blocks; None to leave them unmarked.

    Attributes:
      total_blocks: blocks that can be leased.
      kept: leased or cached blocks that hold finished KV, with their tenants; changed through
        `keep` only.
      cached: kept blocks that no lease names; changed here only.
      on_evict: called with each cached block before it is reused.
    """

    def __init__(self, num_blocks: int, poison: Poison | None = None) -> None:
        if num_blocks < 2:
            raise CapacityError(f"a pool of {num_blocks} blocks has only the scratch block")
        self.total_blocks = num_blocks - 1
        self.kept: dict[int, Keeper] = {}
        self.on_evict: Callable[[int], None] | None = None
        # First in, first out: a freed block is reused as late as possible, so that in tests a
        # stray read finds poison instead of plausible KV.
        self._free: deque[int] = deque(range(1, num_blocks))
        self._leases: dict[Hashable, list[int]] = {}
        self._references: Counter[int] = Counter()
        self.cached: FairLru[int] = FairLru()
        self._poison = poison
        if poison is not None:
            poison.poison(tuple(self._free))

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither leased nor cached."""
        return len(self._free)

    @property
    def leased_blocks(self) -> int:
        """Blocks named by at least one lease."""
        return len(self._references)

    @property
    def cached_blocks(self) -> int:
        """Blocks without a lease, with KV that is kept for reuse."""
        return len(self.cached)

    @property
    def available_blocks(self) -> int:
        """Blocks that the next lease can get: free ones, and cached ones that it may evict."""
        return len(self._free) + len(self.cached)

    @property
    def num_leases(self) -> int:
        """Number of leases, including leases of no blocks."""
        return len(self._leases)

    @property
    def num_references(self) -> int:
        """Blocks of all leases; a shared block counts once per lease."""
        return self._references.total()

    @property
    def num_spoiled(self) -> int | None:
        """Free blocks written to since they were freed; None without marking."""
        return None if self._poison is None else self._poison.count_spoiled(tuple(self._free))

    def lease(self, owner: Hashable, num_blocks: int, shared: Sequence[int] = ()) -> list[int]:
        """Open a lease.

        Args:
          owner: owner of the new lease, without a lease so far.
          num_blocks: number of new blocks, 0 or more.
          shared: leased or cached blocks that the owner only reads.

        Returns:
          The shared blocks in the order given, then the new ones.

        Raises:
          CapacityError: fewer blocks are available; nothing has changed.
          LeaseError: the owner already has a lease, or a shared block is free.
        """
        self.check_lease(owner, num_blocks, shared)
        revived = [block for block in shared if block not in self._references]
        if revived:
            self.cached.remove(revived, self.kept[revived[0]].tenant)
        self._references.update(shared)
        self._leases[owner] = [*shared, *self._take(num_blocks)]
        return list(self._leases[owner])

    def check_lease(self, owner: Hashable, num_blocks: int, shared: Sequence[int] = ()) -> None:
        """Raise what `lease` would raise for these arguments, without changing anything."""
        if owner in self._leases:
            raise LeaseError(f"{owner} already has a lease")
        for block in shared:
            if block not in self._references and block not in self.kept:
                raise LeaseError(f"block {block} is free and cannot be shared")
        revived = {block for block in shared if block not in self._references}
        _require(num_blocks, self.available_blocks - len(revived))

    def extend(self, owner: Hashable, num_blocks: int, shared: Sequence[int] = ()) -> list[int]:
        """Add blocks to a lease.

        Args:
          owner: owner of the lease.
          num_blocks: number of new blocks, appended to the lease.
          shared: finished blocks of other leases that the owner only reads; put before the lease's
            own blocks.

        Returns:
          The new blocks.

        Raises:
          CapacityError: fewer blocks are available; nothing has changed.
          LeaseError: the owner has no lease, or a shared block is not leased.
        """
        blocks = self._lease_of(owner)
        _require(num_blocks, self.available_blocks)
        for block in shared:
            if block not in self._references:
                raise LeaseError(f"block {block} is not leased, so its content is not valid KV")
        self._references.update(shared)
        added = self._take(num_blocks)
        blocks[:0] = shared
        blocks.extend(added)
        return added

    def keep(self, block: int, keeper: Keeper = ANYBODY) -> None:
        """Record that a leased block holds finished KV: it is cached once no lease names it.

        Args:
          block: the block.
          keeper: the tenant; a lease names kept blocks of one tenant only.

        Raises:
          LeaseError: the block is not leased.
        """
        if block not in self._references:
            raise LeaseError(f"block {block} is not leased, so its content is not valid KV")
        self.kept[block] = keeper

    def release(self, owner: Hashable) -> int:
        """End a lease. Idempotent.

        Returns:
          Number of blocks that no lease names now.
        """
        unnamed = []
        for block in self._leases.pop(owner, ()):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                unnamed.append(block)
        freed = [block for block in unnamed if block not in self.kept]
        # Evict the end of a sequence before its beginning, without which the end is useless.
        cached = [block for block in reversed(unnamed) if block in self.kept]
        if cached:
            self.cached.add(cached, self.kept[cached[0]])
        self._free += freed
        if freed and self._poison is not None:
            self._poison.poison(freed)
        return len(unnamed)

    def num_only_of(self, owners: Iterable[Hashable]) -> int:
        """Return how many blocks would become available if these leases ended."""
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
        assert len(free) == len(self._free), "a block is listed as free twice"
        assert len(free) + len(cached) + len(leased) == self.total_blocks, (
            "a block has no state or two states"
        )
        assert free | cached | leased == set(range(1, self.total_blocks + 1)), "a block is lost"
        named = Counter(block for blocks in self._leases.values() for block in blocks)
        assert named == self._references, "a reference count is not the number of leases"
        self.cached.check_invariants()
        for tenant in {self.kept[block].tenant for block in cached}:
            for block in self.cached.names_of(tenant):
                assert self.kept[block].tenant == tenant, "a block is cached for the wrong tenant"
        assert cached <= self.kept.keys(), "a block is cached that was never kept"
        assert self.kept.keys() <= cached | leased, "a kept block is free"

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
        raise CapacityError(f"{num_blocks} blocks requested, {available} available")
