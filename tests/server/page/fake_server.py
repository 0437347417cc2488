"""A fake server for tests of the chat page: it sends only what a test tells it to send.

Speaks the WebSocket protocol of /v1/responses and serves the page under the strictest policy; knows
no model. Every wait of a test on it has a deadline.
"""

from __future__ import annotations

import json
import mimetypes
import queue
import threading
import weakref
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

STATIC = Path(__file__).parents[3] / "server" / "static"
PAGES = {"/": "index.html", "/dashboard": "dashboard.html", "/docs": "api.html"}
DEMO_WORDS = json.loads((Path(str(files("triolet") / "demo")) / "page.json").read_text())
WAIT_S = 60.0
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


KEPT = "max-age=3600"
"""For scripts and styles: fetching and compiling them takes most of the time of a page load."""


class Exchange:
    """One response.create or response.resume, and what the test lets the server say to it."""

    def __init__(
        self,
        connection: ServerConnection,
        closed: threading.Event,
        request: dict[str, Any],
    ) -> None:
        self.request = request
        self._lane = request["stream_id"]
        self._closed = closed
        self._cancelled = threading.Event()
        self._connection = connection
        self._sequence = request.get("sequence_number", -1) + 1

    @property
    def messages(self) -> list[tuple[str, str]]:
        """The input as (role, content)."""
        return [(item["role"], item["content"]) for item in self.request["input"]]

    def created(self) -> Exchange:
        """Say that the response exists."""
        self._response_event("response.created", "in_progress")
        return self

    def say(self, *pieces: str) -> Exchange:
        """Stream pieces of text."""
        for piece in pieces:
            where = {"item_id": "msg_0", "output_index": 0, "content_index": 0, "logprobs": []}
            self._send({"type": "response.output_text.delta", "delta": piece, **where})
        return self

    def think(self, *pieces: str) -> Exchange:
        """Stream pieces of reasoning."""
        for piece in pieces:
            where = {"item_id": "rs_0", "output_index": 0, "content_index": 0}
            self._send({"type": "response.reasoning_text.delta", "delta": piece, **where})
        return self

    def complete(self, output_tokens: int) -> None:
        """End well."""
        self._response_event("response.completed", "completed", usage=usage(output_tokens))

    def incomplete(self, output_tokens: int, reason: str = "cancelled") -> None:
        """End early: at the length limit, or because the page cancelled."""
        details = {"reason": reason}
        self._response_event(
            "response.incomplete",
            "incomplete",
            usage=usage(output_tokens),
            incomplete_details=details,
        )

    def refuse(
        self, status: int, code: str, message: str, param: str | None = None, **headers: str
    ) -> None:
        """End with an error event."""
        error = {"type": "error", "code": code, "message": message, "headers": headers}
        error |= {} if param is None else {"param": param}
        self._send({"type": "error", "status": status, "error": error})

    def fail(self, code: str, message: str, output_tokens: int = 1) -> None:
        """End with a response that failed."""
        error = {"code": "server_error", "type": code, "message": message}
        self._response_event("response.failed", "failed", error=error, usage=usage(output_tokens))

    def say_raw(self, text: str) -> None:
        """Send a message that is none of the protocol's."""
        self._connection.send(text)

    def close(self, code: int) -> None:
        """Close the connection with a code."""
        self._connection.close(code)

    def note_cancel(self) -> None:
        """The page asked to cancel this response."""
        self._cancelled.set()

    def wait_cancelled(self) -> None:
        """Wait until the page has cancelled it."""
        assert self._cancelled.wait(WAIT_S), "the page did not cancel"

    def wait_connection_closed(self) -> None:
        """Wait until the page has closed the connection it came on."""
        assert self._closed.wait(WAIT_S), "the page did not close the connection"

    @property
    def close_code(self) -> int | None:
        """What the page said as it closed the connection; 1001 when it went away."""
        return self._connection.close_code

    def _response_event(self, kind: str, status: str, **more: Any) -> None:  # noqa: ANN401
        response = {"id": f"resp_{self._lane}", "object": "response", "status": status, **more}
        self._send({"type": kind, "response": response})

    def _send(self, event: dict[str, Any]) -> None:
        where = {"sequence_number": self._sequence, "stream_id": self._lane}
        self._connection.send(json.dumps(event | where))
        self._sequence += 1


def usage(output_tokens: int) -> dict[str, Any]:
    """Return the usage record of an answer to a short question."""
    return {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": output_tokens,
        "total_tokens": 7 + output_tokens,
    }


class Sockets:
    """Connections of one life of the server, whatever has come on them."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[ServerConnection] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_cut = False

    def add(self, connection: ServerConnection) -> None:
        """Note a connection, or cut it if the others are."""
        with self._lock:
            self._all.add(connection)
            is_cut = self._is_cut
        if is_cut:
            connection.close_socket()

    def cut(self) -> None:
        """Cut all of them, and each that is still added."""
        with self._lock:
            self._is_cut = True
            connections = list(self._all)
        for connection in connections:
            connection.close_socket()


class FakeServer:
    """Serves the page and hands each of its requests to the test."""

    def __init__(self, port: int) -> None:
        self.models = ["triolet-demo"]
        self.roots: dict[str, str] = {}
        self.page_words: dict[str, Any] | None = {**DEMO_WORDS, "has_chat_template": True}
        self.wants_key = False
        self.status: dict[str, Any] = {}
        self.history: dict[str, Any] = {
            **{"at_s": [], "all": {}, "models": {}, "tenants": {}, "objectives": {}}
        }
        self.slo: dict[str, Any] = {"is_frozen": False, "reason": "", "objectives": []}
        self.rollouts: list[dict[str, Any]] = []
        self.status_refused: HTTPStatus | None = None
        self.answers_handshakes = threading.Event()
        self.answers_handshakes.set()
        self.answers_models = threading.Event()
        self.answers_models.set()
        self._asked_for_models = threading.Semaphore(0)
        self._exchanges: queue.Queue[Exchange] = queue.Queue(maxsize=16)
        self._by_lane: dict[str, Exchange] = {}
        self._connections: set[ServerConnection] = set()
        self._sockets = Sockets()
        self._port = port
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        """Listen, on the same port as before."""
        sockets = self._sockets = Sockets()

        class Connection(ServerConnection):
            def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401
                super().__init__(*args, **options)
                sockets.add(self)

        server = serve(
            self._converse,
            "127.0.0.1",
            self._port,
            process_request=self._process,
            select_subprotocol=lambda _, offered: "triolet" if "triolet" in offered else None,
            compression=None,
            create_connection=Connection,
        )
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join(WAIT_S)
        self._server = None
        self.drop()

    def stop_for_good(self) -> None:
        """Stop when no page is left that could miss an answer.

        A server waits ten seconds for the request of a connection that Chromium has opened ahead of
        need, and as long for a page that is gone to say goodbye.
        """
        self._sockets.cut()
        self.stop()

    def drop(self) -> None:
        """Cut every connection without a word; the page may come again."""
        for connection in list(self._connections):
            connection.close_socket()

    def next_exchange(self) -> Exchange:
        """Wait for the page's next request."""
        return self._exchanges.get(timeout=WAIT_S)

    def wait_for_question_about_models(self) -> None:
        """Wait until the page asks which models there are; what the answer says is settled then."""
        assert self._asked_for_models.acquire(timeout=WAIT_S), "the page did not ask"

    @property
    def is_quiet(self) -> bool:
        """Whether no request waits to be taken by the test."""
        return self._exchanges.empty()

    def _converse(self, connection: ServerConnection) -> None:
        closed = threading.Event()
        try:
            for event in events_of(connection):
                self._take(connection, closed, event)
        finally:
            closed.set()
            self._connections.discard(connection)

    def _take(
        self, connection: ServerConnection, closed: threading.Event, event: dict[str, Any]
    ) -> None:
        if event["type"] == "response.cancel":
            self._by_lane[event["stream_id"]].note_cancel()
            return
        assert event["type"] in {"response.create", "response.resume"}
        exchange = Exchange(connection, closed, event)
        self._by_lane[event["stream_id"]] = exchange
        self._exchanges.put(exchange, timeout=WAIT_S)

    def _process(self, connection: ServerConnection, request: Request) -> Response | None:
        if self.wants_key and request.path.startswith("/v1/"):
            return reply(b"{}", "application/json", HTTPStatus.UNAUTHORIZED)
        if request.path == "/v1/responses":
            assert self.answers_handshakes.wait(WAIT_S)
            # Before the page can know that it is connected: a test may cut it the moment it does.
            self._connections.add(connection)
            return None
        if request.path == "/v1/models":
            cards = [
                model_card(name, self.roots.get(name, name)) | {"page": self.page_words}
                for name in self.models
            ]
            listed = {"object": "list", "data": cards}
            self._asked_for_models.release()
            assert self.answers_models.wait(WAIT_S)
            return reply(json.dumps(listed).encode(), "application/json")
        if request.path == "/fleet/status":
            if self.status_refused is not None:
                return reply(b"{}", "application/json", self.status_refused)
            return reply(json.dumps(self.status).encode(), "application/json")
        documents = {
            "/fleet/history": self.history,
            "/admin/slo": self.slo,
            "/fleet/rollouts": {"object": "list", "data": self.rollouts},
        }
        if request.path in documents:
            return reply(json.dumps(documents[request.path]).encode(), "application/json")
        name = PAGES.get(request.path) or request.path.removeprefix("/static/")
        if name not in {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*")}:
            return reply(b"not found", "text/plain", HTTPStatus.NOT_FOUND)
        media_type = mimetypes.guess_type(name)[0]
        assert media_type is not None, f"no media type for {name}"
        caching = "no-store" if name in PAGES.values() else KEPT
        return reply((STATIC / name).read_bytes(), media_type, caching=caching)


def model_card(name: str, root: str) -> dict[str, Any]:
    """Return how a model is listed under one of its names; `root` is its own."""
    return {"id": name, "object": "model", "root": root}


def events_of(connection: ServerConnection) -> Iterator[dict[str, Any]]:
    """Yield what the page sends until the connection ends, however it ends."""
    while True:
        try:
            yield json.loads(connection.recv())
        except ConnectionClosed:
            return


def reply(
    body: bytes,
    media_type: str,
    status: HTTPStatus = HTTPStatus.OK,
    caching: str = "no-store",
) -> Response:
    """Make a response under the strict policy."""
    headers = Headers(
        {
            "Content-Type": media_type,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": caching,
            "Connection": "close",
        }
    )
    return Response(status.value, status.phrase, headers, body)
