"""Which parts of the coming minutes are spoken for: a calendar of work, in slots.

Pure. Each class books its work as soon as it can begin, wherever less is booked than the class may
fill; so the classes have one capacity between them, and the lower ones leave some of every moment
to those above. Knows seconds of work; not whose.
"""

from __future__ import annotations

from typing import Final

from triolet.service_class import ServiceClass
from triolet.units import MILLISECONDS, SECONDS

SLOT_S: Final = 250 * MILLISECONDS
"""How finely promised work is laid out in time."""
FILL: Final = {
    ServiceClass.CRITICAL: 0.9,
    ServiceClass.DEFAULT: 0.8,
    ServiceClass.SHEDDABLE: 0.3,
    ServiceClass.BATCH: 0.3,
}
"""Of a slot, up to which a class may book: who comes back comes at random within what it was told,
and a line that is busy all the time grows with each chance. What is left is taken by newcomers, so
it only makes waits longer."""
LEAST_S: Final = 1e-9
"""Less room is none."""
TIDY_S: Final = 10 * SECONDS
"""How often what is past is thrown away."""


class Bookings:
    """The calendar of one server.

    Args:
      most_s: how far ahead it goes.
    """

    def __init__(self, most_s: float) -> None:
        self._num_slots = int(most_s / SLOT_S)
        self._booked: dict[int, float] = {}
        # By class, of slots that it found full: behind them, the next that may not be.
        self._behind: list[dict[int, int]] = [{} for _ in ServiceClass]
        self._tidied_at = 0.0

    def begin_s(self, own: ServiceClass, room_in_s: float, now: float) -> float:
        """Return in how many seconds a class may book something, and not before `room_in_s`; the
        end of the calendar if it is full."""
        slot = self._not_full(own, now + room_in_s, now)
        return max(slot * SLOT_S - now, room_in_s)

    def book(self, own: ServiceClass, room_in_s: float, work_s: float, now: float) -> None:
        """Book some work wherever there is room.

        Args:
          own: whose it is.
          room_in_s: before that it cannot begin.
          work_s: how long it takes; nothing is booked beyond the end of the calendar.
          now: the time.
        """
        self._tidy(now)
        end = self._end(now)
        slot = self._not_full(own, now + room_in_s, now)
        while slot < end and work_s > LEAST_S:
            part_s = min(self._room_s(own, slot), work_s)
            self._booked[slot] = self._booked.get(slot, 0.0) + part_s
            work_s -= part_s
            slot = self._not_full(own, slot * SLOT_S, now)

    def _end(self, now: float) -> int:
        return int(now / SLOT_S) + self._num_slots

    def _not_full(self, own: ServiceClass, since: float, now: float) -> int:
        """Return the first slot from some time on that has room for a class, or the last one."""
        behind, end = self._behind[own], self._end(now)
        slot = min(int(since / SLOT_S), end)
        passed = []
        while slot < end and self._room_s(own, slot) <= LEAST_S:
            passed.append(slot)
            slot = behind.get(slot, slot + 1)
        # What is full stays so: nobody goes the whole way twice.
        for full in passed:
            behind[full] = slot
        return slot

    def _room_s(self, own: ServiceClass, slot: int) -> float:
        """Return how much more a class may book of a slot."""
        return FILL[own] * SLOT_S - self._booked.get(slot, 0.0)

    def _tidy(self, now: float) -> None:
        if now - self._tidied_at >= TIDY_S:
            self._tidied_at = now
            first = int(now / SLOT_S)
            self._booked = {slot: s for slot, s in self._booked.items() if slot >= first}
            self._behind = [
                {slot: to for slot, to in behind.items() if slot >= first}
                for behind in self._behind
            ]
