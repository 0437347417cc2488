"""The ring buffer of a prefill worker: host memory for exported KV until its receiver has it.

It is allocated once and reused, because page faults of new memory take longer than the copy itself.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transport.link import Hold


class RingSlot:
    """A piece of the ring with the bytes of one chunk.

    Attributes:
      memory: the bytes; the owner of the slot fills them once, then they do not change.
      offset: its start in the ring; None if it lies outside, because it is larger than the ring.
    """

    def __init__(self, memory: memoryview, offset: int | None) -> None:
        self.memory = memory
        self.offset = offset
        self._holds: list[Hold] = []

    def hold(self, hold: Hold) -> None:
        """Record that a network reads the bytes until the hold is done."""
        self._holds.append(hold)

    @property
    def is_held(self) -> bool:
        """Whether a network still reads the bytes."""
        self._holds = [hold for hold in self._holds if not hold.done]
        return bool(self._holds)


class SlotRing:
    """Allocates slots first fit; they may be returned in any order.

    Args:
      memory: the whole ring.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        # (begin, end), ascending, never adjacent.
        self._gaps: list[tuple[int, int]] = [(0, len(memory))]
        self._used_bytes = 0
        self._returned: list[RingSlot] = []

    @property
    def size_bytes(self) -> int:
        """Size of the ring."""
        return len(self._memory)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are not free yet."""
        self._reclaim()
        return self._used_bytes

    @property
    def returned_bytes(self) -> int:
        """Those of them that were returned while a network still read them."""
        return sum(len(slot.memory) for slot in self._returned)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `take` would succeed."""
        self._reclaim()
        # Anything fits into an empty ring: one block may be larger than all of it.
        return not self._used_bytes or self._find(num_bytes) is not None

    def take(self, num_bytes: int) -> RingSlot | None:
        """Return a slot, or None if there is no room for it now."""
        self._reclaim()
        index = self._find(num_bytes)
        if index is not None:
            begin, end = self._gaps[index]
            rest = begin + num_bytes
            self._gaps[index : index + 1] = [(rest, end)] if rest < end else []
            slot = RingSlot(self._memory[begin:rest], begin)
        elif not self._used_bytes:
            slot = RingSlot(memoryview(bytearray(num_bytes)), None)
        else:
            return None
        self._used_bytes += num_bytes
        return slot

    def give_back(self, slot: RingSlot) -> None:
        """Return a slot; it becomes free as soon as no network reads it."""
        self._returned.append(slot)
        self._reclaim()

    def check_invariants(self) -> None:
        """Assert that gaps are separate, and that an empty ring is one gap."""
        ends = [0]
        for begin, end in self._gaps:
            assert begin < end, "an empty gap"
            assert begin > ends[-1] or begin == 0, "two gaps touch or overlap"
            ends.append(end)
        if not self._used_bytes:
            assert self._gaps == [(0, len(self._memory))], "a part of the ring is lost"

    def _find(self, num_bytes: int) -> int | None:
        for index, (begin, end) in enumerate(self._gaps):
            if end - begin >= num_bytes:
                return index
        return None

    def _reclaim(self) -> None:
        if not self._returned:
            return
        held = []
        for slot in self._returned:
            if slot.is_held:
                held.append(slot)
                continue
            self._used_bytes -= len(slot.memory)
            if slot.offset is not None:
                self._free(slot.offset, slot.offset + len(slot.memory))
        self._returned = held

    def _free(self, begin: int, end: int) -> None:
        insort(self._gaps, (begin, end))
        index = self._gaps.index((begin, end))
        if index + 1 < len(self._gaps) and self._gaps[index + 1][0] == end:
            end = self._gaps.pop(index + 1)[1]
        if index and self._gaps[index - 1][1] == begin:
            begin = self._gaps.pop(index - 1)[0]
            index -= 1
        self._gaps[index] = (begin, end)
