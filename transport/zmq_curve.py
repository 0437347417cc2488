"""Keys for links that leave this host: who we are, and whom we let in.

A key directory holds `key.secret` and `key.public` of this process and, under `authorized/`, the
public keys of those who may connect. It knows the files and answers ZeroMQ's question about each
newcomer (ZAP); without that answer CURVE accepts any key. Links inside one host need no keys.

To connect, the key of the bound side must be known beforehand. It is looked for as
`authorized/<host>_<port>.public`, then `authorized/<host>.public`, then it is our own: a fleet may
share one key directory.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from .address import TcpAddress

_Z85_KEY_BYTES: Final = 40
_Z85_CHARACTERS: Final = frozenset(z85.Z85CHARS)
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_CURVE_REQUEST_PARTS: Final = 7
"""Version, request, domain, address, identity, mechanism, and CURVE's one credential: the key."""


def make_keys(directory: Path) -> bytes:
    """Write a new key pair and an empty `authorized/`; return the public key.

    Raises:
      ConfigError: there are keys already, or the directory cannot be written.
    """
    public, secret = zmq.curve_keypair()
    try:
        (directory / "authorized").mkdir(mode=0o700, parents=True, exist_ok=True)
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

    def may_connect(self, public: bytes) -> bool:
        """Whether a newcomer with this key is let in. Read anew each time: no restart to revoke."""
        if public == self.public:
            return True
        for path in sorted(self._authorized.glob("*.public")):
            # A broken file lets nobody in, and keeps nobody else out.
            with suppress(ConfigError):
                if _read_key(path) == public:
                    return True
        return False

    def key_of(self, address: TcpAddress) -> bytes:
        """Return the public key that the process bound there must have."""
        host = address.host.strip("[]")
        for name in (f"{host}_{address.port}.public", f"{host}.public"):
            path = self._authorized / name
            if path.exists():
                return _read_key(path)
        return self.public

    @property
    def _authorized(self) -> Path:
        return self.path / "authorized"


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the key {path}: {error}; `make_keys` writes a new directory"
        ) from error
    if len(key) != _Z85_KEY_BYTES:
        raise ConfigError(f"{path} is no CURVE key: {len(key)} characters instead of 40")
    if not _Z85_CHARACTERS.issuperset(key):
        raise ConfigError(f"{path} is no CURVE key: it has characters that are not Z85")
    return key


def guard_context(context: zmq.Context[zmq.Socket[bytes]], keys: KeyDirectory) -> None:
    """Let this context ask `keys` about every newcomer, from a thread that ends with the context.

    A thread, because libzmq asks while Trio may be busy, and the answer needs files.
    """
    zap = context.socket(zmq.REP)
    zap.set(zmq.LINGER, 0)
    zap.bind(_ZAP_ENDPOINT)
    threading.Thread(target=_answer_all, args=(zap, keys), name="curve", daemon=True).start()


def _answer_all(zap: zmq.Socket[bytes], keys: KeyDirectory) -> None:
    try:
        with suppress(zmq.ContextTerminated):
            while True:
                zap.send_multipart(_answer(zap.recv_multipart(), keys))
    finally:
        zap.close(0)


def _answer(request: list[bytes], keys: KeyDirectory) -> list[bytes]:
    """Return ZAP's reply: version, request id, status, text, user id, metadata."""
    request_id = request[1] if len(request) > 1 else b""
    is_known = (
        len(request) == _CURVE_REQUEST_PARTS
        and request[5] == b"CURVE"
        and keys.may_connect(z85.encode(request[6]))
    )
    status, text = (b"200", b"OK") if is_known else (b"400", b"unknown key")
    return [_ZAP_VERSION, request_id, status, text, b"", b""]
