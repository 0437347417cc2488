"""Signatures and measurements in a registry: artefacts with the version as `subject`, listed by OCI
1.1's referrers API, or by its fallback tag where a registry does not support it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from triolet.errors import RegistryFailed

from ..manifest import (
    EMPTY_DOCUMENT,
    MANIFEST_TYPE,
    Descriptor,
    Digest,
    canonical,
    digest_of,
)
from ..measured import read_measured
from ..referrers import (
    EMPTY_TYPE,
    LAYER_TYPES,
    MAX_PART_BYTES,
    MAX_REFERRERS,
    SIGNATURE_TYPE,
    WORDS,
    Artefact,
    ReferrerFault,
    artefacts_of,
    layer_of,
)
from ..signatures import signer
from .blobs import has_blob, upload_content
from .client import ATTEMPTS, INDEX_TYPE, Registry, find_manifest, put_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..layout import ModelStore

MAX_PAGES: Final = 16
"""Size of a list of referrers; registries put about a hundred on a page and can filter by type."""
_NO_LIST: Final = frozenset({400, 403, 404, 405, 501})
"""Answers of registries without the referrers API."""
_NEXT: Final = re.compile(r'<([^<>\s]+)>\s*;\s*rel="?next"?')


class FoundReferrers(NamedTuple):
    """The artefacts of a version in a registry.

    Attributes:
      artefacts: the valid ones, each with its type.
      signers: ids of keys with a signature among them.
      notes: why others are invalid.
    """

    artefacts: list[tuple[str, Artefact]]
    signers: tuple[str, ...]
    notes: tuple[str, ...]


class _Listed(msgspec.Struct, frozen=True, rename="camel"):
    """An entry in a list of referrers."""

    digest: Digest
    artifact_type: str = ""


class _List(msgspec.Struct, frozen=True):
    manifests: tuple[_Listed, ...] = ()


class _Index(msgspec.Struct, frozen=True):
    """A list with all its fields, for writing it back."""

    manifests: tuple[dict[str, Any], ...] = ()


def fetch_referrers(registry: Registry, digest: str) -> FoundReferrers:
    """Fetch the signatures and measurements of a version, each checked.

    Args:
      registry: with the repository of the version.
      digest: digest of the version.

    Raises:
      RegistryFailed: it cannot be reached, or lies.
    """
    artefacts: list[tuple[str, Artefact]] = []
    keys, notes = set(), []
    listed = [(kind, one) for kind in LAYER_TYPES for one in _listed(registry, digest, kind)]
    for kind, referrer in listed:
        try:
            artefact = _fetch(registry, kind, referrer, digest)
            if kind == SIGNATURE_TYPE:
                keys.add(signer(artefact, digest))
            else:
                read_measured(artefact, kind, digest)
            artefacts.append((kind, artefact))
        except ReferrerFault as error:
            notes.append(f"{WORDS[kind]} {referrer} there is not valid and is not kept: {error}")
    return FoundReferrers(artefacts, tuple(sorted(keys)), tuple(notes))


def _fetch(registry: Registry, kind: str, referrer: str, digest: str) -> Artefact:
    """Return a version's artefact; the caller checks the content of its layer.

    Raises:
      ReferrerFault: it is missing, or too large for the store.
    """
    manifest = find_manifest(registry, referrer)
    if not manifest:
        raise ReferrerFault("it is listed but missing")
    layer = layer_of(manifest, kind, digest).digest
    answer, content = registry.call("GET", f"blobs/{layer}", f"{WORDS[kind]} {layer}", {200, 404})
    if answer.status_code != 200:
        raise ReferrerFault("its layer is missing")
    for part, there in (("manifest", manifest), ("layer", content)):
        if len(there) > MAX_PART_BYTES:
            raise ReferrerFault(f"its {part} has {len(there)} bytes")
    return Artefact(manifest, content)


def send_referrers(registry: Registry, store: ModelStore, digest: str) -> int:
    """Send the signatures and measurements of a version that a registry does not list; return their
    number.

    Args:
      registry: registry with the version.
      store: store with the artefacts.
      digest: digest of the version.

    Raises:
      RegistryFailed: one is refused.
      StoreError: one is damaged here.
    """
    missing = unlisted_referrers(registry, store, digest, tuple(LAYER_TYPES))
    unlisted = []
    for kind, one in missing:
        for media_type, content in ((EMPTY_TYPE, EMPTY_DOCUMENT), ("", one.layer)):
            blob = Descriptor(media_type, digest_of(content), len(content))
            if not has_blob(registry, blob):
                upload_content(registry, blob, content)
        if not put_manifest(registry, one.digest, one.manifest):
            unlisted.append((kind, one))
    if unlisted:
        _list_by_tag(registry, digest, unlisted)
    return len(missing)


def unlisted_referrers(
    registry: Registry, store: ModelStore, digest: str, kinds: Sequence[str]
) -> list[tuple[str, Artefact]]:
    """Return the artefacts of some types that a store has for a version and a registry does not
    list, each with its type.

    Raises:
      RegistryFailed: it cannot be reached, or lies.
    """
    missing: list[tuple[str, Artefact]] = []
    for kind in kinds:
        ours = [one for one in artefacts_of(store, digest, kind) if not isinstance(one, str)]
        known = _listed(registry, digest, kind) if ours else []
        missing += [(kind, one) for one in ours if one.digest not in known]
    return missing


def _listed(registry: Registry, digest: str, kind: str) -> list[str]:
    """Return the digests of a version's artefacts of a type that a registry lists."""
    what = f"list of referrers ({WORDS[kind]}) of {digest}"
    path = f"referrers/{digest}?artifactType={kind.replace('+', '%2B')}"
    found: list[str] = []
    for _ in range(MAX_PAGES):
        answer, content = registry.call(
            "GET", path, what, {200, *_NO_LIST}, headers={"accept": INDEX_TYPE}
        )
        if answer.status_code != 200:
            content = find_manifest(registry, _fallback_tag(digest)) or EMPTY_DOCUMENT
        try:
            rows = msgspec.json.decode(content, type=_List).manifests
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RegistryFailed(
                f"{registry}: its {what} cannot be read: {error}; have its operator check it"
            ) from None
        found += [one.digest for one in rows if one.artifact_type == kind]
        following = _NEXT.search(answer.headers.get("link", ""))
        if following is None:
            break
        path = following[1]
    return found[:MAX_REFERRERS]


def _fallback_tag(digest: str) -> str:
    return digest.replace(":", "-")


def _list_by_tag(
    registry: Registry, digest: str, artefacts: Sequence[tuple[str, Artefact]]
) -> None:
    """Add artefacts to the index under the fallback tag; another push may do so at the same
    time."""
    tag = _fallback_tag(digest)
    ours = [
        {
            "mediaType": MANIFEST_TYPE,
            "artifactType": kind,
            "digest": one.digest,
            "size": len(one.manifest),
        }
        for kind, one in artefacts
    ]
    for _ in range(ATTEMPTS):
        content = find_manifest(registry, tag) or EMPTY_DOCUMENT
        try:
            there = msgspec.json.decode(content, type=_Index).manifests
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise RegistryFailed(
                f"{registry}: its tag {tag} is not a list of referrers; remove the tag there, and "
                "push again"
            ) from None
        missing = [one for one in ours if one["digest"] not in [row.get("digest") for row in there]]
        if not missing:
            return
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*there, *missing]}
        put_manifest(registry, tag, canonical(index), INDEX_TYPE)
    raise RegistryFailed(
        f"{registry}: other pushes change its tag {tag} all the time, or it does not keep it; push "
        "again"
    )
