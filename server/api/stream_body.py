"""The form that every body has here that is written piece by piece.

Knows what Quart asks of one. It owns nothing, so that a client may drop it at any point: whatever
has an end is held by the request.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Self

from quart.wrappers.response import ResponseBody

if TYPE_CHECKING:
    from types import TracebackType


class StreamBody(ResponseBody):
    """Gives one write after the other, until StopAsyncIteration."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Nothing to give back."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes:
        """Return the next write."""
