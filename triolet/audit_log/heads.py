"""Signed heads of the log: what vouches for all entries up to a size, and the key that signs.

A head names the tree's size and root and the digest of the head before it. Heads are JSON lines,
signed by Ed25519 (RFC 8032) over the canonical JSON of their body.
"""

from __future__ import annotations

import os
import re
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

from ..errors import AuditLogError
from ..private_files import FILE_MODE, tighten
from .merkle import Frontier

if TYPE_CHECKING:
    from pathlib import Path

KEY_NAME: Final = "key.pem"
NO_HEAD: Final = "0" * 64
"""Stands for the digest of the head before the first one."""
MAX_HEAD_BYTES: Final = 8 * 1024
"""A body with 53 peaks of 64 digits, a signature, and room."""
MAX_LOG_ENTRIES: Final = 2**53
"""What every reader of JSON can count to."""
_BODY: Final = b'{"body":'
_MIDDLE: Final = b',"signature":"'
_END: Final = b'"}'
_SIGNATURE: Final = re.compile(rb"[0-9a-f]{128}")
_SIGNATURE_AT: Final = -(len(_END) + 128)
_BODY_END: Final = _SIGNATURE_AT - len(_MIDDLE)

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
        return b"".join((_BODY, body, _MIDDLE, signature, _END))


def open_key(folder: Path) -> SigningKey:
    """Return the key of a log; make it if the log has none yet. One process at a time.

    Raises:
      OSError: it cannot be read or written.
      AuditLogError: the file holds no such key.
      ConfigError: others may read it, and this user may not change that.
    """
    path = folder / KEY_NAME
    if not path.exists():
        _make_key(path)
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


def _make_key(path: Path) -> None:
    pem = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # of a process that was killed here
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def read_head(line: bytes) -> Head:
    """Return the head of a line, whose signature is that of the key that it names.

    Raises:
      HeadError: it is no head, or is not signed so.
    """
    signature = line[_SIGNATURE_AT : -len(_END)]
    body = line[len(_BODY) : _BODY_END]
    if (
        len(line) > MAX_HEAD_BYTES
        or not line.startswith(_BODY)
        or not line.endswith(_END)
        or line[_BODY_END:_SIGNATURE_AT] != _MIDDLE
        or not _SIGNATURE.fullmatch(signature)
    ):
        raise HeadError("it has not the form of a head")
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
