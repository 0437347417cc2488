"""Requests with an idempotency key, among servers that share a port: each key has one owner.

The kernel gives a retry to any of them. Which one keeps a key's answer follows from the key alone,
so whoever gets a request passes it on to that one and its answer back: two requests with one key
meet in one process, however close they come, and no two servers have to agree on anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import h11
import structlog
import trio
from quart import Response, request

from triolet.errors import draining, overloaded

from .body import live_request, read_body, shown_request_id
from .live import own_peer
from .resuming import own_key
from .stream import StreamBody

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .peers import SiblingAnswer
    from .services import Services

log = structlog.get_logger(__name__)

PASSED_ON: Final = "x-triolet-passed-on"
"""Names the owner. Who is named so owns the key, whatever it would say itself: nothing is passed on
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
"""Headers that decide what comes of a request. Its Origin is checked by whoever got it."""
_OF_CONNECTION: Final = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
)
_RETRY_S: Final = 1.0
_NO_ANSWER: Final = (OSError, trio.BrokenResourceError, h11.RemoteProtocolError)


def is_passed_on() -> bool:
    """Return whether a sibling got this request and passed it on."""
    return PASSED_ON in request.headers and own_peer(request.scope).is_unix


def by_owner(
    view: Callable[[Services], Awaitable[Response]],
) -> Callable[[Services], Awaitable[Response]]:
    """Return a view that lets the owner of a request's key answer it."""

    async def answer(services: Services) -> Response:
        owner = owner_elsewhere(services)
        return await (view(services) if owner is None else _pass_on(owner, services))

    return answer


def owner_elsewhere(services: Services) -> str | None:
    """Return the sibling that owns the key of the current request; None if it is answered here.

    Raises:
      RequestError: 400, the key is none.
    """
    siblings = services.siblings
    key = None if siblings is None else own_key()
    if siblings is None or key is None or request.headers.get(PASSED_ON) == siblings.own_name:
        return None
    return siblings.owner_of(key)


async def _pass_on(owner: str, services: Services) -> Response:
    """Return the owner's answer.

    Raises:
      RequestError: 503, it does not answer, or this process is to leave.
    """
    assert services.siblings is not None
    if services.lifecycle.is_draining:
        raise draining()
    body = await read_body(services.config)
    headers = [(name, request.headers[name]) for name in _TAKEN if name in request.headers]
    headers += [(PASSED_ON, owner), ("x-request-id", shown_request_id())]
    if request.scope["client"] is not None:
        headers.append(("x-forwarded-for", request.scope["client"][0]))
    # Nothing that it does may take longer, and it says so itself when the time is over.
    patience_s = services.config.default_deadline_s + services.config.keep_alive_s
    services.metrics.http.resumption("passed_on")
    try:
        answer = await services.siblings.reach(owner, patience_s)
        live_request().hold(answer)
        await answer.ask(request.path, headers, body)
        live_request().entry.queue()  # it is under way there now
        del body
        shown = {k: v for k, v in answer.headers.items() if k not in _OF_CONNECTION}
        if shown.get("content-type", "").startswith("text/event-stream"):
            return Response(PassedOnBody(answer), answer.status, headers=shown)
        whole = b"".join([data async for data in PassedOnBody(answer)])
    except _NO_ANSWER as error:
        log.warning("sibling_silent", server=owner, reason=str(error))
        message = "the server that keeps the answers of this idempotency key does not answer"
        raise overloaded(message, retry_after_s=_RETRY_S) from None
    return Response(whole, answer.status, headers=shown)


class PassedOnBody(StreamBody):
    """Gives back what a sibling says as it comes. If that breaks off, so does this.

    Args:
      answer: held by its request.
    """

    def __init__(self, answer: SiblingAnswer) -> None:
        self._answer = answer

    async def __anext__(self) -> bytes:
        """Return what comes next."""
        if data := await self._answer.next_data():
            return data
        raise StopAsyncIteration
