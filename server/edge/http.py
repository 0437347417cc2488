"""One HTTP/1.1 connection: validates request heads strictly, bounds how many requests start per
turn, and writes answers.

h11 is lenient where parsers may disagree: a bare line feed, a folded line, Content-Length beside
Transfer-Encoding, a target in absolute form. A proxy that reads such a head differently would see
other requests than this server (request smuggling), so all of these are refused.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol, cast

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, Data, EndBody, Request, Response, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.worker_context import WorkerContext

from triolet.errors import RequestError

from ..api.door import RefusalLog
from ..api.errors import http_error, too_large
from ..api.gateway_hints import FAIRNESS_ID, OBJECTIVE
from ..api.request_scope import SCOPE_KEY, ClientChannel, RequestScope, scope_of
from .client_address import PROXY_SIGNATURE, TrustedProxies
from .connection_table import ConnectionTable, refusal
from .websocket import PatchedWSStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.config import Config
    from hypercorn.events import Event
    from hypercorn.protocol.events import Event as StreamEvent
    from hypercorn.trio.task_group import TaskGroup
    from hypercorn.typing import ASGIFramework, ASGISendEvent

    from triolet.config import ServerConfig

    from ..api.request_scope import ClientConnection
    from ..peers.host_secret import HostSecret
    from .connection_table import ConnectionPlace


_OF_GATEWAY: Final = frozenset({FAIRNESS_ID.encode(), OBJECTIVE.encode()})
PROBES: Final = (b"GET /health/live ", b"GET /ping ")
"""Probes of an orchestrator, which kills a process that answers too late."""


class RequestTurns:
    """Bounds the requests that start in one turn of the event loop.

    Senders take turns, so one with many connections does not delay one with few.

    Args:
      per_turn: maximum requests that start in one turn.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: OrderedDict[bytes, trio.lowlevel.ParkingLot] = OrderedDict()
        self._is_counting = False

    async def wait(self, sender: bytes) -> None:
        """Wait until a request may start: at once, or in a later turn.

        Args:
          sender: key of the sender; a sender's requests queue behind each other.
        """
        self._count_turn()
        if self._left and not self._waiting:
            self._left -= 1
        else:
            await self._waiting.setdefault(sender, trio.lowlevel.ParkingLot()).park()

    def _count_turn(self) -> None:
        """Schedule `_next_turn` for the next turn of the event loop."""
        if not self._is_counting:
            self._is_counting = True
            trio.lowlevel.current_trio_token().run_sync_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_counting = False
        self._left = self._per_turn
        while self._left and self._waiting:
            sender, lot = self._waiting.popitem(last=False)
            self._left -= len(lot.unpark())
            if lot:
                self._waiting[sender] = lot
        if self._left < self._per_turn:
            self._count_turn()


class SharedByConnections:
    """What all connections of the edge share.

    Attributes:
      app: the ASGI application.
      bounds: limits of connections and requests.
      config: hypercorn's config.
      context: hypercorn's worker context.
      places: the table of connections.
      writes: number of writes to clients; `direct` ones did not wake a task.
      turns: bounds the requests that start per turn.
      proxies: proxies that may name another client.
      host_secret: requests with it may name another client too; None without other hosts.
      refusals: logs requests refused before the application sees them.
    """

    def __init__(
        self,
        app: ASGIFramework,
        bounds: ServerConfig,
        config: Config,
        host_secret: HostSecret | None,
    ) -> None:
        self.app = ASGIWrapper(app)
        self.bounds = bounds
        self.config = config
        self.context = WorkerContext(max_requests=None)
        self.places = ConnectionTable(bounds.max_connections, bounds.address_connections)
        self.writes = {"direct": 0, "usual": 0}
        self.turns = RequestTurns(bounds.requests_per_turn)
        self.proxies = TrustedProxies(bounds.trusted_proxies)
        self.host_secret = host_secret
        self.refusals = RefusalLog(bounds.door)


_END = b"\r\n\r\n"
_PROXY_PROTOCOL = PROXY_SIGNATURE.lstrip(b"\r\n")
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\0")
_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/(\d\.\d)")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_KEY = re.compile(rb"\r\n(?:authorization|x-api-key):([^\r\n]*)", re.IGNORECASE)
_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding", b"content-type"})


class HeadGuard:
    """Collects and validates the head of one request after another on a connection."""

    def __init__(self, max_bytes: int, max_fields: int, max_body_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_fields = max_fields
        self._max_body_bytes = max_body_bytes
        self._held = bytearray()

    @property
    def has_begun(self) -> bool:
        """Whether part of a head is waiting for the rest."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes | None:
        """Add bytes that start or continue a head.

        Returns:
          The complete head and any bytes after it; None while it is incomplete.

        Raises:
          RequestError: the head is refused; the connection must not be used any more.
        """
        self._held += data
        # Some old clients send an empty line after a body; ignore it.
        while self._held.startswith(b"\r\n"):
            del self._held[:2]
        end = self._held.find(_END)
        head = bytes(self._held[:end] if end >= 0 else self._held)
        if end < 0 and head.endswith(b"\r"):
            head = head[:-1]  # its line feed may be on its way
        if head.startswith(_PROXY_PROTOCOL):
            raise http_error(400, "PROXY protocol from an address that is not in --trusted-proxies")
        if _BARE.search(head):
            raise http_error(400, "the request's head contains a bare CR, LF or NUL")
        if len(head) > self._max_bytes:
            raise http_error(431, f"the request's head is larger than {self._max_bytes} bytes")
        if end < 0:
            return None
        self._check(head)
        whole = bytes(self._held)
        self._held.clear()
        return whole

    def _check(self, head: bytes) -> None:
        line, *fields = head.split(b"\r\n")
        version = self._check_request_line(line)
        if len(fields) > self._max_fields:
            raise http_error(431, f"the request has more than {self._max_fields} header fields")
        values: dict[bytes, bytes] = {}
        for text in fields:
            name, colon, value = text.partition(b":")
            if not colon or not _NAME.fullmatch(name):
                raise http_error(400, "a header field is malformed or folded")
            name = name.lower()
            if name in _ONCE and name in values:
                raise http_error(400, f"the header {name.decode()} occurs twice")
            if name.startswith(b"sec-websocket-") and not value.isascii():
                # wsproto assumes that they are ASCII and raises.
                raise http_error(400, f"the header {name.decode()} is not ASCII")
            values[name] = value.strip(b" \t")
        self._check_framing(values, version)

    def _check_request_line(self, line: bytes) -> bytes:
        match = _REQUEST_LINE.fullmatch(line)
        if match is None:
            raise http_error(400, "the request line is malformed")
        _, target, version = match.groups()
        if version not in {b"1.0", b"1.1"}:
            raise http_error(
                505, "only HTTP/1.1 is supported here; use a proxy in front for HTTP/2"
            )
        if not target.startswith(b"/") or target.startswith(b"//"):
            raise http_error(400, "the request target is not a path")
        return version

    def _check_framing(self, values: dict[bytes, bytes], version: bytes) -> None:
        length = values.get(b"content-length")
        encoding = values.get(b"transfer-encoding")
        if encoding is not None:
            if length is not None or version == b"1.0":
                raise http_error(400, "Transfer-Encoding beside Content-Length or in HTTP/1.0")
            if encoding.lower() != b"chunked":
                raise http_error(400, "the only supported Transfer-Encoding is chunked")
        if length is not None:
            if not length.isdigit() or len(length) > 15:
                raise http_error(400, "Content-Length is not a number of bytes")
            if int(length) > self._max_body_bytes:
                raise too_large(self._max_body_bytes)


UNKNOWN_PORT: Final = 0
"""Port of a client named by a proxy: few proxies name the port."""
NO_BODY: Final = frozenset({204, 304})
MAX_HELD_BYTES: Final = 64 * 1024
"""Maximum bytes of following requests held while an answer runs; beyond it the connection is
cut."""


class PatchedHTTPStream(HTTPStream):
    """One request and its answer.

    Attributes:
      send_chunk: sends a piece of a chunked body; set by the protocol before the first event.
    """

    send_chunk: Callable[[bytes], Awaitable[bool]]

    async def handle(self, event: StreamEvent) -> None:
        """Handle an event from the client."""
        if isinstance(event, StreamClosed):
            scope_of(self.scope).note_client_gone()
        await super().handle(event)

    async def app_send(self, message: ASGISendEvent | None) -> None:
        """Handle a message from the application."""
        if (
            message is not None
            and message["type"] == "http.response.body"
            and message.get("more_body", False)
            and await self.send_chunk(message.get("body", b""))
        ):
            return
        await super().app_send(message)
        if message is not None and message["type"] == "http.response.start":
            self.response["headers"] = ()  # sent; an idle stream would keep a KiB of headers


class ConnectionBelow(Protocol):
    """The connection below the protocol (server/edge/tcp.py).

    Attributes:
      place: its place in the table of connections.
    """

    place: ConnectionPlace

    async def protocol_send(self, event: Event) -> None:
        """Apply the protocol's event: write, close, or start and stop the idle timeout."""
        ...

    def try_write(self, data: bytes) -> bool:
        """Write without waiting; return whether anything was written."""
        ...


class PatchedH11Protocol(ClientChannel, H11Protocol):
    """One HTTP/1.1 connection, which may become a WebSocket.

    Attributes:
      remote: the connection as its requests see it.
    """

    def __init__(
        self,
        edge: SharedByConnections,
        task_group: TaskGroup,
        addresses: tuple[tuple[str, int] | None, tuple[str, int] | None],
        remote: ClientConnection,
        below: ConnectionBelow,
    ) -> None:
        client, server = addresses
        super().__init__(
            edge.app, edge.config, edge.context, task_group,
            {}, False, client, server, below.protocol_send,  # type: ignore[arg-type]
        )  # fmt: skip
        remote.channel = self
        self.remote = remote
        self._bounds = bounds = edge.bounds
        self._guard = HeadGuard(
            bounds.max_header_bytes, bounds.max_header_fields, bounds.max_body_bytes
        )
        self._held = bytearray()
        self._proxies, self._host_secret = edge.proxies, edge.host_secret
        self._refusals = edge.refusals
        self._speaks_for_others = remote.is_unix or self._proxies.trusts(remote.host)
        self._below = below
        self._turns = edge.turns
        self._sender = b""
        self._is_in_turn = False
        self._is_in_chunks = False
        self._num_chunks = self._num_body_bytes = 0

    @property
    def awaits_head(self) -> bool:
        """Whether a request's head is incomplete."""
        return self._guard.has_begun

    @property
    def can_continue(self) -> bool:
        """Whether held bytes can be handled now, with `RawData(b"")`."""
        return bool(self._held) and self.connection.their_state is h11.IDLE

    @property
    def has_had_request(self) -> bool:
        """Whether this connection has received a request."""
        return self.keep_alive_requests > 0

    def speak_for(self, host: str | None) -> None:
        """Set the client for which a proxy opened this connection. None means that the proxy named
        no address; then the client's headers about other clients are not trusted."""
        if host is not None:
            self.remote.is_forwarding = True
            self.client = (host, UNKNOWN_PORT)
        self._speaks_for_others = host is not None and self._proxies.trusts(host)

    async def handle(self, event: Event) -> None:
        """Handle bytes from the client, or the end of the connection."""
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
        """See ClientChannel."""
        if self._is_in_chunks:
            return self._below.try_write(b"%x\r\n%b\r\n" % (len(data), data))
        if isinstance(self.stream, PatchedWSStream):
            frame = self.stream.text_frame(data)
            return frame is not None and self._below.try_write(frame)
        return False

    async def send_chunk(self, data: bytes) -> bool:
        """Send a piece of a body of unknown length; return False if there is no such body.

        Bypasses h11's events, because each one costs more than the write itself.
        """
        if not (data and self._is_in_chunks):
            return False
        await self.send(RawData(data=b"%x\r\n%b\r\n" % (len(data), data)))
        return True

    async def ask_for_body(self) -> None:
        """Send 100 Continue if the client waits for it before sending its body."""
        connection = self.connection
        is_waiting = connection.our_state is h11.SEND_RESPONSE
        if is_waiting and connection.they_are_waiting_for_100_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    def note_key(self) -> None:
        """See ClientChannel."""
        self._below.place.has_shown_key = True

    async def stream_send(self, event: StreamEvent) -> None:
        """Handle an event of the stream."""
        is_chunked = False
        if isinstance(event, Response) and isinstance(self.stream, HTTPStream):
            # The same rule as in h11: RFC 9112, 6.3.
            is_chunked = (
                self.stream.scope["http_version"] == "1.1"
                and self.stream.scope["method"] != "HEAD"
                and event.status_code not in NO_BODY
                and not any(name.lower() == b"content-length" for name, _ in event.headers)
            )
        if not isinstance(event, Body):
            self._is_in_chunks = False
        await super().stream_send(event)
        if is_chunked:
            self._is_in_chunks = self.connection.our_state is h11.SEND_BODY

    async def refuse(self, error: RequestError) -> None:
        """Answer with an error, if still possible, and close."""
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
        """Handle the start of a request, which waits for its turn unless it is a probe."""
        # The key is unchecked here: made-up keys queue like those of unknown clients.
        key = _KEY.search(data, 0, self._bounds.max_header_bytes)
        self._sender = key[1] if key else self.remote.host.encode()
        if not data.startswith(PROBES):
            await self._turns.wait(self._sender)
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
        # hypercorn would send 100 Continue here; `ask_for_body` does once the request is accepted.
        while True:
            if self.connection.their_state is h11.MUST_CLOSE:
                return
            try:
                event = self.connection.next_event()
                self._check_chunks(event)
            except RequestError as error:
                await self.refuse(error)
                return
            except h11.RemoteProtocolError as error:
                reason, _, _ = str(error).partition(":")  # h11 shows raw bytes after the colon
                await self.refuse(http_error(400, f"the request is malformed: {reason}"))
                return
            if isinstance(event, h11.Request):
                await self.send(Updated(idle=False))
                await self._create_stream(event)
            elif self.stream is None or event is h11.NEED_DATA:
                return
            elif isinstance(event, h11.Data):
                await self.stream.handle(Body(stream_id=STREAM_ID, data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                await self._end_body()
            elif isinstance(event, Data):
                await self.stream.handle(event)
            else:
                return

    async def _end_body(self) -> None:
        if not self._is_in_turn:  # the body came later, and processing it starts now
            await self._turns.wait(self._sender)
        if self.stream is not None:  # a request that was already answered has none
            await self.stream.handle(EndBody(stream_id=STREAM_ID))

    def _check_chunks(self, event: object) -> None:
        """Refuse a body because of the size of a started chunk or the number of its chunks.

        h11 passes on a chunk as it arrives and accepts sizes of 20 digits; only h11 knows the size.
        """
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_body_bytes += len(event.data)
        bounds, num_bytes = self._bounds, self._num_body_bytes
        reader = getattr(self.connection, "_reader", None)
        if num_bytes + getattr(reader, "_bytes_in_chunk", 0) > bounds.max_body_bytes:
            raise too_large(bounds.max_body_bytes)
        if self._num_chunks > bounds.free_chunks + num_bytes / bounds.min_chunk_bytes:
            raise http_error(
                400,
                f"the request's body came in {self._num_chunks} chunks of {num_bytes} bytes in all;"
                f" beyond {bounds.free_chunks} chunks, one more is allowed per "
                f"{bounds.min_chunk_bytes} bytes: send larger chunks, or the body with a "
                "Content-Length",
            )

    async def _create_stream(self, request: h11.Request) -> None:
        names = dict(request.headers)
        secret = self._host_secret
        is_trusted = self._speaks_for_others or (secret and secret.is_in(request.headers))
        upgrades = b"upgrade" in [
            token.strip() for token in names.get(b"connection", b"").lower().split(b",")
        ]
        is_websocket = (
            upgrades and names.get(b"upgrade", b"").lower() == b"websocket"
        ) and request.method == b"GET"
        kind = PatchedWSStream if is_websocket else PatchedHTTPStream
        self._is_in_chunks = False
        self._num_chunks = self._num_body_bytes = 0
        self.stream = kind(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self._client_of(request) if is_trusted else self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        if isinstance(self.stream, PatchedHTTPStream):
            self.stream.send_chunk = self.send_chunk
        if isinstance(self.stream, PatchedWSStream):
            self.stream.bounds = self._bounds
            self.stream.remote = self.remote
            self.connection = H11WSConnection(cast("h11.Connection", self.connection))
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=[one for one in request.headers if is_trusted or one[0] not in _OF_GATEWAY],
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii"),
                raw_path=request.target,
                state={SCOPE_KEY: RequestScope(self.remote, request.headers)},  # type: ignore[arg-type]
            )
        )
        self.keep_alive_requests += 1

    def _client_of(self, request: h11.Request) -> tuple[str, int] | None:
        """Return the client of a request from a trusted proxy or another host."""
        host = self._proxies.client_of(request.headers)
        return self.client if host is None else (host, UNKNOWN_PORT)

    async def _maybe_recycle(self) -> None:
        await self._close_stream()
        states = {self.connection.our_state, self.connection.their_state}
        if states == {h11.DONE} and not self.context.terminated.is_set():
            # Use a new parser: the old one's next cycle would read the bytes after the last
            # request, bypassing the guard.
            self._held[:0] = self.connection.trailing_data[0]
            self.connection = h11.Connection(
                h11.SERVER, max_incomplete_event_size=self._bounds.max_header_bytes
            )
            await self.send(Updated(idle=True))
        else:
            await self.send(Closed())
