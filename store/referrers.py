"""Artefacts attached to a version: OCI artefacts with its manifest as their `subject`.

Each has the empty config and one layer. Signatures (signatures.py) and measurements (measured.py)
are stored, sent and removed in the same way; they are removed with their version.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from triolet.errors import StoreError

from .layout import Referrer
from .manifest import EMPTY_DOCUMENT, MANIFEST_TYPE, Descriptor, canonical, digest_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from .layout import ModelStore, Writer

EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"
ENVELOPE_TYPE: Final = "application/vnd.dsse.envelope.v1+json"
SIGNATURE_TYPE: Final = "application/vnd.triolet.signature.v1+json"
GOLDEN_TYPE: Final = "application/vnd.triolet.golden.v1+json"
CAPACITY_TYPE: Final = "application/vnd.triolet.capacity.v1+json"
LAYER_TYPES: Final = {
    SIGNATURE_TYPE: ENVELOPE_TYPE,
    GOLDEN_TYPE: GOLDEN_TYPE,
    CAPACITY_TYPE: CAPACITY_TYPE,
}
"""Type of the layer, by type of artefact."""
WORDS: Final = {
    SIGNATURE_TYPE: "signature",
    GOLDEN_TYPE: "golden tokens",
    CAPACITY_TYPE: "capacity",
}
"""Names of the types for people."""
MAX_PART_BYTES: Final = 16 << 10
"""Size of an artefact's manifest or layer; ours have less than a kilobyte each."""
MAX_REFERRERS: Final = 64
"""Artefacts of one type and version that are read: signers of a release, kinds of machines."""


class ReferrerFault(ValueError):
    """An artefact does not match its version; the message says why."""


class Artefact(NamedTuple):
    """An artefact as stored and sent.

    Attributes:
      manifest: manifest of the artefact.
      layer: its one layer.
    """

    manifest: bytes
    layer: bytes

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return digest_of(self.manifest)


class _Artefact(msgspec.Struct, frozen=True, rename="camel"):
    artifact_type: str
    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], msgspec.Meta(min_length=1, max_length=1)]
    subject: Descriptor


def artefact(artifact_type: str, layer: bytes, digest: str, size: int) -> Artefact:
    """Create an artefact for a version.

    Args:
      artifact_type: one of LAYER_TYPES.
      layer: its content.
      digest: digest of the version's manifest.
      size: size of that manifest.
    """

    def named(media_type: str, content: bytes) -> dict[str, Any]:
        return {"mediaType": media_type, "digest": digest_of(content), "size": len(content)}

    manifest = canonical(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": artifact_type,
            "config": named(EMPTY_TYPE, EMPTY_DOCUMENT),
            "layers": [named(LAYER_TYPES[artifact_type], layer)],
            "subject": {"mediaType": MANIFEST_TYPE, "digest": digest, "size": size},
        }
    )
    return Artefact(manifest, layer)


def layer_of(manifest: bytes, artifact_type: str, digest: str) -> Descriptor:
    """Return the layer of a version's artefact.

    Args:
      manifest: manifest of the artefact.
      artifact_type: expected type.
      digest: digest of the version.

    Raises:
      ReferrerFault: it is not such an artefact, or belongs to another version.
    """
    try:
        found = msgspec.json.decode(manifest, type=_Artefact)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ReferrerFault(f"its manifest cannot be read: {error}") from None
    (layer,) = found.layers
    if (found.artifact_type, layer.media_type) != (artifact_type, LAYER_TYPES[artifact_type]):
        raise ReferrerFault(f"it is {found.artifact_type!r} with a {layer.media_type!r}")
    if found.config.digest != digest_of(EMPTY_DOCUMENT):
        raise ReferrerFault("it has a config, but such artefacts have none")
    if found.subject.digest != digest:
        raise ReferrerFault(f"its subject is {found.subject.digest}, another version")
    if layer.size > MAX_PART_BYTES:
        raise ReferrerFault(f"its layer has {layer.size} bytes")
    return layer


def referrers_of(store: ModelStore, digest: str, artifact_type: str) -> list[Referrer]:
    """Return a version's artefacts of a type, as listed in the index."""
    found = [one for one in store.referrers(digest) if one.artifact_type == artifact_type]
    return found[:MAX_REFERRERS]


def read_artefact(store: ModelStore, named: Referrer) -> Artefact:
    """Read an artefact of a known type.

    Raises:
      ReferrerFault: it does not match its entry in the index.
      StoreError: a part is missing or damaged.
    """
    manifest = store.read(named.digest, MAX_PART_BYTES)
    layer = layer_of(manifest, named.artifact_type, named.subject)
    return Artefact(manifest, store.read(layer.digest, MAX_PART_BYTES))


def artefacts_of(store: ModelStore, digest: str, artifact_type: str) -> list[Artefact | str]:
    """Return a version's artefacts of a type; for each damaged one, a sentence that says so."""
    found: list[Artefact | str] = []
    for one in referrers_of(store, digest, artifact_type):
        try:
            found.append(read_artefact(store, one))
        except (StoreError, ReferrerFault) as error:
            found.append(f"{WORDS[artifact_type]} {one.digest}: {error}")
    return found


def keep_artefacts(
    writer: Writer,
    digest: str,
    artefacts: Collection[tuple[str, Artefact]],
    replaced: Collection[str] = (),
) -> None:
    """Store artefacts with their version, which is in the index.

    Args:
      writer: writer of the store.
      digest: digest of the version.
      artefacts: each with its type.
      replaced: digests of artefacts to remove.

    Raises:
      StoreError: they cannot be written, or a version may not have so many.
    """
    store = writer.store
    for _, one in artefacts:
        for content in (EMPTY_DOCUMENT, one.layer, one.manifest):
            writer.put(content)
    new = {Referrer(digest, one.digest, len(one.manifest), kind) for kind, one in artefacts}
    here = {one for one in store.referrers() if one.digest not in replaced}
    for kind in {kind for kind, _ in artefacts}:
        same = sum((one.subject, one.artifact_type) == (digest, kind) for one in here | new)
        if same > MAX_REFERRERS:
            raise StoreError(
                f"{digest} has {MAX_REFERRERS} artefacts {kind}, the most that are read; "
                "remove the version with `triolet model rm` and import it again without them"
            )
    writer.set_entries(store.entries(), here | new)


def blobs_of_referrers(store: ModelStore) -> set[str]:
    """Return the blobs of all artefacts in the index, of any type; for a damaged one, only its
    manifest."""
    found = set()
    for one in store.referrers():
        found |= {one.digest, digest_of(EMPTY_DOCUMENT)}
        with suppress(StoreError, msgspec.DecodeError, ValueError, RecursionError):
            manifest = store.read(one.digest, MAX_PART_BYTES)
            named = msgspec.json.decode(manifest, type=_Artefact)
            found |= {named.config.digest, *(layer.digest for layer in named.layers)}
    return found
