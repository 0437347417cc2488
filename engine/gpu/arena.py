"""A ring allocator for a fixed number of equal units; staging buffers use it.

`take` is called on one thread, `give` on any: whichever thread drops a buffer's last reference.
"""

from __future__ import annotations


class Arena:
    """Units 0…num_units-1, each free or taken."""

    def __init__(self, num_units: int) -> None:
        # One byte per unit: a single slice store marks a run, so the interpreter's lock is enough.
        self._taken = bytearray(num_units)
        self._next = 0

    @property
    def free_units(self) -> int:
        """Number of free units."""
        return self._taken.count(0)

    def take(self, count: int) -> int | None:
        """Take a run of units and return the first, or None if no run is long enough.

        Searches round robin, so that a run is reused late and freed neighbours can join.
        """
        wanted = bytes(count)
        first = self._taken.find(wanted, self._next)
        if first < 0:
            first = self._taken.find(wanted)
        if first < 0:
            return None
        self._taken[first : first + count] = b"\x01" * count
        self._next = first + count
        return first

    def give(self, first: int, count: int) -> None:
        """Free a run."""
        assert self._taken[first : first + count].count(1) == count, "a run is freed twice"
        self._taken[first : first + count] = bytes(count)
