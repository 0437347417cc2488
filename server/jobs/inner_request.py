"""A request that this process makes of its own application: a line of a batch.

It takes the way of every client, from the body's bytes to the answer's, and so has the same checks,
limits and bits; only its class is behind theirs. Knows ASGI; knows no batches.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import trio

from triolet.units import MILLISECONDS

from ..api.live import DEPARTURE_KEY, OWNER_KEY, WITHIN_KEY, Departure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class InnerAnswer(NamedTuple):
    """What came of it. `code` is an error's, empty where it has none."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None
    code: str = ""


async def ask(
    app: Callable[..., Awaitable[None]],
    host: str,
    path: str,
    body: bytes,
    request_id: str,
    owner: str,
    within_s: float,
) -> InnerAnswer:
    """POST JSON to the application, in this process.

    Args:
      app: of ASGI.
      host: that it takes for its own.
      path: of the endpoint.
      body: JSON.
      request_id: for the log, and for the answer.
      owner: the tenant whose request it is; empty where there are none.
      within_s: how long it may take.
    """
    headers = {
        "host": host,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": request_id,
    }
    scope: dict[str, Any] = {
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
        "state": {DEPARTURE_KEY: Departure(), OWNER_KEY: owner, WITHIN_KEY: within_s},
    }
    events = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if events:
            return events.pop()
        await trio.sleep_forever()
        raise AssertionError("it sleeps for ever")

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message)

    await app(scope, receive, send)
    return _answer(sent, request_id)


def _answer(sent: list[dict[str, Any]], request_id: str) -> InnerAnswer:
    """Return what the application's messages say."""
    start = next(message for message in sent if message["type"] == "http.response.start")
    parts = [cast("bytes", m.get("body", b"")) for m in sent if m["type"] == "http.response.body"]
    status, content = start["status"], b"".join(parts)
    code = _error_code(content) if status >= 400 else ""
    return InnerAnswer(status, request_id, content, _retry_after_s(start), code)


def _retry_after_s(start: dict[str, Any]) -> float | None:
    milliseconds = dict(start["headers"]).get(b"retry-after-ms")
    return None if milliseconds is None else int(milliseconds) * MILLISECONDS


def _error_code(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return ""
