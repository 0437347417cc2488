"""Client of a fleet's control process: models and rollouts."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio

from ops.running_fleets import find_fleet
from transport.control_protocol import ADMIN_SOCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


POLL_S: Final = 0.02
START_S: Final = 60.0
"""Servers may serve before control listens."""
SLEEP_S: Final = 60.0
"""Timeout for stopping idle workers on a busy machine."""


class OrderRefusedError(Exception):
    """Control refused an order; the text has its answer."""


class Admin:
    """Client of the admin routes of one fleet.

    Args:
      client: HTTP client for its socket.
    """

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def models(self) -> dict[str, Any] | None:
        """Return the models as reported by control; None while control is down."""
        try:
            return dict((await self._client.get("/admin/models")).json())
        except httpx2.TransportError:
            return None

    async def rollout(self, model: str) -> dict[str, Any] | None:
        """Return the latest rollout of a model; None while control is down or has none."""
        try:
            answer = await self._client.get(f"/admin/rollouts/{model}")
        except httpx2.TransportError:
            return None
        return dict(answer.json()) if answer.is_success else None

    async def until(
        self, model: str, is_so: Callable[[dict[str, Any]], bool], timeout_s: float
    ) -> dict[str, Any]:
        """Wait until a condition holds for the latest rollout of a model, and return the rollout.

        Raises:
          trio.TooSlowError: it did not hold in time.
        """
        with trio.fail_after(timeout_s):
            while True:
                shown = await self.rollout(model)
                if shown is not None and is_so(shown):
                    return shown
                await trio.sleep(POLL_S)

    async def order(self, path: str, **fields: object) -> dict[str, Any]:
        """Send an order, and return the answer.

        Raises:
          OrderRefusedError: it was refused.
        """
        answer = await self._client.post(path, json=fields)
        if answer.is_error:
            raise OrderRefusedError(f"{path}: {answer.text}")
        return dict(answer.json())

    async def sleep(self, name: str) -> None:
        """Stop the workers of a model, and wait until they have stopped."""
        with trio.fail_after(SLEEP_S):
            asked = (await self._client.post(f"/admin/models/{name}/sleep")).json()
            while asked["status"] not in ("done", "failed"):
                await trio.sleep(POLL_S)
                asked = (await self._client.get(f"/admin/operations/{asked['id']}")).json()
        assert asked["status"] == "done", asked


@asynccontextmanager
async def admin_of(url: str) -> AsyncIterator[Admin]:
    """Connect to the control process of the fleet that serves at this URL, once it listens."""
    path = find_fleet(int(url.rpartition(":")[2]), with_control=True).directory / ADMIN_SOCKET
    transport = httpx2.AsyncHTTPTransport(uds=str(path))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        admin = Admin(client)
        with trio.fail_after(START_S):
            while await admin.models() is None:  # noqa: ASYNC110 (of another process)
                await trio.sleep(POLL_S)
        yield admin
