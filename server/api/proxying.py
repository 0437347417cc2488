"""Proxies requests to the server on this port that owns their idempotency key.

The kernel may deliver a retry to any server. The key alone determines which server stores its
answer, and the others proxy to it, so requests with one key meet in one process without
coordination.
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

    from ..peers.peers import PeerAnswer
    from .services import Services

log = structlog.get_logger(__name__)

PROXIED: Final = "x-triolet-passed-on"
"""The header that names the owner. The named server handles the request itself, so no request is
proxied twice. A client that sets it only separates its own retries."""
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
"""Request headers to forward. Origin is checked where the request arrived."""
_OF_CONNECTION: Final = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
)
_RETRY_S: Final = 1.0
_NO_ANSWER: Final = (OSError, trio.BrokenResourceError, h11.RemoteProtocolError)


def is_proxied() -> bool:
    """Return whether a peer proxied this request to us."""
    return PROXIED in request.headers and current_scope().connection.is_unix


def proxy_to_owner(
    view: Callable[[Services], Awaitable[Response]],
) -> Callable[[Services], Awaitable[Response]]:
    """Return a view that lets the owner of the request's key answer it."""

    async def answer(services: Services) -> Response:
        owner = owner_elsewhere(services)
        return await (view(services) if owner is None else _proxy(owner, services))

    return answer


def owner_elsewhere(services: Services) -> str | None:
    """Return the peer that owns the current request's key; None if this server answers it.

    Raises:
      RequestError: 400, the key is invalid.
    """
    peers = services.peers
    key = None if peers is None else current_key()
    if peers is None or key is None or request.headers.get(PROXIED) == peers.own_name:
        return None
    return peers.owner_of(key)


async def _proxy(owner: str, services: Services) -> Response:
    """Return the owner's response.

    Raises:
      RequestError: 503, the owner does not answer, or this process is shutting down.
    """
    assert services.peers is not None
    if services.state.is_draining:
        raise draining()
    body = await read_body(services.config)
    headers = [(name, request.headers[name]) for name in _TAKEN if name in request.headers]
    headers += [(PROXIED, owner), ("x-request-id", shown_request_id())]
    if request.scope["client"] is not None:
        headers.append(("x-forwarded-for", request.scope["client"][0]))
    # The owner enforces the request's deadline and reports it.
    patience_s = services.config.default_deadline_s + services.config.keep_alive_s
    services.metrics.http.resumption("passed_on")
    try:
        answer = await services.peers.connect(owner, patience_s)
        current_scope().hold(answer)
        await answer.ask("POST", request.path, headers, bytes(body))
        current_scope().entry.queue()  # it runs on the peer now
        del body
        shown = {k: v for k, v in answer.headers.items() if k not in _OF_CONNECTION}
        if shown.get("content-type", "").startswith("text/event-stream"):
            return Response(ProxiedBody(answer), answer.status, headers=shown)
        whole = b"".join([data async for data in ProxiedBody(answer)])
    except _NO_ANSWER as error:
        log.warning("sibling_silent", server=owner, reason=str(error))
        message = "the server that holds the answer of this idempotency key does not respond"
        raise overloaded(message, retry_after_s=_RETRY_S) from None
    return Response(whole, answer.status, headers=shown)


class ProxiedBody(StreamBody):
    """Passes on a peer's response as it arrives. If that is cut off, this body is, too.

    Args:
      answer: the peer's response, owned by the request.
    """

    def __init__(self, answer: PeerAnswer) -> None:
        self._answer = answer

    async def __anext__(self) -> bytes:
        """Return the next part."""
        if data := await self._answer.next_data():
            return data
        raise StopAsyncIteration
