"""The server side of one WebSocket: limits frames, requires pongs, and handles close."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from hypercorn.protocol.events import Body, EndBody, Response, StreamClosed
from hypercorn.protocol.ws_stream import ASGIWebsocketState, FrameTooLargeError, WSStream
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Message, Ping
from wsproto.frame_protocol import CloseReason

from ..api.door import TokenBucket
from ..api.errors import http_error
from ..contract.generation import CancelReason
from .connection_table import refusal

if TYPE_CHECKING:
    from hypercorn.protocol.events import Event
    from hypercorn.typing import ASGISendEvent, WebsocketAcceptEvent

    from triolet.config import ServerConfig

    from ..api.request_scope import ClientConnection


class PatchedWSStream(WSStream):
    """The WebSocket side of one connection.

    Attributes:
      bounds: limits; set by the protocol before the first event.
      remote: the client's connection; set likewise.
    """

    bounds: ServerConfig
    remote: ClientConnection
    _frames: TokenBucket
    _heard_at: float
    _is_over: trio.Event

    async def handle(self, event: Event) -> None:
        """Handle bytes, or the end of the connection."""
        await super().handle(event)
        if isinstance(event, StreamClosed) and self.handshake.accepted:
            self._is_over.set()

    async def app_send(self, message: ASGISendEvent | None) -> None:
        """Handle a message from the application; after the end, drop it at a checkpoint."""
        if self.closed:
            await trio.lowlevel.checkpoint()
        await super().app_send(message)

    def text_frame(self, data: bytes) -> bytes | None:
        """Return a text message as a frame; None if it cannot be sent now."""
        if self.state is not ASGIWebsocketState.CONNECTED or self.closed:
            return None
        if self.connection.state is not ConnectionState.OPEN:
            return None
        length = len(data)
        if length < 126:
            return b"\x81%c%b" % (length, data)
        if length < 65_536:
            return b"\x81\x7e%b%b" % (length.to_bytes(2, "big"), data)
        return b"\x81\x7f%b%b" % (length.to_bytes(8, "big"), data)

    async def _send_error_response(self, status_code: int) -> None:
        error = http_error(status_code, "the WebSocket handshake is refused")
        headers, body = refusal(error)
        await self.send(
            Response(stream_id=self.stream_id, status_code=status_code, headers=headers)
        )
        await self.send(Body(stream_id=self.stream_id, data=body))
        await self.send(EndBody(stream_id=self.stream_id))
        # hypercorn would leave the connection open, with nothing on it that ever reads.
        await self.send(StreamClosed(stream_id=self.stream_id))

    async def _accept(self, message: WebsocketAcceptEvent) -> None:
        self.handshake.extensions = None
        now = trio.current_time()
        self._frames = TokenBucket(self.bounds.ws_max_frames_per_s, now)
        self._heard_at = now
        self._is_over = trio.Event()
        await super()._accept(message)
        self.task_group.spawn(self._watch_pongs)

    async def _handle_events(self) -> None:
        now = self._heard_at = trio.current_time()
        for event in self.connection.events():
            if not self._frames.take(now):
                await self._fail(CloseReason.POLICY_VIOLATION)
                return
            if isinstance(event, Message):
                try:
                    self.buffer.extend(event)
                except FrameTooLargeError:
                    await self._fail(CloseReason.MESSAGE_TOO_BIG)
                    return
                if event.message_finished and self.app_put is not None:
                    await self.app_put(self.buffer.to_message())
                    self.buffer.clear()
            elif isinstance(event, Ping):
                await self._send_wsproto_event(event.response())
            elif isinstance(event, CloseConnection):
                await self._tell_app(event.code)
                if self.connection.state is ConnectionState.REMOTE_CLOSING:
                    await self._send_wsproto_event(event.response())
                elif self.connection.state is ConnectionState.OPEN:
                    # wsproto reports invalid data as a close that was never sent.
                    await self._send_wsproto_event(CloseConnection(code=event.code))
                await self.send(StreamClosed(stream_id=self.stream_id))
                return

    async def _tell_app(self, code: int) -> None:
        """Send the disconnect to the application before answering the close: the answer queues
        behind everything that the client has not read, perhaps for ever."""
        if code == CloseReason.GOING_AWAY:
            self.remote.disconnect_reason = CancelReason.WENT_AWAY
        put, self.app_put = self.app_put, None
        if put is not None:
            await put({"type": "websocket.disconnect", "code": code})

    async def _fail(self, code: CloseReason) -> None:
        await self._send_wsproto_event(CloseConnection(code=code))
        await self.send(StreamClosed(stream_id=self.stream_id))

    async def _watch_pongs(self) -> None:
        while True:
            with trio.move_on_after(self.bounds.ws_ping_s):
                await self._is_over.wait()
                return
            if trio.current_time() - self._heard_at > self.bounds.ws_pong_timeout_s:
                await self._fail(CloseReason.GOING_AWAY)
                return
            await self._send_wsproto_event(Ping())
