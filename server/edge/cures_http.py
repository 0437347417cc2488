"""HTTP/1.1 on one connection: hypercorn's protocol with what it lets through closed.

Cleartext HTTP/2 is refused: hypercorn cannot be told not to speak it, and one stream whose window
stays at zero makes it buffer without bound (its buffer is declared drained by a read of nothing).
The preface ends in 505, `Upgrade: h2c` is ignored as RFC 9110 7.8 allows; a proxy in front speaks
HTTP/2 to the world.

hypercorn says 100 Continue wherever it is asked for, before the application has seen the request.
Here the application does, once it is to have the body: what is refused at its door is never sent.

hypercorn stops reading when bytes come behind a request whose answer is not complete, and who does
not read does not see the client leave. Here reading goes on: a bounded number of such bytes is held
until the answer is out. A client may rightly send some: it has the whole answer before we have done
what follows its last byte.

Touches names that hypercorn does not promise: the exact version is pinned, and tests/server/edge
holds the behaviour.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final, cast

import h11
import trio
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, Data, EndBody, Request, Response
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection
from hypercorn.protocol.http_stream import HTTPStream

from triolet.errors import RequestError

from ..api.errors import http_error
from ..api.live import CONTINUE_KEY, DEPARTURE_KEY, PEER_KEY, SHORTCUT_KEY, Departure
from .cures_inbox import AppInbox
from .cures_websocket import CuredWSStream
from .head_guard import HeadGuard
from .refusal import refusal
from .request_turns import PROBES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.config import Config
    from hypercorn.events import Event
    from hypercorn.protocol.events import Event as StreamEvent
    from hypercorn.trio.task_group import TaskGroup
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import AppWrapper, ASGISendEvent

    from triolet.config import ServerConfig

    from ..api.live import Peer
    from ..door import RefusalLog
    from .client_address import TrustedProxies
    from .request_turns import RequestTurns

UNKNOWN_PORT: Final = 0
"""Of a client that a proxy names: few name the port."""
NO_BODY: Final = frozenset({204, 304})
MAX_HELD_BYTES: Final = 64 * 1024
"""Of following requests, while an answer is under way; beyond, the connection is cut."""


class CuredHTTPStream(HTTPStream):
    """One request and its answer.

    Attributes:
      inbox: set by the protocol before the first event.
      send_chunk: as well.
    """

    inbox: AppInbox
    send_chunk: Callable[[bytes], Awaitable[bool]]

    async def handle(self, event: StreamEvent) -> None:
        """Take in what the client sends."""
        await super().handle(event)
        if isinstance(event, Request):
            self.app_put = self.inbox.in_front_of(self.app_put)

    async def app_send(self, message: ASGISendEvent | None) -> None:
        """Take what the application answers."""
        if message is None:
            self.inbox.close()
        elif (
            message["type"] == "http.response.body"
            and message.get("more_body", False)
            and await self.send_chunk(message.get("body", b""))
        ):
            return
        await super().app_send(message)


class CuredH11Protocol(H11Protocol):
    """One HTTP/1.1 connection, which may become a WebSocket.

    Attributes:
      departure: how its client went, for what runs for it.
    """

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        bounds: ServerConfig,
        context: WorkerContext,
        task_group: TaskGroup,
        addresses: tuple[tuple[str, int] | None, tuple[str, int] | None],
        peer: Peer,
        proxies: TrustedProxies,
        refusals: RefusalLog,
        send: Callable[[Event], Awaitable[None]],
        try_write: Callable[[bytes], bool],
        turns: RequestTurns,
    ) -> None:
        client, server = addresses
        self.departure = Departure()
        state = {
            DEPARTURE_KEY: self.departure,
            SHORTCUT_KEY: self,
            CONTINUE_KEY: self.ask_for_body,
            PEER_KEY: peer,
        }
        super().__init__(
            app, config, context, task_group, state, False, client, server, send  # type: ignore[arg-type]
        )  # fmt: skip
        self._bounds = bounds
        self._guard = HeadGuard(
            bounds.max_header_bytes, bounds.max_header_fields, bounds.max_body_bytes
        )
        self._held = bytearray()
        self._peer = peer
        self._proxies = proxies
        self._refusals = refusals
        self._speaks_for_others = peer.is_unix or proxies.trusts(peer.host)
        self._try_write = try_write
        self._turns = turns
        self._is_in_turn = False
        self._is_chunked = False

    @property
    def awaits_head(self) -> bool:
        """Whether a request's head has begun and is not complete."""
        return self._guard.has_begun

    @property
    def can_continue(self) -> bool:
        """Whether bytes are held that can be handled now, with `RawData(b"")`."""
        return bool(self._held) and self.connection.their_state is h11.IDLE

    @property
    def has_had_request(self) -> bool:
        """Whether any request has come on this connection."""
        return self.keep_alive_requests > 0

    def speak_for(self, host: str) -> None:
        """Take in for which client a proxy has opened this connection."""
        self._peer.is_forwarding = True
        self.client = (host, UNKNOWN_PORT)
        self._speaks_for_others = self._proxies.trusts(host)

    async def handle(self, event: Event) -> None:
        """Take bytes from the client, or the news that it is gone."""
        if not isinstance(event, RawData) or isinstance(self.connection, H11WSConnection):
            await super().handle(event)
            return
        if self.connection.their_state is h11.IDLE:
            held, self._held = bytes(self._held), bytearray()
            await self._begin(held + event.data)
        elif self.connection.their_state is h11.SEND_BODY:
            await super().handle(event)
        else:
            self._held += event.data
            if len(self._held) > MAX_HELD_BYTES:
                await self.send(Closed())

    def try_send(self, data: bytes) -> bool:
        """See Shortcut."""
        if self._is_chunked:
            in_body = self.connection.our_state is h11.SEND_BODY
            return in_body and self._try_write(b"%x\r\n%b\r\n" % (len(data), data))
        if isinstance(self.stream, CuredWSStream):
            frame = self.stream.text_frame(data)
            return frame is not None and self._try_write(frame)
        return False

    async def send_chunk(self, data: bytes) -> bool:
        """Send a piece of a body whose length is not known; return False for any other.

        One write, and none of h11's events, of which each costs more than the write.
        """
        if not (data and self._is_in_chunks):
            return False
        await self.send(RawData(data=b"%x\r\n%b\r\n" % (len(data), data)))
        return True

    async def ask_for_body(self) -> None:
        """Say 100 Continue, if the client waits for that before it sends its body."""
        connection = self.connection
        is_waiting = connection.our_state is h11.SEND_RESPONSE
        if is_waiting and connection.they_are_waiting_for_100_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def stream_send(self, event: StreamEvent) -> None:
        """Take what the stream wants said."""
        if isinstance(event, Response) and isinstance(self.stream, HTTPStream):
            # As h11 decides it: RFC 9112, 6.3.
            self._is_chunked = (
                self.stream.scope["http_version"] == "1.1"
                and self.stream.scope["method"] != "HEAD"
                and event.status_code not in NO_BODY
                and not any(name.lower() == b"content-length" for name, _ in event.headers)
            )
        await super().stream_send(event)

    @property
    def _is_in_chunks(self) -> bool:
        return self._is_chunked and self.connection.our_state is h11.SEND_BODY

    async def refuse(self, error: RequestError) -> None:
        """Answer with an error, if an answer is possible, and close."""
        client = self.client[0] if self.client else None
        self._refusals.tell(error, trio.current_time(), client=client, where="edge")
        if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            headers, body = refusal(error)
            await self._send_h11_event(
                h11.Response(
                    status_code=error.status,
                    headers=list(chain(headers, self.config.response_headers("h11"))),
                )
            )
            await self._send_h11_event(h11.Data(data=body))
            await self._send_h11_event(h11.EndOfMessage())
        await self.send(Closed())

    async def _begin(self, data: bytes) -> None:
        """Take the beginning of a request, which waits for its turn unless it is a probe."""
        if not data.startswith(PROBES):
            await self._turns.wait()
        self._is_in_turn = True
        try:
            await self._take_head(data)
        finally:
            self._is_in_turn = False

    async def _take_head(self, data: bytes) -> None:
        try:
            whole = self._guard.feed(data)
        except RequestError as error:
            await self.refuse(error)
            return
        if whole is not None:
            await super().handle(RawData(data=whole))

    async def _handle_events(self) -> None:
        # hypercorn says 100 Continue here; `ask_for_body` does once the request is let in.
        while True:
            if self.connection.their_state is h11.MUST_CLOSE:
                return
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                await self.refuse(http_error(400, f"the request is malformed: {error}"))
                return
            if isinstance(event, h11.Request):
                await self.send(Updated(idle=False))
                await self._create_stream(event)
            elif self.stream is None or event is h11.NEED_DATA:
                return
            elif isinstance(event, h11.Data):
                await self.stream.handle(Body(stream_id=STREAM_ID, data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                if not self._is_in_turn:  # the body came later: what is made of it begins now
                    await self._turns.wait()
                await self.stream.handle(EndBody(stream_id=STREAM_ID))
            elif isinstance(event, Data):
                await self.stream.handle(event)
            else:
                return

    async def _create_stream(self, request: h11.Request) -> None:
        names = dict(request.headers)
        upgrades = b"upgrade" in [
            token.strip() for token in names.get(b"connection", b"").lower().split(b",")
        ]
        is_websocket = (
            upgrades and names.get(b"upgrade", b"").lower() == b"websocket"
        ) and request.method == b"GET"
        kind = CuredWSStream if is_websocket else CuredHTTPStream
        self._is_chunked = False
        self.stream = kind(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self._client_of(request),
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        self.stream.inbox = AppInbox()
        if isinstance(self.stream, CuredHTTPStream):
            self.stream.send_chunk = self.send_chunk
        if isinstance(self.stream, CuredWSStream):
            self.stream.bounds = self._bounds
            self.connection = H11WSConnection(cast("h11.Connection", self.connection))
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii"),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    def _client_of(self, request: h11.Request) -> tuple[str, int] | None:
        """Return the client that a request is of, which a trusted proxy may name."""
        host = self._proxies.client_of(request.headers) if self._speaks_for_others else None
        return self.client if host is None else (host, UNKNOWN_PORT)

    async def _maybe_recycle(self) -> None:
        await self._close_stream()
        states = {self.connection.our_state, self.connection.their_state}
        if states == {h11.DONE} and not self.context.terminated.is_set():
            # A new parser instead of the next cycle of the old one, which would read what came
            # behind the last request without the guard.
            self._held[:0] = self.connection.trailing_data[0]
            self.connection = h11.Connection(
                h11.SERVER, max_incomplete_event_size=self._bounds.max_header_bytes
            )
            await self.send(Updated(idle=True))
        else:
            await self.send(Closed())
