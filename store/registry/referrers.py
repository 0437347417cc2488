"""Signatures and measurements in a registry: artefacts with the version as `subject`, found by the
referrers' list of OCI 1.1, or by its fallback tag where a registry has no such list."""

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
from .blobs import has_blob, upload_bytes
from .client import ATTEMPTS
from .manifests import INDEX_TYPE, find_manifest, put_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..layout import ModelStore
    from .client import Registry

MAX_PAGES: Final = 16
"""Of a list of referrers; registries put some hundred on a page, and can be asked for one type
alone."""
_NO_LIST: Final = frozenset({400, 403, 404, 405, 501})
"""How registries without the list answer."""
_NEXT: Final = re.compile(r'<([^<>\s]+)>\s*;\s*rel="?next"?')


class FoundReferrers(NamedTuple):
    """What a registry has about a version.

    Attributes:
      artefacts: the valid ones, each with its type.
      signers: ids of keys with a signature among them.
      notes: why others are not valid.
    """

    artefacts: list[tuple[str, Artefact]]
    signers: tuple[str, ...]
    notes: tuple[str, ...]


class _Listed(msgspec.Struct, frozen=True, rename="camel"):
    """What a list says of a referrer."""

    digest: Digest
    size: int
    artifact_type: str = ""


class _List(msgspec.Struct, frozen=True):
    manifests: tuple[_Listed, ...] = ()


def fetch_referrers(registry: Registry, digest: str) -> FoundReferrers:
    """Bring the signatures and measurements of a version, each checked.

    Args:
      registry: with the repository of the version.
      digest: of the version.

    Raises:
      RegistryFailed: it cannot be asked, or lies.
    """
    artefacts: list[tuple[str, Artefact]] = []
    keys, notes = set(), []
    for kind, listed in _listed(registry, digest):
        try:
            if listed.size > MAX_PART_BYTES:
                raise ReferrerFault(f"its manifest has {listed.size} bytes")
            manifest = find_manifest(registry, listed.digest)
            if manifest is None:
                raise ReferrerFault("it is listed, and not there")
            if len(manifest) > MAX_PART_BYTES:  # whatever the list says: the store reads no more
                raise ReferrerFault(f"its manifest has {len(manifest)} bytes")
            layer = _fetch_layer(registry, kind, layer_of(manifest, kind, digest))
            artefact = Artefact(manifest, layer)
            if kind == SIGNATURE_TYPE:
                keys.add(signer(artefact, digest))
            else:
                read_measured(artefact, kind, digest)
            artefacts.append((kind, artefact))
        except ReferrerFault as error:
            words = f"{WORDS[kind]} {listed.digest}"
            notes.append(f"{words} there is not valid and is not kept: {error}")
    return FoundReferrers(artefacts, tuple(sorted(keys)), tuple(notes))


def send_referrers(registry: Registry, store: ModelStore, digest: str) -> int:
    """Send the signatures and measurements of a version that a registry does not list; return how
    many.

    Args:
      registry: that has the version.
      store: that has them.
      digest: of the version.

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
                upload_bytes(registry, blob, content)
        if not put_manifest(registry, one.digest, one.manifest):
            unlisted.append((kind, one))
    if unlisted:
        _list_by_tag(registry, digest, unlisted)
    return len(missing)


def unlisted_referrers(
    registry: Registry, store: ModelStore, digest: str, kinds: Sequence[str]
) -> list[tuple[str, Artefact]]:
    """Return the artefacts of some types about a version that a store has and a registry does not
    list, each with its type.

    Raises:
      RegistryFailed: it cannot be asked, or lies.
    """
    ours = [
        (kind, one)
        for kind in kinds
        for one in artefacts_of(store, digest, kind)
        if not isinstance(one, str)
    ]
    if not ours:
        return []
    known = {listed.digest for _, listed in _listed(registry, digest, kinds)}
    return [(kind, one) for kind, one in ours if one.digest not in known]


def _listed(
    registry: Registry, digest: str, kinds: Sequence[str] = tuple(LAYER_TYPES)
) -> list[tuple[str, _Listed]]:
    """Return what a registry lists about a version, each with its type: some of each type."""
    found: list[tuple[str, _Listed]] = []
    for place, kind in enumerate(kinds):
        listed = _listed_as(registry, digest, kind)
        if listed is None:
            return found + _listed_by_tag(registry, digest, kinds[place:])
        found += [(kind, one) for one in listed[:MAX_REFERRERS]]
    return found


def _listed_by_tag(
    registry: Registry, digest: str, kinds: Sequence[str]
) -> list[tuple[str, _Listed]]:
    """Return the same from the index that stands for a list."""
    content = find_manifest(registry, _fallback_tag(digest))
    if content is None:
        return []
    what = f"list of what is about {digest}"
    return [
        (kind, one)
        for kind in kinds
        for one in _of_type(registry, content, kind, what)[:MAX_REFERRERS]
    ]


def _listed_as(registry: Registry, digest: str, kind: str) -> list[_Listed] | None:
    """Return what a registry's list of a version has of a type; None if there are no lists."""
    what = f"list of referrers ({WORDS[kind]}) of {digest}"
    path: str | None = f"referrers/{digest}?artifactType={kind.replace('+', '%2B')}"
    found: list[_Listed] = []
    for _ in range(MAX_PAGES):
        if path is None:
            break
        answer = registry.call("GET", path, what, {200, *_NO_LIST}, headers={"accept": INDEX_TYPE})
        if answer.status != 200:
            return None
        found += _of_type(registry, answer.content, kind, what)
        following = _NEXT.search(answer.headers.get("link", ""))
        path = None if following is None else following[1]
    return found


def _of_type(registry: Registry, content: bytes, kind: str, what: str) -> list[_Listed]:
    try:
        listed = msgspec.json.decode(content, type=_List)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryFailed(
            f"{registry}: its {what} cannot be read: {error}; have its operator look at it"
        ) from None
    return [one for one in listed.manifests if one.artifact_type == kind]


def _fetch_layer(registry: Registry, kind: str, layer: Descriptor) -> bytes:
    """Return the bytes of a layer; they are compared with its digest when it is checked."""
    path = f"blobs/{layer.digest}"
    found = registry.call("GET", path, f"{WORDS[kind]} {layer.digest}", {200, 404})
    if found.status != 200:
        raise ReferrerFault("its layer is not there")
    # Bytes of another digest are refused where that is checked.
    if digest_of(found.content) == layer.digest and len(found.content) != layer.size:
        raise ReferrerFault(
            f"its layer has {len(found.content)} bytes, and its manifest says {layer.size}"
        )
    return found.content


def _fallback_tag(digest: str) -> str:
    return digest.replace(":", "-")


def _list_by_tag(
    registry: Registry, digest: str, artefacts: Sequence[tuple[str, Artefact]]
) -> None:
    """Add artefacts to the index that stands for a list; another push may do so at once."""
    ours: dict[str, dict[str, Any]] = {
        one.digest: {
            "mediaType": MANIFEST_TYPE,
            "artifactType": kind,
            "digest": one.digest,
            "size": len(one.manifest),
        }
        for kind, one in artefacts
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
                f"{registry}: its tag {tag} is no list of referrers; remove the tag there, and "
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
