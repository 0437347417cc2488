"""Client of the probes of every server of a local fleet, each asked on its own socket."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Self

import httpx2

from triolet.control_protocol import ModelState
from triolet.errors import said_by

from ..http_trust import verify_for

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path
    from types import TracebackType

PROBE_TIMEOUT_S: Final = 2.0
"""For one question to /health/ready, which is answered from memory."""
PATH: Final = "/health/ready"
LIVE_PATH: Final = "/health/live"
"""For fleets whose models all start by command: no request can be computed yet, and none is
refused."""


class Readiness:
    """Asks every server; an async context manager.

    Args:
      url: where the only server answers.
      own_paths: the own sockets of servers, where several share the port.
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
            # One that is replaced must not find its successor's connection open.
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
        """Return what keeps one of them from taking requests; None if nothing does.

        Args:
          path: that is asked.
          models: by name, which each of them has to serve; one of several is enough without.
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
        """Return whether each of them uses a worker."""
        for client in self._clients:
            # It may be of another release than whoever asks: nothing it says may end us.
            try:
                answer = await client.get(PATH)
                if not (answer.is_success and answer.json()["workers"][worker] == "alive"):
                    return False
            except (httpx2.TransportError, ValueError, LookupError, TypeError):
                return False
        return True


def _states(answer: httpx2.Response) -> dict[str, str]:
    """Return how each model is, where a server has several."""
    try:
        return {one["name"]: one["state"] for one in answer.json().get("models", ())}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}  # a server of another release, during a restart
