"""`triolet model share`: peers read versions of this store over HTTP, with a password.

The server of the standard library, with bounds around it: connections are counted, and each has a
moment by which what it does now must be over, or it is cut.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
import socket
import ssl
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import structlog

from triolet.errors import ConfigError, StoreError, said_by
from triolet.loopback import is_loopback
from triolet.private_files import FILE_MODE
from triolet.store.manifest import Descriptor, digest_of
from triolet.store.referrers import ReferrerFault

from .client import MAX_SHOWN, PIECE_BYTES, SLOWEST_BYTES_S
from .credentials import MAX_PASSWORD_BYTES
from .manifests import DIGEST_HEADER
from .shared import BLOB_TYPE, Document, NotShared, SharedModels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

    from triolet.store.layout import ModelStore

log = structlog.get_logger(__name__)

MAX_CONNECTIONS: Final = 32
"""At once, each with a thread: eight peers that pull, with four blobs each."""
REQUEST_S: Final = 30.0
"""For a handshake, for a request to come whole, and for the next one on the same connection."""
VERIFY_S: Final = 900.0
"""For a blob to be read and compared with its digest, which is done once."""
LOOK_S: Final = 0.5
"""Between two looks for connections that are over their time."""
STRANGER_LINES: Final = 100
"""In the log in STRANGER_LINES_S, about what needs no password: enough to see what a misconfigured
peer does, and 10 MB in an hour of attack."""
STRANGER_LINES_S: Final = 10.0
"""How long lines are counted together."""
SECRET_BYTES: Final = 32
"""Of a password that is made here."""
USERNAME: Final = "peer"
"""Peers give any name; this one is written where one is needed."""
_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")


class Place(NamedTuple):
    """Where peers reach a store.

    Attributes:
      host: to listen on.
      port: 0 for any free one.
      certificate: file of the chain in PEM; None for HTTP without TLS.
      key: file of its private key.
      is_insecure: HTTP also beyond this machine.
    """

    host: str
    port: int
    certificate: Path | None
    key: Path | None
    is_insecure: bool


class _StrangerLog:
    """Logs what peers do for which no password is needed, at most STRANGER_LINES in
    STRANGER_LINES_S."""

    def __init__(self) -> None:
        self._until = 0.0
        self._num_lines = self._num_left_out = 0
        self._changing = Lock()

    def tell(self, write: Callable[..., object], event: str, **fields: object) -> None:
        """Write a line, unless there were too many; the next one then says how many."""
        with self._changing:
            now = time.monotonic()
            if now >= self._until:
                self._until, self._num_lines = now + STRANGER_LINES_S, 0
            self._num_lines += 1
            if self._num_lines > STRANGER_LINES:
                self._num_left_out += 1
                return
            left_out, self._num_left_out = self._num_left_out, 0
        write(event, **fields, left_out=left_out)


class ShareServer(ThreadingHTTPServer):
    """Listens from the start on.

    Args:
      store: that is shared.
      models: what of it.
      password: of peers.
      place: where.

    Raises:
      ConfigError: the place cannot be had, or needs a certificate.
    """

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self, store: ModelStore, models: SharedModels, password: str, place: Place
    ) -> None:
        self.store = store
        self.models = models
        self._tls = _tls(place)
        self._password = password.encode()
        self._free = BoundedSemaphore(MAX_CONNECTIONS)
        self._over_at: dict[socket.socket, float] = {}
        self.strangers = _StrangerLog()
        if ":" in place.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((place.host.strip("[]"), place.port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {place.host}:{place.port}: {error.strerror or error}; stop what "
                "listens there, or give another --host or --port"
            ) from None

    def may_ask(self, authorization: str) -> bool:
        """Return whether a peer has shown the password."""
        scheme, _, encoded = authorization.partition(" ")
        with suppress(ValueError):
            _, _, password = base64.b64decode(encoded, validate=True).partition(b":")
            return scheme.lower() == "basic" and hmac.compare_digest(password, self._password)
        return False

    def allow(self, connection: socket.socket, seconds: float) -> None:
        """Let a connection go on for so long."""
        self._over_at[connection] = time.monotonic() + seconds

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept; the handshake is the handler's, so that it holds up nothing else."""
        accepted, address = super().get_request()
        if self._tls is None:
            return accepted, address
        wrapped = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        return wrapped, address

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Hand a connection to a thread, or close it if there are too many."""
        if not self._free.acquire(blocking=False):
            self.strangers.tell(
                log.warning, "share_full", peer=client_address[0], connections=MAX_CONNECTIONS
            )
            self.shutdown_request(request)
            return
        self.allow(request, REQUEST_S)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Answer all requests of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def server_bind(self) -> None:
        """Bind without a question to a resolver, which may take seconds to answer."""
        TCPServer.server_bind(self)

    def _forget(self, connection: socket.socket) -> None:
        self._over_at.pop(connection, None)
        self._free.release()

    def service_actions(self) -> None:
        """Cut connections that are over their time. Called again and again by `serve_forever`."""
        now = time.monotonic()
        for connection, over_at in list(self._over_at.items()):
            if now > over_at:
                with suppress(OSError):  # it has just ended by itself
                    # The one of `SSLSocket` takes TLS away first: what the connection's thread
                    # sends in this moment would go without it.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Say what ended a connection: that it broke is nothing; the peer goes on from there."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError | ValueError):  # a ValueError: it was cut while it was read
            self.strangers.tell(
                log.info, "share_connection_lost", peer=client_address[0], reason=said_by(error)
            )
        else:
            log.exception("share_failed", peer=client_address[0])

    @property
    def location(self) -> str:
        """How peers begin the place of a model."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"oci://{shown}:{port}"


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: ShareServer
    protocol_version = "HTTP/1.1"
    server_version = "triolet"
    sys_version = ""
    path = ""
    """Until a first line that is one has come."""
    has_password = False
    """Whether the request under way has come with it."""

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def handle_one_request(self) -> None:
        self.has_password = False
        self.server.allow(self.request, REQUEST_S)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer with the content."""
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        """Answer without it."""
        self._answer(with_content=False)

    def _answer(self, *, with_content: bool) -> None:
        if "content-length" in self.headers or "transfer-encoding" in self.headers:
            self.close_connection = True  # it is not read, so no request can follow it
        if not self.server.may_ask(self.headers.get("authorization", "")):
            self.close_connection = True  # without it no connection is kept
            challenge = {"www-authenticate": 'Basic realm="triolet"'}
            self._refuse(401, "UNAUTHORIZED", "the password is missing or wrong", challenge)
            return
        self.has_password = True
        self.server.allow(self.request, VERIFY_S)
        try:
            found = self.server.models.find(self.path)
            if isinstance(found, Document):
                self._send(200, found, with_content=with_content)
            else:
                with self.server.store.blob_path(found.digest).open("rb") as file:
                    self._send_blob(found, file, with_content=with_content)
        except NotShared:
            self._refuse(404, "NAME_UNKNOWN", "nothing that is shared here has that name")
        except (StoreError, ReferrerFault) as error:
            log.error("share_store_damaged", path=self.path[:MAX_SHOWN], reason=str(error))
            self._refuse(500, "UNKNOWN", "the store here is damaged; its log says how")

    def _send_blob(self, blob: Descriptor, file: BinaryIO, *, with_content: bool) -> None:
        first, last, status = 0, blob.size - 1, 200
        headers = {
            "content-type": BLOB_TYPE,
            "accept-ranges": "bytes",
            DIGEST_HEADER: blob.digest,
        }
        wanted = _RANGE.fullmatch(self.headers.get("range", ""))
        if wanted is not None and with_content:
            first = int(wanted[1])
            last = min(last, int(wanted[2])) if wanted[2] else last
            if first > last:
                ranges = {"content-range": f"bytes */{blob.size}"}
                self._refuse(416, "RANGE_INVALID", "the blob ends before that", ranges)
                return
            status = 206
            headers["content-range"] = f"bytes {first}-{last}/{blob.size}"
        left = last - first + 1
        self._begin(status, {**headers, "content-length": str(left)})
        if not with_content:
            return
        self.server.allow(self.request, REQUEST_S + left / SLOWEST_BYTES_S)
        file.seek(first)
        while left:
            piece = file.read(min(PIECE_BYTES, left))
            if not piece:  # shorter than it was a moment ago: the peer sees the end come too early
                self.close_connection = True
                return
            self.wfile.write(piece)
            left -= len(piece)

    def _send(self, status: int, found: Document, *, with_content: bool) -> None:
        length = str(len(found.content))
        digest = digest_of(found.content)
        named = {"content-type": found.media_type, "content-length": length}
        self._begin(status, {**named, DIGEST_HEADER: digest})
        if with_content:
            self.wfile.write(found.content)

    def _refuse(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        content = msgspec.json.encode({"errors": [{"code": code, "message": message}]})
        named = {"content-type": "application/json", "content-length": str(len(content))}
        self._begin(status, {**named, **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.server.allow(self.request, REQUEST_S)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say what was asked."""
        fields = {
            "peer": self.client_address[0],
            "method": self.command,
            "path": self.path[:MAX_SHOWN],
            "status": int(code),
        }
        if self.has_password:
            log.info("share_answered", **fields)
        else:
            self.server.strangers.tell(log.info, "share_answered", **fields)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401
        """Say what else the library would write."""
        note = (format % args)[:MAX_SHOWN]
        self.server.strangers.tell(log.info, "share_note", peer=self.client_address[0], note=note)


def read_secret(path: Path) -> str:
    """Return the password in a file of this user; a new one in a new file if there is none.

    Raises:
      ConfigError: it cannot be read or made, is empty, or others may read it.
    """
    try:
        if not path.exists():
            path.touch(FILE_MODE, exist_ok=False)
            path.write_text(secrets.token_hex(SECRET_BYTES) + "\n", encoding="ascii")
        mode = path.stat().st_mode & 0o777
        with path.open("rb") as file:
            content = file.read(MAX_PASSWORD_BYTES + 1).strip(b"\r\n")
        password = content.decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} holds no password: {error}; give a file of one line of ASCII, or one that is "
            "not there yet, which is made"
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"{path} has mode {mode:04o}, so that others may read the password; `chmod 600 {path}`"
        )
    if not password or len(content) > MAX_PASSWORD_BYTES or not password.isprintable():
        raise ConfigError(f"{path} holds no password; expected one line of printable ASCII")
    return password


def _tls(place: Place) -> ssl.SSLContext | None:
    if place.certificate is None:
        if place.key is not None:
            raise ConfigError("--key is given without --certificate; give both, or none")
        if is_loopback(place.host) or place.is_insecure:
            return None
        raise ConfigError(
            f"--host {place.host} is beyond this machine, where passwords and weights must not "
            "travel without TLS; give --certificate FILE and --key FILE, or --insecure if you "
            "trust every network in between"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(place.certificate, place.key)
    except OSError as error:  # an ssl.SSLError is one
        raise ConfigError(
            f"--certificate {place.certificate} and its key cannot be used: {error}; give a chain "
            "and its private key in PEM form"
        ) from None
    return context
