"""Signed heads of the log: what vouches for all entries up to a size, and the key that signs.

A head names the tree's size and root and the digest of the head before it. Heads are JSON lines,
signed by Ed25519 (RFC 8032) over the canonical JSON of their body.
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
"""What a key is called until its first head is on disk: `key.pem` says that there was a head."""
HEADS_NAME: Final = "heads.jsonl"
NO_HEAD: Final = "0" * 64
"""Stands for the digest of the head before the first one."""
NO_HEAD_LEFT: Final = f"it holds no head, though {KEY_NAME} has signed one: the heads were removed"
MAX_HEAD_BYTES: Final = 8 * 1024
"""A body with 53 peaks of 64 digits, a signature, and room."""
MAX_LOG_ENTRIES: Final = 2**53
"""What every reader of JSON can count to."""
_LINE: Final = re.compile(rb'\{"body":(.*),"signature":"([0-9a-f]{128})"\}', re.DOTALL)

HexHash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a head.

    Attributes:
      size: number of entries that it vouches for.
      root: root hash of the tree over them.
      time: of the signature, as entries write it.
      previous: SHA-256 of the whole line of the head before.
      key: public key that signs.
      frontier: peaks of the tree, from which `root` follows: where an appender goes on.
      segment: first index of the segment file in which the entries end.
      offset: bytes of this file that belong to them.
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
          HeadError: its peaks do not fit its size or root.
        """
        try:
            tree = Frontier(self.size, [bytes.fromhex(peak) for peak in self.frontier])
        except ValueError as error:
            raise HeadError(str(error)) from None
        if tree.root().hex() != self.root:
            raise HeadError("its root does not follow from its frontier")
        return tree


class HeadError(ValueError):
    """A line that is no valid head; says what is wrong."""


_ENCODER: Final = msgspec.json.Encoder(order="sorted")
_HEADS: Final = msgspec.json.Decoder(Head)


class SigningKey:
    """The private key of one log."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def sign(self, head: Head) -> bytes:
        """Return the line of a head, without its newline."""
        body = _ENCODER.encode(head)
        signature = self._key.sign(body).hex().encode()
        return b'{"body":%b,"signature":"%b"}' % (body, signature)


def open_key(folder: Path) -> SigningKey:
    """Return the key of a log that has a head. One process at a time.

    Raises:
      OSError: it is missing, or cannot be read.
      AuditLogError: the file holds no such key.
      ConfigError: others may read it, and this user may not change that.
    """
    path = folder / KEY_NAME
    if not path.exists():
        (folder / NEW_KEY_NAME).rename(path)  # a process was killed after the first head
    tighten(path)
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise AuditLogError(
            f"{path} holds no private key in PEM form: {error}; put the log's own key back from "
            "a copy, or begin a new log in another folder"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise AuditLogError(
            f"{path} holds a key of another kind than Ed25519; put the log's own key back from a "
            "copy, or begin a new log in another folder"
        )
    return SigningKey(key)


def _make_key(folder: Path) -> SigningKey:
    """Make a key under its first name; `open_key` gives it the other one."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    new = folder / NEW_KEY_NAME
    new.unlink(missing_ok=True)  # of a process that was killed here
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)  # no head may outlive its key
    return SigningKey(key)


def read_head(line: bytes) -> Head:
    """Return the head of a line, signed by the key that it names.

    Raises:
      HeadError: it is no head, or is not signed so.
    """
    found = _LINE.fullmatch(line) if len(line) <= MAX_HEAD_BYTES else None
    if found is None:
        raise HeadError("it has not the form of a head")
    body, signature = found.groups()
    try:
        head = _HEADS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HeadError(f"it is no head: {error}") from None
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(head.key))
        key.verify(bytes.fromhex(signature.decode()), body)
    except (ValueError, InvalidSignature):
        raise HeadError("its signature is wrong") from None
    return head


def head_digest(line: bytes) -> str:
    """Return the digest by which the next head names this one."""
    return sha256(line).hexdigest()


class HeadFile:
    """The signed heads of a log, open for appending. Every method wants the lock `sync` held.

    Attributes:
      newest: the last head; None if there is none.

    Raises:
      OSError: key or heads cannot be read or made.
      AuditLogError: the last head is wrong, or signed by another key, or all heads are gone.
      ConfigError: others may read the key, and this user may not change that.
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
        """Entries that the newest head vouches for."""
        return 0 if self.newest is None else self.newest.size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def age_s(self, now: float) -> float:
        """Return how long ago the newest head was signed [s]; a day if the clock was set back or
        there is none."""
        if self.newest is None:
            return DAY_S
        age_s = now - datetime.fromisoformat(self.newest.time).timestamp()
        return age_s if age_s >= 0 else DAY_S

    def catch_up(self) -> None:
        """Know the newest head; cut off one that is torn.

        Raises:
          OSError: it cannot be read.
          AuditLogError: it is wrong, or signed by another key, or heads are gone.
        """
        end = os.fstat(self._fd).st_size
        if self.newest is not None and end == self._end:
            return
        if end < self._end:
            raise self._damage(f"it has {end} bytes, and had {self._end}: heads were removed")
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
            raise self._damage(f"the last head is signed by another key than that of {KEY_NAME}")
        self.newest, self._digest = head, head_digest(line)

    def sign(self, tree: Frontier, end: Position, now: float) -> None:
        """Append a head over entries that are on disk.

        Raises:
          OSError: there is no room; the file is as it was.
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
            f"{self._path}: {what}; `triolet audit verify --audit {folder}` says more; put the "
            "file back from a copy, or keep the folder as it is, and begin a new log by `--audit` "
            f"with another one or by moving {folder} away"
        )
