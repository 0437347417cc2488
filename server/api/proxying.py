"""Proxies a request to the server that owns its idempotency key, on this port or on another host.

The kernel may deliver a retry to any server on the port. The key alone determines which of them
stores the answer; the others proxy to it, so all requests with one key reach one process without
coordination. With several hosts, that process asks the directory whether another host has the
answer.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import h11
import structlog
import trio
from quart import Response, request

from triolet.errors import RequestError, draining, overloaded

from ..peers.answer_place import AnswerPlace
from ..peers.host_secret import SECRET_HEADER
from .body import LAST_EVENT_ID, current_key, current_scope, deadline_s, read_body, shown_request_id
from .errors import http_error
from .gateway_hints import FAIRNESS_ID, OBJECTIVE
from .resuming import name_of
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
    FAIRNESS_ID,
    OBJECTIVE,
    SECRET_HEADER,
)
"""Request headers to forward. The server where the request arrived has checked Origin. Another
host's secret is forwarded to the server that owns the key on this port."""
_OF_CONNECTION: Final = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
)
_RETRY_S: Final = 1.0
_NO_ANSWER: Final = (OSError, UnicodeError, trio.BrokenResourceError, h11.RemoteProtocolError)


def is_proxied(services: Services) -> bool:
    """Return whether a peer or another host proxied this request to us."""
    is_of_peer = PROXIED in request.headers and current_scope().connection.is_unix
    return is_of_peer or is_from_host(services)


def is_from_host(services: Services) -> bool:
    """Return whether another host proxied this request, perhaps through a peer."""
    secret = request.headers.get(SECRET_HEADER)
    return (
        services.hosts is not None and secret is not None and services.hosts.secret.matches(secret)
    )


def proxy_to_owner(
    view: Callable[[Services], Awaitable[Response]],
) -> Callable[[Services], Awaitable[Response]]:
    """Return a view that lets the owner of the request's key answer it."""

    async def answer(services: Services) -> Response:
        owner, url = owner_elsewhere(services), current_scope().entry.owner_url
        if owner is not None and services.peers is not None:
            connect = partial(services.peers.connect, owner)
            return await _proxy(owner, connect, (PROXIED, owner), services)
        if url and services.hosts is not None:
            mark = (SECRET_HEADER, services.hosts.secret.text)
            return await _proxy(url, partial(services.hosts.connect, url), mark, services)
        return await view(services)

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


async def claim_answer(services: Services) -> None:
    """Find the host that holds the answer of the current request's key; if there is none, claim the
    key for this host.

    Raises:
      RequestError: 400, the key is invalid; 403, the other host's secret differs; 410, the answer
        to resume was on a host that is gone; 503, the owner is unknown.
    """
    hosts, key = services.hosts, current_key()
    if hosts is None or key is None or owner_elsewhere(services) is not None:
        return
    if SECRET_HEADER in request.headers and not is_from_host(services):
        raise http_error(403, f"{SECRET_HEADER} is not the secret of this host's servers")
    name, is_resuming = name_of(key), LAST_EVENT_ID in request.headers
    if services.kept.keeps(name) or (is_resuming and services.kept.find(name) is not None):
        return
    digest = blake2b(name.scope + name.text.encode(), digest_size=16).hexdigest()

    def is_kept() -> bool:
        # A successor gets all retries; this server only keeps the keys of running answers.
        return services.kept.keeps(name, only_running=services.state.has_successor)

    claim = hosts.directory.claim(digest, is_kept)
    current_scope().hold(claim)
    await claim.ask(is_resuming=is_resuming)
    place, url = claim.owner
    if place is AnswerPlace.LOST:
        raise RequestError(
            f"the server that had this answer is gone; send the request again with the same "
            f"idempotency key and without {LAST_EVENT_ID}: it is answered from the beginning",
            status=410,
            code="answer_lost",
            param=LAST_EVENT_ID,
        )
    # This host's URL does not lead to the old process, and no request is proxied twice.
    own_url = services.config.hosts.advertised_url
    if place is AnswerPlace.UNKNOWN or (url and (url == own_url or is_from_host(services))):
        message = "the server that answers this idempotency key cannot be reached just now"
        raise overloaded(message, retry_after_s=services.config.hosts.lease_s)
    current_scope().entry.owner_url = url


async def _proxy(
    owner: str,
    connect: Callable[[float], Awaitable[PeerAnswer]],
    mark: tuple[str, str],
    services: Services,
) -> Response:
    """Return the owner's response.

    Args:
      owner: the owner's name or URL, for the log.
      connect: opens a connection to it; called with the maximum silence.
      mark: a header that stops the owner from proxying the request again.
      services: the server's parts.

    Raises:
      RequestError: 503, the owner does not answer, or this process is shutting down.
    """
    if services.state.is_draining:
        raise draining()
    body = await read_body(services.config)
    headers = [(name, request.headers[name]) for name in _TAKEN if name in request.headers]
    headers += [mark, ("x-request-id", shown_request_id())]
    if request.scope["client"] is not None:
        headers.append(("x-forwarded-for", request.scope["client"][0]))
    # The owner enforces the request's deadline and reports it.
    patience_s = deadline_s(services.config) + services.config.keep_alive_s
    services.metrics.http.resumption("passed_on")
    try:
        answer = await connect(patience_s)
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
        is_far = mark[0] == SECRET_HEADER
        retry_s = services.config.hosts.lease_s if is_far else _RETRY_S
        raise overloaded(message, retry_after_s=retry_s) from None
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
