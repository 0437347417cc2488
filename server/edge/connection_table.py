"""Bounds the number of client connections and chooses which idle one to close for a new one. Pure:
no socket, no clock.

A connection is idle while it has no request in progress: before its first head is complete, and
between an answer and the next request. Busy connections are never closed for new ones. Calls must
be in chronological order.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from triolet.errors import RequestError, overloaded

from ..api.errors import error_body, error_headers

if TYPE_CHECKING:
    from collections.abc import Callable


class ConnectionRefused(StrEnum):
    """Why a connection is refused."""

    ADDRESS = "address"
    """Its address has its maximum of connections, all busy."""
    SERVER = "server"
    """The server has its maximum of connections, all busy."""


@dataclass(eq=False, slots=True)
class ConnectionPlace:
    """The place of one connection.

    Attributes:
      address: the address it is counted for; None for connections that carry many clients.
      cut: closes the connection at once.
      has_shown_key: a request on it has passed the API key check.
    """

    address: str | None
    cut: Callable[[], None]
    has_shown_key: bool = False


class IdleLine:
    """Idle connections in order of eviction: those without a key first, then the longest idle
    first."""

    def __init__(self) -> None:
        self._without_key: OrderedDict[ConnectionPlace, None] = OrderedDict()
        self._with_key: OrderedDict[ConnectionPlace, None] = OrderedDict()

    def add(self, place: ConnectionPlace) -> None:
        """Add a connection as the latest of its kind."""
        (self._with_key if place.has_shown_key else self._without_key)[place] = None

    def discard(self, place: ConnectionPlace) -> None:
        """Remove a connection, if present."""
        self._without_key.pop(place, None)
        self._with_key.pop(place, None)

    @property
    def first(self) -> ConnectionPlace | None:
        """The next connection to evict; None if all are busy."""
        return next(iter(self._without_key or self._with_key), None)


@dataclass(slots=True)
class AddressPlaces:
    """The connections of one address."""

    count: int = 0
    idle: IdleLine = field(default_factory=IdleLine)


class ConnectionTable:
    """All connections of a server.

    Args:
      max_connections: maximum in total.
      max_per_address: maximum per address.

    Attributes:
      turned_away: number of connections refused, by reason, and evicted.
    """

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._places: set[ConnectionPlace] = set()
        self._idle = IdleLine()
        self._by_address: dict[str, AddressPlaces] = {}
        self.turned_away = {"evicted": 0, **{str(reason): 0 for reason in ConnectionRefused}}

    def __len__(self) -> int:
        return len(self._places)

    def admit(
        self, address: str | None, cut: Callable[[], None]
    ) -> ConnectionPlace | ConnectionRefused:
        """Give a new connection a place, closing an idle one if there is no room.

        Args:
          address: see ConnectionPlace.
          cut: see ConnectionPlace.
        """
        refused = self._make_room(address, has_place=False)
        if refused is not None:
            return refused
        place = ConnectionPlace(address, cut)
        self._places.add(place)
        self._count_for_address(place)
        self.rest(place)
        return place

    def attribute(self, place: ConnectionPlace, address: str) -> ConnectionRefused | None:
        """Count a connection without an address for this one from now on."""
        assert place.address is None, "a connection has one address"
        if place not in self._places:
            return None  # it has just been evicted
        refused = self._make_room(address, has_place=True)
        if refused is None:
            self._idle.discard(place)
            place.address = address
            self._count_for_address(place)
            self.rest(place)
        return refused

    def work(self, place: ConnectionPlace) -> None:
        """Record that a connection has a request in progress."""
        self._idle.discard(place)
        if place.address is not None and (own := self._by_address.get(place.address)):
            own.idle.discard(place)

    def rest(self, place: ConnectionPlace) -> None:
        """Record that a connection has become idle."""
        if place not in self._places:
            return
        self._idle.add(place)
        if place.address is not None:
            self._by_address[place.address].idle.add(place)

    def leave(self, place: ConnectionPlace) -> None:
        """Remove a connection. Idempotent."""
        if place not in self._places:
            return
        self.work(place)
        self._places.remove(place)
        if place.address is not None:
            own = self._by_address[place.address]
            own.count -= 1
            if not own.count:
                del self._by_address[place.address]

    def _count_for_address(self, place: ConnectionPlace) -> None:
        if place.address is not None:
            self._by_address.setdefault(place.address, AddressPlaces()).count += 1

    def _make_room(self, address: str | None, *, has_place: bool) -> ConnectionRefused | None:
        """Evict an idle connection if necessary; return the reason if none can be."""
        own = None if address is None else self._by_address.get(address)
        is_bounded = self._max_per_address < self._max_connections
        if is_bounded and own is not None and own.count >= self._max_per_address:
            return self._evict(own.idle, ConnectionRefused.ADDRESS)
        if not has_place and len(self._places) >= self._max_connections:
            return self._evict(self._idle, ConnectionRefused.SERVER)
        return None

    def _evict(self, line: IdleLine, reason: ConnectionRefused) -> ConnectionRefused | None:
        place = line.first
        if place is None:
            self.turned_away[reason] += 1
            return reason
        self.leave(place)
        self.turned_away["evicted"] += 1
        place.cut()
        return None


REFUSALS: Final = {
    ConnectionRefused.SERVER: overloaded(
        "this server has its maximum of connections, each with a request in progress; close some, "
        "or try again",
        retry_after_s=2.0,
    ),
    ConnectionRefused.ADDRESS: RequestError(
        "your address has its maximum of connections, each with a request in progress; reuse them, "
        "close some, or try later (for the operator: server.max_connections_per_address, and "
        "--trusted-proxies behind a proxy)",
        status=429,
        code="too_many_connections",
        retry_after_s=2.0,
    ),
}
"""The answers to refused connections."""


def refusal(error: RequestError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of a refusal."""
    body = error_body(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": secrets.token_hex(16),
        **error_headers(error),
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()], body


def refusal_bytes(error: RequestError) -> bytes:
    """Return the whole answer, for a connection that no parser has read."""
    headers, body = refusal(error)
    head = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"HTTP/1.1 %d \r\n%b\r\n%b" % (error.status, head, body)
