"""Sign versions and check signatures: Ed25519 over a statement with the manifest's digest.

A signature is an OCI artefact with the version's manifest as its `subject`; its one layer is a DSSE
envelope around an in-toto statement. The id of a key is the public key itself, so a signature can
be checked with the id alone. The same key and version always give the same bytes.
"""

from __future__ import annotations

import base64
import os
import re
import stat
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

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

from triolet.errors import StoreError
from triolet.private_files import FILE_MODE

from .layout import explained
from .manifest import MANIFEST_TYPE, canonical, digest_of
from .referrers import (
    SIGNATURE_TYPE,
    Artefact,
    ReferrerFault,
    artefact,
    artefacts_of,
    keep_artefacts,
    layer_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from .layout import ModelStore, Writer

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "urn:triolet:model-version:v1"
KEY_ID: Final = re.compile(r"ed25519:[0-9a-f]{64}")
MAX_KEY_BYTES: Final = 16 << 10
"""Size of a private key file, which has about a hundred bytes."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Signed(NamedTuple):
    """The signatures of a version.

    Attributes:
      keys: ids of keys with a valid signature, sorted.
      faults: why others are invalid, one sentence each.
    """

    keys: tuple[str, ...]
    faults: tuple[str, ...]


class _Subject(msgspec.Struct, frozen=True):
    digest: dict[str, str]


class _Statement(msgspec.Struct, frozen=True, rename={"type": "_type"}):
    type: str
    subject: Annotated[tuple[_Subject, ...], msgspec.Meta(min_length=1, max_length=1)]
    predicate_type: str = msgspec.field(name="predicateType")


class _Signature(msgspec.Struct, frozen=True):
    keyid: str
    sig: str


class _Envelope(msgspec.Struct, frozen=True, rename="camel"):
    payload: str
    payload_type: str
    signatures: Annotated[tuple[_Signature, ...], msgspec.Meta(min_length=1, max_length=1)]


def require_key_id(text: str) -> str:
    """Check and return the id of a key.

    Raises:
      StoreError: it is not a valid id.
    """
    if not KEY_ID.fullmatch(text):
        raise StoreError(
            f"{text!r} is not a key id; allowed: ed25519: and 64 digits 0-9 a-f, as `triolet "
            "model key FILE` prints it"
        )
    return text


def make_key(path: Path) -> None:
    """Write a new private key in PEM format, readable only by this user.

    Raises:
      StoreError: the file exists, or cannot be written.
    """
    pem = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    with explained(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
      StoreError: it is missing, others may read it, or it is of another kind.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}; `triolet model key {path}` makes a key"
        ) from None
    if mode & _OTHERS:
        raise StoreError(
            f"{path} has mode {mode:04o}, so others may sign with it; `chmod 600 {path}`, and "
            "make a new key if others may have read it"
        )
    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError) as error:
        # TypeError: it is encrypted.
        raise StoreError(
            f"{path} is not a private key in PEM form without a passphrase: {error}; make one with "
            "`triolet model key FILE` or `openssl genpkey -algorithm ed25519`"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StoreError(f"{path} is not an Ed25519 key; make one with `triolet model key FILE`")
    return key


def key_id(key: Ed25519PrivateKey) -> str:
    """Return the id of a private key: its public key."""
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return f"ed25519:{public.hex()}"


def signature(digest: str, size: int, key: Ed25519PrivateKey) -> Artefact:
    """Sign a version.

    Args:
      digest: digest of its manifest.
      size: size of its manifest.
      key: private key.
    """
    payload = canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"digest": {"sha256": digest.removeprefix("sha256:")}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"mediaType": MANIFEST_TYPE, "size": size},
        }
    )
    signed = key.sign(signed_bytes(PAYLOAD_TYPE, payload))
    envelope = canonical(
        {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"keyid": key_id(key), "sig": base64.b64encode(signed).decode()}],
        }
    )
    return artefact(SIGNATURE_TYPE, envelope, digest, size)


def signed_bytes(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that DSSE signs for a payload (pre-authentication encoding)."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def signer(found: Artefact, digest: str) -> str:
    """Return the id of the key that signed a version.

    Raises:
      ReferrerFault: the signature is invalid, or belongs to another version.
    """
    layer = layer_of(found.manifest, SIGNATURE_TYPE, digest)
    if digest_of(found.layer) != layer.digest:
        raise ReferrerFault("its envelope does not match its manifest")
    try:
        envelope = msgspec.json.decode(found.layer, type=_Envelope)
        (given,) = envelope.signatures
        payload = base64.b64decode(envelope.payload, validate=True)
        signed = base64.b64decode(given.sig, validate=True)
        statement = msgspec.json.decode(payload, type=_Statement)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ReferrerFault(f"its envelope cannot be read: {error}") from None
    if not KEY_ID.fullmatch(given.keyid):
        raise ReferrerFault("its key is not Ed25519, or is not named")
    public = bytes.fromhex(given.keyid.removeprefix("ed25519:"))
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(
            signed, signed_bytes(envelope.payload_type, payload)
        )
    except (InvalidSignature, ValueError):
        raise ReferrerFault(f"{given.keyid} has not signed that") from None
    (subject,) = statement.subject
    said = (envelope.payload_type, statement.type, statement.predicate_type)
    if said != (PAYLOAD_TYPE, STATEMENT_TYPE, PREDICATE_TYPE):
        raise ReferrerFault(f"{given.keyid} has signed something else: {', '.join(said)}")
    if subject.digest != {"sha256": digest.removeprefix("sha256:")}:
        raise ReferrerFault(f"{given.keyid} has signed another version")
    return given.keyid


def signatures_of(store: ModelStore, digest: str) -> Signed:
    """Check all signatures of a version in a store."""
    keys, faults = set(), []
    for one in artefacts_of(store, digest, SIGNATURE_TYPE):
        if isinstance(one, str):
            faults.append(one)
            continue
        try:
            keys.add(signer(one, digest))
        except ReferrerFault as error:
            faults.append(f"signature {one.digest}: {error}")
    return Signed(tuple(sorted(keys)), tuple(faults))


def sign(writer: Writer, digest: str, key: Ed25519PrivateKey) -> None:
    """Sign a version in a store.

    Raises:
      StoreError: it has been removed, or the store cannot be written.
    """
    size = writer.require_size(digest)
    keep_artefacts(writer, digest, [(SIGNATURE_TYPE, signature(digest, size, key))])
