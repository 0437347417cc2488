"""A fake registry for tests, in a thread: it can give answers that no real registry would give."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from store.layout import ModelStore


TRICKLE_S = 0.002


class Lie(NamedTuple):
    """An answer. With `trickles`, its headers are sent byte by byte, TRICKLE_S apart."""

    status: int
    content: bytes = b""
    headers: Mapping[str, str] = {}
    trickles: bool = False


class Asked(NamedTuple):
    """A received request."""

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes


class LyingRegistry(ThreadingHTTPServer):
    """Serves the manifest and blobs of a store's only version as repository `chat`, tag `v1`.

    Args:
      store: that has it.

    Attributes:
      lies: answers that replace the true ones, by method and end of the path.
      asked: all requests so far.
    """

    daemon_threads = True

    def __init__(self, store: ModelStore) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        (entry,) = store.entries()
        self.store = store
        self.manifest = store.manifest(entry.digest)
        self.digest = entry.digest
        self.lies: dict[tuple[str, str], Lie | Callable[[Asked], Lie | None]] = {}
        self.asked: list[Asked] = []

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def location(self) -> str:
        return f"oci://{self.host}/chat:v1"

    def lie(self, path: str, lie: Lie | Callable[[Asked], Lie | None], method: str = "GET") -> None:
        """Answer requests for this path with something else; if the function returns None,
        truthfully."""
        self.lies[method, path] = lie

    def answer(self, asked: Asked) -> Lie:
        self.asked.append(asked)
        for (method, end), lie in self.lies.items():
            if method == asked.method and asked.path.endswith(end):
                told = lie(asked) if callable(lie) else lie
                if told is not None:
                    return told
        return self.truth(asked)

    def truth(self, asked: Asked) -> Lie:
        if asked.path == "/v2/chat/manifests/v1":
            return Lie(200, self.store.read(self.digest, 1 << 20))
        if (found := re.fullmatch(r"/v2/chat/blobs/(sha256:[0-9a-f]{64})", asked.path)) is None:
            return Lie(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"unknown"}]}')
        path = self.store.blob_path(found[1])
        if not path.exists():
            return Lie(404)
        content = path.read_bytes()
        if (begin := re.fullmatch(r"bytes=(\d+)-", asked.headers.get("range", ""))) is not None:
            first = int(begin[1])
            said = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return Lie(206, content[first:], {"content-range": said})
        return Lie(200, content)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LyingRegistry

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        told = self.server.answer(Asked(self.command, self.path, headers, content))
        if told.trickles:
            self._trickle(told)
            return
        self.send_response(told.status)
        length = {"content-length": str(len(told.content))}
        for name, value in {**length, **told.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(told.content)
        if "content-length" in told.headers:
            self.close_connection = True  # it announced more than it sent

    def _trickle(self, told: Lie) -> None:
        """Send headers slowly, until they are complete or the client has gone."""
        lines = [f"{name}: {value}\r\n" for name, value in told.headers.items()]
        for byte in f"HTTP/1.1 {told.status} OK\r\n{''.join(lines)}\r\n".encode():
            self.wfile.write(bytes([byte]))
            threading.Event().wait(TRICKLE_S)
        self.close_connection = True

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has gone, as the test expects
            super().handle()

    do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = _answer


@contextmanager
def running_lying_registry(store: ModelStore) -> Iterator[LyingRegistry]:
    with LyingRegistry(store) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
