"""Keys for tcp links: our own, and those that may connect, by role.

A key directory holds `key.secret` and `key.public` of this process and, under `authorized/`, the
public keys that may connect: in any role, or under `authorized/<role>/` in that one only.
ZeroMQ asks about each newcomer (ZAP); without that answer CURVE accepts any key. Its answer's user
id says which key a connection has proved to have, and its roles.

To connect, the key of the bound side must be known beforehand. It is looked for as
`bound/<host>_<port>.public`, then `bound/<host>.public`, then both under `authorized/`, then it is
our own: a fleet may share one key directory.
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
"""Decode workers are connected to, and connect to no process."""
SHOWN_CHARACTERS: Final = 8
"""Of a public key: enough to tell a fleet's keys apart."""
BOUND_EVENTS: Final = int(
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_MONITOR_STOPPED
)
"""Of a bound socket. Refused keys are known from ZAP."""
REPEAT_S: Final = 30.0
"""Between two lines about the same trouble."""
MAX_NEW: Final = 16
"""Bound sockets with monitors that the thread has not taken over yet; a process has two in all."""
MAX_TROUBLES: Final = 256
"""That are remembered; beyond, the one that was told first is forgotten and may be told again."""
_Z85_KEY_BYTES: Final = 40
_Z85_CHARACTERS: Final = frozenset(z85.Z85CHARS)
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_NEWS_ENDPOINT: Final = "inproc://curve.news"
_ZAP_VERSION: Final = b"1.0"
_CURVE_REQUEST_PARTS: Final = 7
"""Version, request, domain, address, identity, mechanism, and CURVE's one credential: the key."""


def make_keys(directory: Path) -> bytes:
    """Write a new key pair and empty places for others' keys; return the public key.

    Raises:
      ConfigError: there are keys already, or the directory cannot be written.
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
            f"key directory {directory} has keys already; remove key.secret to make new ones"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write keys to {directory}: {error}") from error
    return public


@dataclass(frozen=True, slots=True)
class KeyDirectory:
    """The keys of one process, read from its directory."""

    path: Path
    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: Path) -> KeyDirectory:
        """Read the own pair.

        Raises:
          ConfigError: a file is missing, is no key, or the secret is readable by others.
        """
        secret_path = path / "key.secret"
        secret, public = _read_key(secret_path), _read_key(path / "key.public")
        mode = stat.S_IMODE(secret_path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"{secret_path} has mode {mode:04o}, so others may read it; allowed: 0600 "
                f"(chmod 600 {secret_path}, and make new keys if the host is shared)"
            )
        return cls(path, public, secret)

    @property
    def shown(self) -> str:
        """Our public key, for people."""
        return shown_key(self.public)

    def roles_of(self, public: bytes) -> frozenset[Role]:
        """Return the roles in which a key may connect; none for a stranger's. Read
        anew each time: no restart to let in or to revoke."""
        if public == self.public or self._holds(self._authorized, public):
            return frozenset(CONNECTING_ROLES)
        named = (r for r in CONNECTING_ROLES if self._holds(self._authorized / r.value, public))
        return frozenset(named)

    def key_of(self, address: TcpAddress) -> bytes:
        """Return the public key that the process bound there must have."""
        return _read_key(self.source_of(address))

    def source_of(self, address: TcpAddress) -> Path:
        """Return the file that says so."""
        host = address.host.strip("[]")
        for folder in (self.path / "bound", self._authorized):
            for name in (f"{host}_{address.port}.public", f"{host}.public"):
                if (folder / name).exists():
                    return folder / name
        return self.path / "key.public"

    def bound_file(self, address: TcpAddress) -> Path:
        """Return where its key belongs, if it is not our own."""
        return self.path / "bound" / f"{address.host.strip('[]')}_{address.port}.public"

    @property
    def _authorized(self) -> Path:
        return self.path / "authorized"

    @staticmethod
    def _holds(folder: Path, public: bytes) -> bool:
        for path in sorted(folder.glob("*.public")):
            # A broken file lets no key in, and keeps no other key out.
            with suppress(ConfigError):
                if _read_key(path) == public:
                    return True
        return False


def shown_key(public: bytes) -> str:
    """Return the beginning of a public key, for people."""
    return f"{public[:SHOWN_CHARACTERS].decode(errors='replace')}…"


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the key {path}: {error}; `triolet keys make DIR` writes a new directory"
        ) from error
    if len(key) != _Z85_KEY_BYTES:
        raise ConfigError(f"{path} is no CURVE key: {len(key)} characters instead of 40")
    if not _Z85_CHARACTERS.issuperset(key):
        raise ConfigError(f"{path} is no CURVE key: it has characters that are not Z85")
    return key


class Repeats:
    """Says whether a line is due, so that a peer cannot fill the log."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}

    def due(self, trouble: str) -> int | None:
        """Return how often this was kept back since it was told last; None to keep it back."""
        now = time.monotonic()
        told_at, num_kept = self._told.pop(trouble, (-REPEAT_S, 0))
        is_due = now - told_at >= REPEAT_S
        if len(self._told) >= MAX_TROUBLES:
            del self._told[next(iter(self._told))]
        self._told[trouble] = (now, 0) if is_due else (told_at, num_kept + 1)
        return num_kept if is_due else None


class CurveGuard:
    """Answers for a context which keys may connect, and logs which could not, in its own thread.

    A thread, because libzmq asks while Trio may be busy, and the answer needs files. It ends with
    the context.
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
        """Log what fails to connect to a bound socket, until its monitor is disabled."""
        address = bound.getsockopt_string(zmq.LAST_ENDPOINT)
        self._new_monitors.put((bound.get_monitor_socket(BOUND_EVENTS), address))
        self._wake.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Let the context end. Idempotent."""
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
        """Log what a monitor says; return whether there will be more."""
        said = parse_monitor_message(monitor.recv_multipart())
        if said["event"] == zmq.EVENT_MONITOR_STOPPED:
            return False
        address = self._monitors[monitor]
        sides = "curve_dir belongs to every process, link.wire.plaintext to both sides of a KV link"
        if said["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            # Whichever side sees first that only one has keys hangs up; so does a port's probe.
            reason = (
                "a connection ended in its handshake; unless that was a probe of the port, the "
                f"log of the other side says why: {sides}"
            )
        elif said["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            reason = (
                "a process connects with keys where none are used, or without where they are: "
                f"{sides}"
            )
        else:
            reason = (
                "a process expects another key here; it needs this one's, "
                f"{self._keys.path}/key.public ({self._keys.shown}), under bound/ of its directory"
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
                f"the key {shown_key(key)} is not authorised; to let its process in, copy its "
                f"key.public to {self._keys.path}/authorized/NAME.public"
            )
            self._tell("key_refused", request[3].decode(errors="replace"), reason)
        return [_ZAP_VERSION, request_id, b"400", b"unknown key", b"", b""]

    def _tell(self, event: str, address: str, reason: str) -> None:
        num_kept = self._repeats.due(f"{address} {reason}")
        if num_kept is not None:
            log.warning(event, address=address, reason=reason, kept_back=num_kept)
