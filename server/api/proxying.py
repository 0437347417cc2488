"""Requests with an idempotency key that another server on this port owns.

The kernel gives a retry of such a request to any server. Which one keeps the key's answer follows
from the key alone, and any other passes the request on: two requests with one key meet in one
process, and no two servers have to agree on anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import h11
import structlog
import trio
from quart import Response, request

from triolet.errors import draining, overloaded

from .body import current_key, current_scope, read_body, shown_request_id
from .stream import StreamBody

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .peers import PeerAnswer
    from .services import Services

log = structlog.get_logger(__name__)

PROXIED: Final = "x-triolet-passed-on"
"""Header that names the owner. A server that is named so owns the key, so nothing is passed on
twice. A client that says so only keeps its own retries apart."""
_TAKEN: Final = (
    "accept",
    "anthropic-version",
    "authorization",
    "content-encoding",
    "content-type",
    "idempotency-key",
    "last-event-id",
    "x-api-key",
    "x-request-timeout-ms",
    "x-stainless-read-timeout",
)
"""Headers that decide what comes of a request. Its Origin is checked where it arrived."""
_OF_CONNECTION: Final = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
)
_RETRY_S: Final = 1.0
_NO_ANSWER: Final = (OSError, trio.BrokenResourceError, h11.RemoteProtocolError)


def is_proxied() -> bool:
    """Return whether a peer got this request and passed it on."""
    return PROXIED in request.headers and current_scope().connection.is_unix


def proxy_to_owner(
    view: Callable[[Services], Awaitable[Response]],
) -> Callable[[Services], Awaitable[Response]]:
    """Return a view that lets the owner of a request's key answer it."""

    async def answer(services: Services) -> Response:
        owner = owner_elsewhere(services)
        return await (view(services) if owner is None else _proxy(owner, services))

    return answer


def owner_elsewhere(services: Services) -> str | None:
    """Return the peer that owns the key of the current request; None if it is answered here.

    Raises:
      RequestError: 400, the key is none.
    """
    peers = services.peers
    key = None if peers is None else current_key()
    if peers is None or key is None or request.headers.get(PROXIED) == peers.own_name:
        return None
    return peers.owner_of(key)


async def _proxy(owner: str, services: Services) -> Response:
    """Return the owner's answer.

    Raises:
      RequestError: 503, it does not answer, or this process is to leave.
    """
    assert services.peers is not None
    if services.state.is_draining:
        raise draining()
    body = await read_body(services.config)
    headers = [(name, request.headers[name]) for name in _TAKEN if name in request.headers]
    headers += [(PROXIED, owner), ("x-request-id", shown_request_id())]
    if request.scope["client"] is not None:
        headers.append(("x-forwarded-for", request.scope["client"][0]))
    # Nothing that it does may take longer, and it says so itself when the time is over.
    patience_s = services.config.default_deadline_s + services.config.keep_alive_s
    services.metrics.http.resumption("passed_on")
    try:
        answer = await services.peers.connect(owner, patience_s)
        current_scope().hold(answer)
        await answer.ask("POST", request.path, headers, bytes(body))
        current_scope().entry.queue()  # it is under way there now
        del body
        shown = {k: v for k, v in answer.headers.items() if k not in _OF_CONNECTION}
        if shown.get("content-type", "").startswith("text/event-stream"):
            return Response(ProxiedBody(answer), answer.status, headers=shown)
        whole = b"".join([data async for data in ProxiedBody(answer)])
    except _NO_ANSWER as error:
        log.warning("sibling_silent", server=owner, reason=str(error))
        message = "the server that keeps the answers of this idempotency key does not answer"
        raise overloaded(message, retry_after_s=_RETRY_S) from None
    return Response(whole, answer.status, headers=shown)


class ProxiedBody(StreamBody):
    """Gives back what a peer says as it comes. If that breaks off, so does this.

    Args:
      answer: held by its request.
    """

    def __init__(self, answer: PeerAnswer) -> None:
        self._answer = answer

    async def __anext__(self) -> bytes:
        """Return what comes next."""
        if data := await self._answer.next_data():
            return data
        raise StopAsyncIteration
