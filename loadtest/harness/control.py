"""The control of a fleet that runs: which models are there, and what they hold."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2

from ops.running_fleets import find_fleet
from triolet.control_protocol import ADMIN_SOCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Admin:
    """Asks the admin routes of one fleet.

    Args:
      client: to its socket.
    """

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def models(self) -> dict[str, Any] | None:
        """Return what control says of its models; None while it is away."""
        try:
            return dict((await self._client.get("/admin/models")).json())
        except httpx2.TransportError:
            return None


@asynccontextmanager
async def admin_of(url: str) -> AsyncIterator[Admin]:
    """Reach the control of the fleet that serves at this URL."""
    path = find_fleet(int(url.rpartition(":")[2])).directory / ADMIN_SOCKET
    transport = httpx2.AsyncHTTPTransport(uds=str(path))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield Admin(client)
