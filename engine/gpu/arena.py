"""Which parts of a fixed piece of memory are in use: runs of equal units, taken and given back.

Pure. Giving back may happen on any thread (the one that drops the last reference to a buffer);
taking on one only.
"""

from __future__ import annotations


class Arena:
    """Units 0…num_units-1, each free or taken.

    Args:
      num_units: how many.
    """

    def __init__(self, num_units: int) -> None:
        # One byte a unit: a single store marks a run, so no lock is needed beside Python's own.
        self._taken = bytearray(num_units)
        self._next = 0

    @property
    def free_units(self) -> int:
        """Units that are not held."""
        return self._taken.count(0)

    def take(self, count: int) -> int | None:
        """Take a run of units and return the first, or None if no run is long enough.

        Goes round, so that a run is reused as late as possible and what is freed meanwhile joins.
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
        """Give a run back."""
        assert self._taken[first : first + count].count(1) == count, "given back twice"
        self._taken[first : first + count] = bytes(count)
