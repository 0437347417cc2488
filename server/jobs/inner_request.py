"""A request that this process makes of its own application: a line of a batch.

It takes the way of every client, from the body's bytes to the answer's, and so has the same checks,
limits and bits; only its class is behind theirs. Knows ASGI; knows no batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import trio

from triolet.units import MILLISECONDS

from ..api.live import DEPARTURE_KEY, OWNER_KEY, SCOPE_KEY, WITHIN_KEY, Departure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..api.live import LiveRequest


class InnerAnswer(NamedTuple):
    """What came of it.

    Attributes:
      status: of HTTP.
      request_id: that it had.
      body: of the answer.
      retry_after_s: after which it may be asked again; None if nothing was said.
      is_crowded_out: it was refused, because of what waited or ran already.
    """

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None
    is_crowded_out: bool = False


def receiving(body: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Return where an application of ASGI receives a body in one part, from who never leaves."""
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if events:
            return events.pop()
        await trio.sleep_forever()
        raise AssertionError("it sleeps for ever")

    return receive


class InnerRequest:
    """A POST of JSON. It is asked once.

    Args:
      host: that the application takes for its own.
      path: of the endpoint.
      body: JSON.
      request_id: for the log, and for the answer.
      owner: the tenant whose request it is; empty where there are none.
      within_s: how long it may take.
    """

    def __init__(
        self, host: str, path: str, body: bytes, request_id: str, owner: str, within_s: float
    ) -> None:
        self._request_id = request_id
        self._body = body
        self._state: dict[str, Any] = {
            DEPARTURE_KEY: Departure(),
            OWNER_KEY: owner,
            WITHIN_KEY: within_s,
        }
        headers = {
            "host": host,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
        }
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None,
            "server": None,
            "extensions": {},
            "state": self._state,
        }

    @property
    def has_begun(self) -> bool:
        """Whether anything may have been spent on it by workers."""
        return self._live is not None and self._live.has_begun

    async def ask(self, app: Callable[..., Awaitable[None]]) -> InnerAnswer:
        """Ask an application of ASGI, in this process."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            await trio.lowlevel.checkpoint()
            sent.append(message)

        await app(self._scope, receiving(self._body), send)
        return self._answer(sent)

    @property
    def _live(self) -> LiveRequest | None:
        """What the application holds of it, since it was asked."""
        return cast("LiveRequest | None", self._state.get(SCOPE_KEY))

    def _answer(self, sent: list[dict[str, Any]]) -> InnerAnswer:
        """Return what the application's messages say."""
        start = next(message for message in sent if message["type"] == "http.response.start")
        bodies = [message for message in sent if message["type"] == "http.response.body"]
        content = b"".join(cast("bytes", message.get("body", b"")) for message in bodies)
        is_crowded_out = self._live is not None and self._live.is_crowded_out
        retry_after_s = _retry_after_s(start)
        return InnerAnswer(
            start["status"], self._request_id, content, retry_after_s, is_crowded_out
        )


def _retry_after_s(start: dict[str, Any]) -> float | None:
    milliseconds = dict(start["headers"]).get(b"retry-after-ms")
    return None if milliseconds is None else int(milliseconds) * MILLISECONDS
