"""WebSocket /v1/responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ports import Services


async def responses_socket(services: Services) -> None:
    """Serve one socket."""
