"""Prompt tokens of clients that were told to come back, by when they are due.

Pure. Those told to wait for long are counted apart, for of them another share comes. Knows sizes,
classes and times; not whose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triolet.service_class import ServiceClass

from .bookings import SLOT_S

if TYPE_CHECKING:
    from collections.abc import Sequence


class Horizon(NamedTuple):
    """Who is asked for.

    Attributes:
      since: is due not before.
      until: nor later than that.
      shares: of those told little, and of those told much, that come.
    """

    since: float
    until: float
    shares: Sequence[float]


class Expected:
    """Some of one server's, in slots of time."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[list[int], list[int]]] = {}  # near and far, by class

    def add(
        self, due: float, service_class: ServiceClass, num_tokens: int, *, is_far: bool
    ) -> None:
        """Count one."""
        number = int(due / SLOT_S)
        if number not in self._slots:
            self._slots[number] = [0] * len(ServiceClass), [0] * len(ServiceClass)
        self._slots[number][is_far][service_class] += num_tokens

    def remove(
        self, due: float, service_class: ServiceClass, num_tokens: int, *, is_far: bool
    ) -> None:
        """Count out one that was counted."""
        number = int(due / SLOT_S)
        slot = self._slots[number]
        slot[is_far][service_class] -= num_tokens
        if not any(map(any, slot)):
            del self._slots[number]

    def tokens(self, num_classes: int, horizon: Horizon) -> float:
        """Return how many tokens of the highest classes come."""
        slots = self._slots
        first, last = int(horizon.since / SLOT_S), horizon.until / SLOT_S
        if last - first < len(slots):
            found = [slots[slot] for slot in range(first, int(last) + 1) if slot in slots]
        else:
            found = [tokens for slot, tokens in slots.items() if first <= slot <= last]
        return sum(
            share * sum(sum(slot[is_far][:num_classes]) for slot in found)
            for is_far, share in enumerate(horizon.shares)
        )
