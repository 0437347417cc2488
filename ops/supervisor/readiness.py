"""Client for the health probes of every server of a local fleet."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Self

import httpx2

from transport.control_protocol import ModelState
from triolet.errors import said_by

from ..http_trust import verify_for

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path
    from types import TracebackType

PROBE_TIMEOUT_S: Final = 2.0
"""Timeout of one probe, which a server answers from memory."""
PATH: Final = "/health/ready"
LIVE_PATH: Final = "/health/live"
"""Used while no model of the fleet runs: servers are not ready then, but accept requests."""


class Readiness:
    """Probes every server; an async context manager.

    Args:
      url: address of a single server.
      own_paths: Unix sockets of the servers if several share the port.
    """

    def __init__(self, url: str, own_paths: Sequence[Path] = ()) -> None:
        self._url = url
        self._own_paths = own_paths
        self._clients: list[httpx2.AsyncClient] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        ways: list[tuple[str, Path | None]] = [(self._url, None)]
        if self._own_paths:
            ways = [("http://localhost", path) for path in self._own_paths]
        for url, path in ways:
            # Close each connection: it would keep reaching the old process after a replacement.
            client = httpx2.AsyncClient(
                base_url=url,
                transport=None
                if path is None
                else httpx2.AsyncHTTPTransport(uds=str(path), verify=verify_for(url)),
                verify=verify_for(url),
                headers={"connection": "close"},
                timeout=PROBE_TIMEOUT_S,
                trust_env=False,
            )
            self._clients.append(await self._stack.enter_async_context(client))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def objection(self, path: str = PATH, models: Collection[str] = ()) -> str | None:
        """Return why a server is not ready, or None if all are.

        Args:
          path: path of the probe.
          models: names of models that each server must serve; if empty, one served model is enough.
        """
        for client in self._clients:
            try:
                answer = await client.get(path)
            except httpx2.TransportError as error:
                return said_by(error)
            if not answer.is_success:
                return f"{answer.status_code} {answer.text[:200]}"
            for name, state in _states(answer).items():
                if name in models and state != ModelState.SERVING:
                    return f"model {name} is {state}"
        return None

    async def is_met(self, worker: str) -> bool:
        """Return whether every server uses a worker."""
        for client in self._clients:
            # The server may be of another release: tolerate any answer.
            try:
                answer = await client.get(PATH)
                if not (answer.is_success and answer.json()["workers"][worker] == "alive"):
                    return False
            except (httpx2.TransportError, ValueError, LookupError, TypeError):
                return False
        return True


def _states(answer: httpx2.Response) -> dict[str, str]:
    """Return the state of each named model."""
    try:
        return {one["name"]: one["state"] for one in answer.json().get("models", ())}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}  # a server of another release, during a restart
