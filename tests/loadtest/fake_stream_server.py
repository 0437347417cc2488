"""A fake server for tests of the load test: it streams canned answers over SSE and WebSocket on one
port, complete or broken."""

from __future__ import annotations

import json
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from tests.threaded import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

PIECES = ("Once ", "upon ", "a ", "time.")
TOKENS = len(PIECES) + 1
"""Completion tokens of an answer: one per piece, and the end token."""
MODEL = "canned"


class StreamServer(ThreadingHTTPServer):
    """The server, with an HTTP handler and a WebSocket endpoint.

    Attributes:
      is_broken: whether streams stop before their end marker.
      seen: bodies of the requests received so far.
    """

    daemon_threads = True

    def __init__(self, *, is_broken: bool) -> None:
        super().__init__(("127.0.0.1", 0), StreamHandler)
        self.is_broken = is_broken
        self.seen: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Serve a WebSocket with the websockets library, any other request with the handler."""
        if request.recv(64, socket.MSG_PEEK).startswith(b"GET /v1/responses "):
            self._converse(request)
        else:
            super().finish_request(request, client_address)

    def _converse(self, connection: socket.socket) -> None:
        protocol = ServerProtocol()
        while data := connection.recv(65536):
            protocol.receive_data(data)
            for event in protocol.events_received():
                if isinstance(event, Request):
                    protocol.send_response(protocol.accept(event))
                elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                    self._answer(protocol, bytes(event.data))
            for sent in protocol.data_to_send():
                connection.sendall(sent)

    def _answer(self, protocol: ServerProtocol, asked: bytes) -> None:
        self.seen.append(json.loads(asked))
        for event in response_events(is_broken=self.is_broken):
            protocol.send_text(json.dumps(event).encode())
        if self.is_broken:
            protocol.send_close(CloseCode.NORMAL_CLOSURE)


class StreamHandler(BaseHTTPRequestHandler):
    """Answers HTTP requests."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Return the list of models."""
        body = json.dumps({"data": [{"id": MODEL}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Stream a chat completion."""
        server = cast("StreamServer", self.server)
        server.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in chat_events(is_broken=server.is_broken):
            self._write_chunk(f"data: {data}\n\n".encode())
        self._write_chunk(b"")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing; tests read the requests from `seen`."""

    def _write_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def chat_events(*, is_broken: bool) -> Iterator[str]:
    """Yield the data of a chat completion's events."""
    for piece in PIECES:
        yield json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}], "usage": None})
    if is_broken:
        return
    yield json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    yield json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": TOKENS}})
    yield "[DONE]"


def response_events(*, is_broken: bool) -> Iterator[dict[str, Any]]:
    """Yield the events of a response."""
    yield {"type": "response.created", "response": {"id": "resp_0"}}
    for piece in PIECES:
        yield {"type": "response.output_text.delta", "delta": piece}
    if not is_broken:
        usage = {"input_tokens": 1, "output_tokens": TOKENS}
        yield {"type": "response.completed", "response": {"status": "completed", "usage": usage}}


def streaming_server(*, is_broken: bool = False) -> AbstractContextManager[StreamServer]:
    """Run a fake server in a thread."""
    return running_server(StreamServer(is_broken=is_broken))
