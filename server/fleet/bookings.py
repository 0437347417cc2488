"""Which parts of the coming minutes are spoken for: a calendar of work, in slots.

Pure. Each class books its work behind its own, wherever less is booked than the class may fill; so
the classes have one capacity between them, and the lower ones leave some of every moment to those
above. Knows seconds of work; not whose.
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
        self._line = [0] * len(ServiceClass)
        self._tidied_at = 0.0

    def line_s(self, own: ServiceClass, room_in_s: float, now: float) -> float:
        """Return in how many seconds a class has booked nothing more, and there is room."""
        return max(self._line[own] * SLOT_S - now, room_in_s)

    def book(self, own: ServiceClass, room_in_s: float, work_s: float, now: float) -> float:
        """Return in how many seconds some work can begin, which is then booked.

        Args:
          own: whose it is.
          room_in_s: before that it cannot.
          work_s: how long it takes; nothing is booked beyond the end of the calendar.
          now: the time.
        """
        self._tidy(now)
        last = int(now / SLOT_S) + self._num_slots
        slot = min(int((now + self.line_s(own, room_in_s, now)) / SLOT_S), last)
        while slot < last and self._room_s(own, slot) <= 0.0:
            slot += 1
        begin = slot
        while slot < last and work_s > 0.0:
            part_s = min(self._room_s(own, slot), work_s)
            if part_s > 0.0:
                self._booked[slot] = self._booked.get(slot, 0.0) + part_s
                work_s -= part_s
            slot += work_s > 0.0
        self._line[own] = slot
        return max(begin * SLOT_S - now, room_in_s)

    def _room_s(self, own: ServiceClass, slot: int) -> float:
        """Return how much more a class may book of a slot."""
        return FILL[own] * SLOT_S - self._booked.get(slot, 0.0)

    def _tidy(self, now: float) -> None:
        if now - self._tidied_at >= TIDY_S:
            self._tidied_at = now
            first = int(now / SLOT_S)
            self._booked = {slot: s for slot, s in self._booked.items() if slot >= first}
