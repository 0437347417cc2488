"""CURVE keys for tcp links: this process's key pair, and the keys of other processes by role.

A key directory holds this process's `key.secret` and `key.public` and, under `authorized/`, the
public keys that may connect in any role; those under `authorized/<role>/` may connect in that role
only. ZeroMQ sends an authentication request for each new connection (ZAP); without an answer CURVE
would accept any key. The answer's user id contains the connection's key and its roles.

The connecting side needs the public key of the bound side. It tries `bound/<host>_<port>.public`,
`bound/<host>.public`, both names under `authorized/`, and last its own key: a fleet may share one
key directory.
"""

from __future__ import annotations

import os
import queue
import stat
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from triolet.errors import ConfigError
from triolet.ids import Role

from .gate import Credential

if TYPE_CHECKING:
    from pathlib import Path

    from .address import TcpAddress

log = structlog.get_logger()

CONNECTING_ROLES: Final = (Role.SERVER, Role.PREFILL, Role.OPERATOR)
"""Roles that may connect. Decode workers only accept connections."""
SHOWN_CHARACTERS: Final = 8
"""Shown characters of a public key: enough to tell a fleet's keys apart."""
BOUND_EVENTS: Final = int(
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_MONITOR_STOPPED
)
"""Monitored events of a bound socket. Refused keys are reported by ZAP."""
REPEAT_S: Final = 30.0
"""Seconds between two log lines about the same trouble."""
MAX_NEW: Final = 16
"""Bound sockets with monitors that the thread has not taken over yet; a process has two in all."""
MAX_TROUBLES: Final = 256
"""Troubles to remember; beyond this, the oldest is forgotten and may be logged again."""
ROOT: Final = 0
_Z85_KEY_BYTES: Final = 40
_Z85_CHARACTERS: Final = frozenset(z85.Z85CHARS)
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_NEWS_ENDPOINT: Final = "inproc://curve.news"
_ZAP_VERSION: Final = b"1.0"
_CURVE_REQUEST_PARTS: Final = 7
"""Version, request, domain, address, identity, mechanism, and CURVE's one credential, the key."""


def make_keys(directory: Path) -> bytes:
    """Write a new key pair and empty folders for others' keys; return the public key.

    Raises:
      ConfigError: keys exist already, or the directory cannot be written.
    """
    public, secret = zmq.curve_keypair()
    try:
        places = [directory / "authorized" / role.value for role in CONNECTING_ROLES]
        for place in (*places, directory / "bound"):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        descriptor = os.open(directory / "key.secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + b"\n")
        (directory / "key.public").write_bytes(public + b"\n")
    except FileExistsError as error:
        raise ConfigError(
            f"key directory {directory} already has keys; remove key.secret to make new ones"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write keys to {directory}: {error}") from error
    return public


@dataclass(frozen=True, slots=True)
class KeyDirectory:
    """The keys of one process, in its directory."""

    path: Path
    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: Path) -> KeyDirectory:
        """Read this process's key pair.

        Raises:
          ConfigError: a file is missing or invalid, or others can read the secret.
        """
        secret_path = path / "key.secret"
        secret, public = _read_key(secret_path), _read_key(path / "key.public")
        status = secret_path.stat()
        mode = stat.S_IMODE(status.st_mode)
        # Kubernetes mounts a Secret like this: files owned by root, readable by the pod's group.
        is_lent = status.st_uid == ROOT != os.geteuid()
        if mode & (0o037 if is_lent else 0o077):
            raise ConfigError(
                f"{secret_path} has mode {mode:04o}, so others may read it; allowed: 0600 "
                f"(chmod 600 {secret_path}, and make new keys if the host is shared)"
            )
        return cls(path, public, secret)

    @property
    def shown(self) -> str:
        """Our public key, shortened for messages."""
        return shown_key(self.public)

    def roles_of(self, public: bytes) -> frozenset[Role]:
        """Return the roles in which a key may connect; empty for an unknown key. Files are read
        each time, so that admitting and revoking keys needs no restart."""
        if public == self.public or self._holds(self._authorized, public):
            return frozenset(CONNECTING_ROLES)
        named = (r for r in CONNECTING_ROLES if self._holds(self._authorized / r.value, public))
        return frozenset(named)

    def key_of(self, address: TcpAddress) -> bytes:
        """Return the public key that the process bound there must have."""
        return _read_key(self.source_of(address))

    def source_of(self, address: TcpAddress) -> Path:
        """Return the file that holds this key."""
        host = address.host.strip("[]")
        for folder in (self.path / "bound", self._authorized):
            for name in (f"{host}_{address.port}.public", f"{host}.public"):
                if (folder / name).exists():
                    return folder / name
        return self.path / "key.public"

    def bound_file(self, address: TcpAddress) -> Path:
        """Return the file in which to put its key, if it is not our own."""
        return self.path / "bound" / f"{address.host.strip('[]')}_{address.port}.public"

    @property
    def _authorized(self) -> Path:
        return self.path / "authorized"

    @staticmethod
    def _holds(folder: Path, public: bytes) -> bool:
        for path in sorted(folder.glob("*.public")):
            # An invalid file admits no key and does not affect other keys.
            with suppress(ConfigError):
                if _read_key(path) == public:
                    return True
        return False


def shown_key(public: bytes) -> str:
    """Return the first characters of a public key, for messages."""
    return f"{public[:SHOWN_CHARACTERS].decode(errors='replace')}…"


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the key {path}: {error}; `triolet keys make DIR` writes a new directory"
        ) from error
    if len(key) != _Z85_KEY_BYTES:
        raise ConfigError(f"{path} is not a CURVE key: {len(key)} characters instead of 40")
    if not _Z85_CHARACTERS.issuperset(key):
        raise ConfigError(f"{path} is not a CURVE key: it has characters outside Z85")
    return key


class Repeats:
    """Decides whether to log a repeated trouble, so that a peer cannot flood the log."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}

    def due(self, trouble: str) -> int | None:
        """Return how often it was suppressed since it was last logged, or None to suppress it
        now."""
        now = time.monotonic()
        told_at, num_kept = self._told.pop(trouble, (-REPEAT_S, 0))
        is_due = now - told_at >= REPEAT_S
        if len(self._told) >= MAX_TROUBLES:
            del self._told[next(iter(self._told))]
        self._told[trouble] = (now, 0) if is_due else (told_at, num_kept + 1)
        return num_kept if is_due else None


class CurveGuard:
    """Decides in its own thread which keys may connect to a context, and logs those that may not.

    It has a separate thread, because libzmq asks while Trio may be busy and the answer reads files.
    The thread ends with the context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: KeyDirectory) -> None:
        self._keys = keys
        self._repeats = Repeats()
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._new_monitors: queue.Queue[tuple[zmq.Socket[bytes], str]] = queue.Queue(MAX_NEW)
        zap, news = context.socket(zmq.REP), context.socket(zmq.PULL)
        self._wake = context.socket(zmq.PUSH)
        for socket in (zap, news, self._wake):
            socket.set(zmq.LINGER, 0)
        zap.bind(_ZAP_ENDPOINT)
        news.bind(_NEWS_ENDPOINT)
        self._wake.connect(_NEWS_ENDPOINT)
        threading.Thread(target=self._run, args=(zap, news), name="curve", daemon=True).start()

    def watch(self, bound: zmq.Socket[bytes]) -> None:
        """Log failed connections to a bound socket until its monitor is disabled."""
        address = bound.getsockopt_string(zmq.LAST_ENDPOINT)
        self._new_monitors.put((bound.get_monitor_socket(BOUND_EVENTS), address))
        self._wake.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Let the context terminate. Idempotent."""
        self._wake.close(0)

    def _run(self, zap: zmq.Socket[bytes], news: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(zap, zmq.POLLIN)
        poller.register(news, zmq.POLLIN)
        try:
            with suppress(zmq.ContextTerminated):
                while True:
                    for socket, _ in poller.poll():
                        if socket is zap:
                            zap.send_multipart(self._answer(zap.recv_multipart()))
                        elif socket is news:
                            news.recv()
                            monitor, address = self._new_monitors.get_nowait()
                            self._monitors[monitor] = address
                            poller.register(monitor, zmq.POLLIN)
                        elif not self._hear(socket):
                            poller.unregister(socket)
                            del self._monitors[socket]
                            socket.close(0)
        finally:
            while not self._new_monitors.empty():  # the context waits for these too
                self._new_monitors.get_nowait()[0].close(0)
            for socket in (zap, news, *self._monitors):
                socket.close(0)

    def _hear(self, monitor: zmq.Socket[bytes]) -> bool:
        """Log a monitor's event; return whether more will follow."""
        said = parse_monitor_message(monitor.recv_multipart())
        if said["event"] == zmq.EVENT_MONITOR_STOPPED:
            return False
        address = self._monitors[monitor]
        sides = "set curve_dir for every process, link.wire.plaintext on both sides of a KV link"
        if said["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            # The side that first notices a missing key hangs up; a port probe looks the same.
            reason = (
                "a connection ended during its handshake; unless it was a probe of the port, see "
                f"the log of the other side: {sides}"
            )
        elif said["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            reason = (
                "a process connects with keys where none are used, or without keys where they are: "
                f"{sides}"
            )
        else:
            reason = (
                "a process expects another key here; copy this process's key, "
                f"{self._keys.path}/key.public ({self._keys.shown}), to bound/ in its key directory"
            )
        self._tell("handshake_refused", address, reason)
        return True

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Return ZAP's reply: version, request id, status, text, user id, metadata."""
        request_id = request[1] if len(request) > 1 else b""
        if len(request) == _CURVE_REQUEST_PARTS and request[5] == b"CURVE":
            key = z85.encode(request[6])
            roles = self._keys.roles_of(key)
            if roles:
                user_id = Credential(key.decode(), roles).user_id
                return [_ZAP_VERSION, request_id, b"200", b"OK", user_id, b""]
            reason = (
                f"the key {shown_key(key)} is not authorised; to admit its process, copy its "
                f"key.public to {self._keys.path}/authorized/NAME.public"
            )
            self._tell("key_refused", request[3].decode(errors="replace"), reason)
        return [_ZAP_VERSION, request_id, b"400", b"unknown key", b"", b""]

    def _tell(self, event: str, address: str, reason: str) -> None:
        num_kept = self._repeats.due(f"{address} {reason}")
        if num_kept is not None:
            log.warning(event, address=address, reason=reason, kept_back=num_kept)
