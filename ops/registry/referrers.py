"""Signatures in a registry: artefacts with the version as `subject`, found by the referrers' list
of OCI 1.1, or by its fallback tag where a registry has no such list."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from triolet.store.layout import SIGNATURE_TYPE
from triolet.store.manifest import (
    EMPTY_DOCUMENT,
    MANIFEST_TYPE,
    Descriptor,
    Digest,
    canonical,
    digest_of,
)
from triolet.store.signatures import (
    EMPTY_TYPE,
    MAX_SIGNATURE_BYTES,
    MAX_SIGNATURES,
    Artefact,
    SignatureFault,
    artefacts_of,
    envelope_of,
    signer,
)

from .blobs import has_blob, upload_bytes
from .client import ATTEMPTS, RegistryFailed
from .manifests import INDEX_TYPE, find_manifest, put_manifest

if TYPE_CHECKING:
    from triolet.store.layout import ModelStore

    from .client import Registry

MAX_PAGES: Final = 16
"""Of a list of referrers; registries put some hundred on a page, and can be asked for signatures
alone."""
_NO_LIST: Final = frozenset({400, 403, 404, 405, 501})
"""How registries without the list answer."""
_NEXT: Final = re.compile(r'<([^<>\s]+)>\s*;\s*rel="?next"?')


class FoundSignatures(NamedTuple):
    """The signatures of a version in a registry.

    Attributes:
      artefacts: the valid ones.
      signers: ids of their keys.
      notes: why others are not valid.
    """

    artefacts: list[Artefact]
    signers: tuple[str, ...]
    notes: tuple[str, ...]


class _Listed(msgspec.Struct, frozen=True, rename="camel"):
    """What a list says of a referrer."""

    digest: Digest
    size: int
    artifact_type: str = ""


class _List(msgspec.Struct, frozen=True):
    manifests: tuple[_Listed, ...] = ()


def fetch_signatures(registry: Registry, digest: str) -> FoundSignatures:
    """Bring the signatures of a version, each checked.

    Args:
      registry: with the repository of the version.
      digest: of the version.

    Raises:
      RegistryFailed: it cannot be asked, or lies.
    """
    artefacts, keys, notes = [], set(), []
    for listed in _listed(registry, digest)[:MAX_SIGNATURES]:
        try:
            if listed.size > MAX_SIGNATURE_BYTES:
                raise SignatureFault(f"its manifest has {listed.size} bytes")
            manifest = find_manifest(registry, listed.digest)
            if manifest is None:
                raise SignatureFault("it is listed, and not there")
            envelope = _fetch_envelope(registry, envelope_of(manifest, digest))
            artefact = Artefact(manifest, envelope)
            keys.add(signer(artefact, digest))
            artefacts.append(artefact)
        except SignatureFault as error:
            notes.append(f"signature {listed.digest} there is not valid and is not kept: {error}")
    return FoundSignatures(artefacts, tuple(sorted(keys)), tuple(notes))


def send_signatures(registry: Registry, store: ModelStore, digest: str) -> int:
    """Send the signatures of a version that a registry does not list; return how many.

    Args:
      registry: that has the version.
      store: that has the signatures.
      digest: of the version.

    Raises:
      RegistryFailed: one is refused.
      StoreError: one is damaged here.
    """
    missing = unlisted_signatures(registry, store, digest)
    unlisted = []
    for one in missing:
        for media_type, content in ((EMPTY_TYPE, EMPTY_DOCUMENT), ("", one.envelope)):
            blob = Descriptor(media_type, digest_of(content), len(content))
            if not has_blob(registry, blob):
                upload_bytes(registry, blob, content)
        if not put_manifest(registry, one.digest, one.manifest):
            unlisted.append(one)
    if unlisted:
        _list_by_tag(registry, digest, unlisted)
    return len(missing)


def unlisted_signatures(registry: Registry, store: ModelStore, digest: str) -> list[Artefact]:
    """Return the signatures of a version that a store has and a registry does not list.

    Raises:
      RegistryFailed: it cannot be asked, or lies.
    """
    ours = [one for one in artefacts_of(store, digest) if not isinstance(one, str)]
    if not ours:
        return []
    known = {one.digest for one in _listed(registry, digest)}
    return [one for one in ours if one.digest not in known]


def _listed(registry: Registry, digest: str) -> list[_Listed]:
    """Return what a registry lists as signatures of a version."""
    what = f"list of signatures of {digest}"
    path: str | None = f"referrers/{digest}?artifactType={SIGNATURE_TYPE.replace('+', '%2B')}"
    found: list[_Listed] = []
    for _ in range(MAX_PAGES):
        if path is None:
            break
        answer = registry.call("GET", path, what, {200, *_NO_LIST}, headers={"accept": INDEX_TYPE})
        if answer.status != 200:
            content = find_manifest(registry, _fallback_tag(digest))
            return [] if content is None else _signatures_in(registry, content, what)
        found += _signatures_in(registry, answer.content, what)
        following = _NEXT.search(answer.headers.get("link", ""))
        path = None if following is None else following[1]
    return found


def _signatures_in(registry: Registry, content: bytes, what: str) -> list[_Listed]:
    try:
        listed = msgspec.json.decode(content, type=_List)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryFailed(
            f"{registry}: its {what} cannot be read: {error}; have its operator look at it"
        ) from None
    return [one for one in listed.manifests if one.artifact_type == SIGNATURE_TYPE]


def _fetch_envelope(registry: Registry, layer: Descriptor) -> bytes:
    """Return the bytes of an envelope; they are compared with its digest when it is checked."""
    path = f"blobs/{layer.digest}"
    found = registry.call("GET", path, f"signature {layer.digest}", {200, 404})
    if found.status != 200:
        raise SignatureFault("its envelope is not there")
    return found.content


def _fallback_tag(digest: str) -> str:
    return digest.replace(":", "-")


def _list_by_tag(registry: Registry, digest: str, artefacts: list[Artefact]) -> None:
    """Add signatures to the index that stands for a list; another push may do so at once."""
    ours: dict[str, dict[str, Any]] = {
        one.digest: {
            "mediaType": MANIFEST_TYPE,
            "artifactType": SIGNATURE_TYPE,
            "digest": one.digest,
            "size": len(one.manifest),
        }
        for one in artefacts
    }
    tag = _fallback_tag(digest)
    for _ in range(ATTEMPTS):
        content = find_manifest(registry, tag)
        try:
            document = msgspec.json.decode(content or EMPTY_DOCUMENT, type=dict[str, Any])
            there = list(document.get("manifests", ()))
            missing = ours.keys() - {one["digest"] for one in there}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
            raise RegistryFailed(
                f"{registry}: its tag {tag} is no list of signatures; remove the tag there, and "
                "push again"
            ) from None
        if not missing:
            return
        index = {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": there + [ours[one] for one in sorted(missing)],
        }
        put_manifest(registry, tag, canonical(index), INDEX_TYPE)
    raise RegistryFailed(
        f"{registry}: other pushes change its tag {tag} all the time, or it does not keep it; push "
        "again"
    )
