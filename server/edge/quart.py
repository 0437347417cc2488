"""Adapts Quart's handling of requests: protects the last write, frees memory at the end, and admits
bodies step by step.

hypercorn reports the end of a response from within its last send, before it has recycled or closed
the connection. That cancels all tasks that end with the client, including this send itself, so
keep-alive and `Connection: close` would not work. The last send is therefore shielded, for a
limited time: with an unlimited shield, connections stayed open forever.

Quart keeps exceptions of a view in its frames. A WebSocket's view uses a nursery, so its
cancellation is an exception group. The group and the frames reference each other and keep all
objects of the client until the garbage collector runs, which is rare here. A cancelled view is
therefore left with one plain cancellation. A request to an unknown path references its exception,
and the traceback references the request; this reference is dropped.

Quart reads a body as fast as it arrives. Here a large one waits until its request is admitted, and
every byte is counted (server/api/door.py).

This file uses private names of Quart-Trio: the exact version is pinned, and tests/server/edge
checks the behaviour.
"""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

import trio
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection

from ..api.request_scope import scope_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
    from quart.ctx import WebsocketContext
    from quart.typing import ResponseReturnValue, ResponseTypes
    from quart.wrappers import Request
    from quart.wrappers.base import BaseRequestWebsocket


P = ParamSpec("P")

LAST_SEND_TIMEOUT_S = 5.0


class PatchedHTTPConnection(TrioASGIHTTPConnection):
    """One request and its answer."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Run the request; its scope ends everything it started.

        Once the body has arrived, a stream has no task but this one and holds nothing of the
        request. With Quart's two tasks and their request an idle stream would take 8 KiB more.
        """
        with scope_of(self.scope) as live, live.while_client_stays:
            async with trio.open_nursery() as nursery:
                await self._send_response(send, await self._respond(nursery, receive, send))
                nursery.cancel_scope.cancel()

    async def _respond(
        self, nursery: trio.Nursery, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> ResponseTypes:
        request = self._create_request_from_scope(send)
        nursery.start_soon(self._receive_body, request, receive)
        return await self.app.handle_request(request)

    async def _receive_body(self, request: Request, receive: ASGIReceiveCallable) -> None:
        """Receive the body as far as it is admitted."""
        scope = scope_of(self.scope)
        entry = scope.entry
        is_small = entry.expected_bytes <= self.app.config["SMALL_BODY_BYTES"]
        if entry.waits_for_leave or not is_small:
            await entry.wait_decided()
            if not entry.is_turned_away:
                await scope.connection.channel.ask_for_body()
        while (message := await receive())["type"] == "http.request":
            data, is_last = message.get("body", b""), not message.get("more_body", False)
            is_kept = entry.receive(len(data)) and not entry.is_turned_away
            if is_kept:
                request.body.append(data)
            if is_last or not is_kept:
                request.body.set_complete()
            if is_last:
                entry.complete()
                return
        scope.note_client_gone()

    async def _send_response(self, send: ASGISendCallable, response: ResponseTypes) -> None:
        async def send_last_in_peace(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                with trio.CancelScope(shield=True) as scope:
                    scope.deadline = trio.current_time() + LAST_SEND_TIMEOUT_S
                    await send(message)
            else:
                await send(message)

        await super()._send_response(send_last_in_peace, response)


class PatchedQuart(QuartTrio):
    """The Quart application with adapted errors and views."""

    def ensure_async(self, func: Callable[P, Any]) -> Callable[P, Awaitable[Any]]:
        """Return an awaitable function. Synchronous functions run here; Quart would use a
        thread."""
        if iscoroutinefunction(func):
            return func

        async def call(*args: P.args, **kwargs: P.kwargs) -> object:
            return func(*args, **kwargs)

        return call

    def raise_routing_exception(self, request: BaseRequestWebsocket) -> NoReturn:
        """Raise the error for an unknown path or method."""
        error = request.routing_exception
        assert error is not None, "called only for a routing error"
        request.routing_exception = None
        try:
            raise error
        finally:
            del error  # this frame would keep it

    async def dispatch_websocket(
        self, websocket_context: WebsocketContext | None = None
    ) -> ResponseReturnValue | None:
        """Run the view of a WebSocket."""
        try:
            return await super().dispatch_websocket(websocket_context)
        except BaseExceptionGroup as group:
            if group.split(trio.Cancelled)[1] is None:
                await trio.lowlevel.checkpoint()  # raises a plain Cancelled
            raise
