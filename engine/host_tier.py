"""KV of evicted blocks in host memory: a fixed number of slots, used again as keepers' shares say.

Knows names, bytes and their tenants; does not know what KV it is nor when a block leaves
the pool. The memory is reserved once and touched as it is filled, so its bound holds whatever
happens.
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
      max_bytes: bound on the bytes held; less than a block holds nothing.
      bytes_per_block: of the pool.
    """

    def __init__(self, max_bytes: int, bytes_per_block: int) -> None:
        self._bytes_per_block = bytes_per_block
        num_slots = max_bytes // bytes_per_block
        self._memory: npt.NDArray[np.uint8] = np.zeros((num_slots, bytes_per_block), dtype=np.uint8)
        self._free = list(range(num_slots))
        self._slots: dict[K, tuple[int, bytes]] = {}  # and the tenant
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
        """Copy a block in.

        Returns:
          Whose bytes are gone for it: of the keeper with most for its share the oldest; `name`
          itself where nothing fits at all.
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
        """Return a block's bytes and forget it.

        Raises:
          KeyError: there is no such block.
        """
        payload: bytes = self._memory[self._slots[name][0]].tobytes()
        self.drop(name)
        return payload

    def drop(self, name: K) -> None:
        """Forget a block. Idempotent."""
        if name in self._slots:
            slot, tenant = self._slots.pop(name)
            self._order.remove((name,), tenant)
            self._free.append(slot)
