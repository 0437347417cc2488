"""Keep the KV of evicted blocks in host memory: a fixed number of slots, shared fairly by tenants.

The address space is reserved once and pages are touched as slots fill, so memory stays bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from triolet.fair_lru import ANYBODY, FairLru

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy.typing as npt

    from triolet.fair_lru import Keeper

K = TypeVar("K", bound="Hashable")


class HostTier(Generic[K]):
    """Bytes of blocks by name.

    Args:
      max_bytes: most bytes held; with less than one block, nothing is kept.
      bytes_per_block: size of a block of the pool.
    """

    def __init__(self, max_bytes: int, bytes_per_block: int) -> None:
        self._bytes_per_block = bytes_per_block
        num_slots = max_bytes // bytes_per_block
        self._memory: npt.NDArray[np.uint8] = np.zeros((num_slots, bytes_per_block), dtype=np.uint8)
        self._free = list(range(num_slots))
        self._slots: dict[K, tuple[int, bytes]] = {}  # slot, tenant
        self._order: FairLru[K] = FairLru()  # by when they were filled

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: K) -> bool:
        return name in self._slots

    @property
    def max_blocks(self) -> int:
        """Blocks that fit."""
        return len(self._memory)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks held."""
        return len(self._slots) * self._bytes_per_block

    def put(self, name: K, payload: bytes | memoryview, keeper: Keeper = ANYBODY) -> K | None:
        """Store a block's bytes.

        Returns:
          Name of the block that was evicted for it, if any: the oldest block of the tenant furthest
          above its share. `name` itself if no block fits at all.
        """
        gone = None
        if not self._free:
            if not self._slots:
                return name
            gone = self._order.pop()
            self._free.append(self._slots.pop(gone)[0])
        slot = self._free.pop()
        self._memory[slot] = np.frombuffer(payload, dtype=np.uint8)
        self._slots[name] = (slot, keeper.tenant)
        self._order.add((name,), keeper)
        return gone

    def take(self, name: K) -> bytes:
        """Remove a block and return its bytes.

        Raises:
          KeyError: no block has this name.
        """
        payload: bytes = self._memory[self._slots[name][0]].tobytes()
        self.drop(name)
        return payload

    def drop(self, name: K) -> None:
        """Remove a block. Idempotent."""
        if name in self._slots:
            slot, tenant = self._slots.pop(name)
            self._order.remove((name,), tenant)
            self._free.append(slot)
