"""Signed tree heads of the audit log, and the signing key.

A head contains the size and root of the Merkle tree and the digest of the previous head, so that it
covers all entries up to its size. Heads are JSON lines, signed with Ed25519 (RFC 8032) over the
canonical JSON of their body.
"""

from __future__ import annotations

import os
import re
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from triolet.config import DAY_S
from triolet.errors import AuditLogError
from triolet.private_files import FILE_MODE, tighten

from .events import time_text
from .merkle import Frontier
from .segments import sync_folder, write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from .segments import Position

KEY_NAME: Final = "key.pem"
NEW_KEY_NAME: Final = "key.pem.new"
"""Name of a key until its first head is on disk, so that `key.pem` implies that a head existed."""
HEADS_NAME: Final = "heads.jsonl"
NO_HEAD: Final = "0" * 64
"""The previous digest in the first head."""
NO_HEAD_LEFT: Final = f"it has no head, but {KEY_NAME} has signed one: the heads were removed"
MAX_HEAD_BYTES: Final = 8 * 1024
"""Enough for a body with 53 peaks of 64 digits and a signature."""
MAX_LOG_ENTRIES: Final = 2**53
"""Largest integer that every JSON reader represents exactly."""
_LINE: Final = re.compile(rb'\{"body":(.*),"signature":"([0-9a-f]{128})"\}', re.DOTALL)

HexHash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a head.

    Attributes:
      size: number of entries that it covers.
      root: root hash of the tree over them.
      time: time of the signature, in the format of entries.
      previous: SHA-256 of the whole line of the previous head.
      key: public key of the signature.
      frontier: peaks of the tree, which determine `root` and let an appender continue.
      segment: first index of the segment file in which the entries end.
      offset: number of bytes of these entries in this file.
    """

    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_LOG_ENTRIES)]
    root: HexHash
    time: Annotated[str, msgspec.Meta(max_length=32)]
    previous: HexHash
    key: HexHash
    frontier: Annotated[list[HexHash], msgspec.Meta(max_length=54)]
    segment: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOG_ENTRIES)]
    offset: Annotated[int, msgspec.Meta(ge=0)]

    def tree(self) -> Frontier:
        """Return the tree that it signs.

        Raises:
          HeadError: its peaks do not match its size or root.
        """
        try:
            tree = Frontier(self.size, [bytes.fromhex(peak) for peak in self.frontier])
        except ValueError as error:
            raise HeadError(str(error)) from None
        if tree.root().hex() != self.root:
            raise HeadError("its root does not follow from its frontier")
        return tree


class HeadError(ValueError):
    """A line that is not a valid head; the text says what is wrong."""


_ENCODER: Final = msgspec.json.Encoder(order="sorted")
_HEADS: Final = msgspec.json.Decoder(Head)


class SigningKey:
    """The private key of a log."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def sign(self, head: Head) -> bytes:
        """Return the signed line of a head, without a newline."""
        body = _ENCODER.encode(head)
        signature = self._key.sign(body).hex().encode()
        return b'{"body":%b,"signature":"%b"}' % (body, signature)


def open_key(folder: Path) -> SigningKey:
    """Read the key of a log that has a head. Call it from one process at a time.

    Raises:
      OSError: the key is missing or cannot be read.
      AuditLogError: the file does not contain an Ed25519 key.
      ConfigError: other users can read it, and this user cannot change that.
    """
    path = folder / KEY_NAME
    if not path.exists():
        (folder / NEW_KEY_NAME).rename(path)  # a process was killed after writing the first head
    tighten(path)
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise AuditLogError(
            f"{path} is not a private key in PEM format: {error}; restore the log's key from a "
            "copy, or start a new log in another directory"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise AuditLogError(
            f"{path} is not an Ed25519 key; restore the log's key from a copy, or start a new log "
            "in another directory"
        )
    return SigningKey(key)


def _make_key(folder: Path) -> SigningKey:
    """Create a key under NEW_KEY_NAME; `open_key` renames it."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    new = folder / NEW_KEY_NAME
    new.unlink(missing_ok=True)  # left by a killed process
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)  # the key must be on disk before its first head
    return SigningKey(key)


def read_head(line: bytes) -> Head:
    """Decode a head and check its signature by the key in it.

    Raises:
      HeadError: it is malformed, or the signature is wrong.
    """
    found = _LINE.fullmatch(line) if len(line) <= MAX_HEAD_BYTES else None
    if found is None:
        raise HeadError("it does not have the form of a head")
    body, signature = found.groups()
    try:
        head = _HEADS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HeadError(f"it is not a head: {error}") from None
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(head.key))
        key.verify(bytes.fromhex(signature.decode()), body)
    except (ValueError, InvalidSignature):
        raise HeadError("its signature is wrong") from None
    return head


def head_digest(line: bytes) -> str:
    """Return the digest of a head for the next one."""
    return sha256(line).hexdigest()


class HeadFile:
    """The signed heads of a log, open for appending. All methods require holding the lock `sync`.

    Attributes:
      newest: the last head, or None.

    Raises:
      OSError: the key or the heads cannot be read or created.
      AuditLogError: the last head is invalid or signed by another key, or all heads are gone.
      ConfigError: other users can read the key, and this user cannot change that.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / HEADS_NAME
        self.newest: Head | None = None
        self._digest = NO_HEAD
        self._end = 0
        self._key: SigningKey | None = None
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            self.catch_up()
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def size(self) -> int:
        """Number of entries that the newest head covers."""
        return 0 if self.newest is None else self.newest.size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def age_s(self, now: float) -> float:
        """Return the age of the newest head [s]; a day if there is none or the clock went back."""
        if self.newest is None:
            return DAY_S
        age_s = now - datetime.fromisoformat(self.newest.time).timestamp()
        return age_s if age_s >= 0 else DAY_S

    def catch_up(self) -> None:
        """Read the newest head; truncate an incomplete one.

        Raises:
          OSError: it cannot be read.
          AuditLogError: it is invalid or signed by another key, or heads are gone.
        """
        end = os.fstat(self._fd).st_size
        if self.newest is not None and end == self._end:
            return
        if end < self._end:
            raise self._damage(f"it has {end} bytes, but had {self._end}: heads were removed")
        first = max(0, end - 2 * MAX_HEAD_BYTES)
        content = os.pread(self._fd, end - first, first)
        whole, newline, torn = content.rpartition(b"\n")
        if len(torn) > MAX_HEAD_BYTES:
            raise self._damage("its last line is longer than a head")
        if not newline and (self._path.parent / KEY_NAME).exists():
            raise self._damage(NO_HEAD_LEFT)
        if torn:
            os.ftruncate(self._fd, end - len(torn))
        self._end = end - len(torn)
        if not newline:
            return
        line = whole.rpartition(b"\n")[2]
        try:
            head = read_head(line)
            head.tree()
        except HeadError as error:
            raise self._damage(f"the last head: {error}") from None
        if self._key is None:
            folder = self._path.parent
            if not any((folder / name).exists() for name in (KEY_NAME, NEW_KEY_NAME)):
                raise self._damage(f"{KEY_NAME}, the key that signed them, is missing")
            self._key = open_key(folder)
        if head.key != self._key.public:
            raise self._damage(f"the last head is not signed by the key in {KEY_NAME}")
        self.newest, self._digest = head, head_digest(line)

    def sign(self, tree: Frontier, end: Position, now: float) -> None:
        """Append a head over entries that are on disk.

        Raises:
          OSError: it could not be written; the file is unchanged.
        """
        folder = self._path.parent
        key = _make_key(folder) if self._key is None else self._key
        head = Head(
            size=tree.size,
            root=tree.root().hex(),
            time=time_text(now),
            previous=self._digest,
            key=key.public,
            frontier=[peak.hex() for peak in tree.peaks],
            segment=end.segment,
            offset=end.offset,
        )
        line = key.sign(head)
        try:
            write_whole(self._fd, line + b"\n", self._end)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        if self._key is None:
            self._key = open_key(folder)
        self.newest, self._digest = head, head_digest(line)
        self._end += len(line) + 1

    def _damage(self, what: str) -> AuditLogError:
        folder = self._path.parent
        return AuditLogError(
            f"{self._path}: {what}; `triolet audit verify --audit {folder}` shows details. Restore "
            "the file from a copy, or keep the directory and start a new log: use `--audit` with "
            f"another directory, or move {folder} away"
        )
