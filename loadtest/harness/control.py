"""Client of a running fleet's control: its models, and what they hold."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio

from ops.running_fleets import find_fleet
from triolet.control_protocol import ADMIN_SOCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


POLL_S: Final = 0.02
SLEEP_S: Final = 60.0
"""Seconds for idle workers to end, on a busy machine."""


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

    async def sleep(self, name: str) -> None:
        """Let the workers of a model end, and return when they have."""
        with trio.fail_after(SLEEP_S):
            asked = (await self._client.post(f"/admin/models/{name}/sleep")).json()
            while asked["status"] not in ("done", "failed"):
                await trio.sleep(POLL_S)
                asked = (await self._client.get(f"/admin/operations/{asked['id']}")).json()
        assert asked["status"] == "done", asked


@asynccontextmanager
async def admin_of(url: str) -> AsyncIterator[Admin]:
    """Reach the control of the fleet that serves at this URL."""
    path = find_fleet(int(url.rpartition(":")[2])).directory / ADMIN_SOCKET
    transport = httpx2.AsyncHTTPTransport(uds=str(path))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield Admin(client)
