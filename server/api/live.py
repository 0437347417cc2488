"""What is running right now, and who ends it when its client or this process goes.

Knows generations; knows no HTTP. A request holds its generations here and not in
its response, because a response that a client drops is finalised at a time of nobody's choosing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from triolet.ids import new_request_id

from ..generation import CancelReason

if TYPE_CHECKING:
    from types import TracebackType

    from ..generation import Generation

SCOPE_KEY: Final = "triolet.live"
"""Where a request's scope holds its LiveRequest."""


DEPARTURE_KEY: Final = "triolet.departure"
"""Where the scopes of a connection's requests hold its Departure."""


class Departure:
    """How a client went, for the accounts of what ran for it.

    Attributes:
      reason: set by whoever cuts the connection; otherwise the client went by itself.
    """

    def __init__(self) -> None:
        self.reason = CancelReason.CLIENT_GONE


class LiveRequest:
    """One request and the generations that it began. On exit they end, however it exits.

    Args:
      departure: of its connection.

    Attributes:
      request_id: 16 random bytes.
      began_at: when it came, on trio's clock.
    """

    def __init__(self, departure: Departure) -> None:
        self.request_id = new_request_id()
        self.began_at = trio.current_time()
        self._departure = departure
        self._generations: list[Generation] = []

    def hold(self, generation: Generation) -> None:
        """End this generation with the request."""
        self._generations.append(generation)

    def __enter__(self) -> LiveRequest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for generation in self._generations:
            generation.cancel(self._departure.reason)


class Lifecycle:
    """Whether this process takes requests.

    Attributes:
      draining: set once it takes none; answers under way go on.
    """

    def __init__(self) -> None:
        self.draining = trio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.draining.is_set()
