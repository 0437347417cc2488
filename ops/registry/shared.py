"""What a store shares with peers: some models, by what the OCI distribution protocol reads.

Nothing but digests, names and tags that patterns match is looked up; nothing else becomes a path.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from triolet.errors import StoreError
from triolet.store.aliases import Aliases
from triolet.store.manifest import (
    EMPTY_DOCUMENT,
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    Descriptor,
    canonical,
    digest_of,
)
from triolet.store.reference import DIGEST
from triolet.store.referrers import (
    EMPTY_TYPE,
    LAYER_TYPES,
    layer_of,
    read_artefact,
    referrers_of,
)
from triolet.store.verify import is_whole

from .manifests import INDEX_TYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.store.layout import ModelStore
    from triolet.store.reference import Reference

BLOB_TYPE: Final = "application/octet-stream"
_PATH: Final = re.compile(
    r"/v2/(?P<name>[a-z0-9][a-z0-9._-]{0,62})/(?P<kind>manifests|blobs|referrers)/"
    r"(?P<what>sha256:[0-9a-f]{64}|[A-Za-z0-9_][A-Za-z0-9._-]{0,127})"
)


class NotShared(Exception):
    """There is no such thing here, or not for peers; which of both is not said."""


class Document(NamedTuple):
    """A small answer.

    Attributes:
      content: the bytes.
      media_type: of these.
    """

    content: bytes
    media_type: str


class _Version(NamedTuple):
    """A version that is shared.

    Attributes:
      digest: of it.
      labels: tags and aliases under which peers may ask for it.
    """

    digest: str
    labels: frozenset[str]


class SharedModels:
    """The versions that some references mean now: an alias that moves takes what is shared with it.

    Args:
      store: that has them.
      references: what is shared; a name alone is every version of the model.
    """

    def __init__(self, store: ModelStore, references: Sequence[Reference]) -> None:
        self._store = store
        self._references = references

    def find(self, target: str) -> Document | Descriptor:
        """Return what a path of the protocol means: a document, or a blob that is whole.

        Args:
          target: of the request, with its query.

        Raises:
          NotShared: nothing that is shared.
          StoreError: the store is damaged.
        """
        try:
            parts = urlsplit(target)
        except ValueError:  # an address in brackets that is none
            raise NotShared from None
        if parts.path in ("/v2/", "/v2"):
            return Document(EMPTY_DOCUMENT, "application/json")
        found = _PATH.fullmatch(parts.path)
        if found is None:
            raise NotShared
        versions, what = self._versions(found["name"]), found["what"]
        match found["kind"]:
            case "manifests":
                return self._manifest(versions, what)
            case "referrers":
                kinds = parse_qs(parts.query).get("artifactType", list(LAYER_TYPES))
                return self._referrers(versions, what, kinds)
        return self._blob(versions, what)

    def _versions(self, name: str) -> list[_Version]:
        aliases = Aliases(self._store)
        pointers = {p: to for p, to in aliases.all().items() if p.name == name}
        labels: dict[str, set[str]] = {}
        for one in self._references:
            if one.name != name:
                continue
            if one.pointer is not None:
                if one.pointer in pointers:
                    labels.setdefault(pointers[one.pointer], set()).add(one.pointer.label)
            elif one.digest is not None:
                labels.setdefault(one.digest, set())
            else:
                for pointer, digest in pointers.items():
                    labels.setdefault(digest, set()).add(pointer.label)
                for entry in self._store.entries():
                    if entry.name == name:
                        labels.setdefault(entry.digest, set())
        here = {entry.digest for entry in self._store.entries() if entry.name == name}
        return [_Version(one, frozenset(labels[one])) for one in sorted(here & labels.keys())]

    def _manifest(self, versions: Sequence[_Version], what: str) -> Document:
        for one in versions:
            if what == one.digest or what in one.labels:
                content = self._store.read(one.digest, MAX_MANIFEST_BYTES)
                return Document(content, MANIFEST_TYPE)
            for kind in LAYER_TYPES:
                for named in referrers_of(self._store, one.digest, kind):
                    if what == named.digest:
                        return Document(self._store.read(what, named.size), MANIFEST_TYPE)
        raise NotShared

    def _referrers(self, versions: Sequence[_Version], what: str, kinds: Sequence[str]) -> Document:
        if not any(what == one.digest for one in versions):
            raise NotShared
        listed = [
            {
                "mediaType": MANIFEST_TYPE,
                "artifactType": kind,
                "digest": one.digest,
                "size": one.size,
            }
            for kind in LAYER_TYPES
            if kind in kinds
            for one in referrers_of(self._store, what, kind)
        ]
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": listed}
        return Document(canonical(index), INDEX_TYPE)

    def _blob(self, versions: Sequence[_Version], what: str) -> Descriptor:
        if not DIGEST.fullmatch(what):
            raise NotShared
        for one in versions:
            for blob in self._store.manifest(one.digest).blobs:
                if blob.digest == what:
                    return self._whole(blob)
            for kind in LAYER_TYPES:
                for named in referrers_of(self._store, one.digest, kind):
                    artefact = read_artefact(self._store, named)
                    if digest_of(artefact.layer) == what:
                        return self._whole(layer_of(artefact.manifest, kind, one.digest))
        if what == digest_of(EMPTY_DOCUMENT) and versions:
            return self._whole(Descriptor(EMPTY_TYPE, what, len(EMPTY_DOCUMENT)))
        raise NotShared

    def _whole(self, blob: Descriptor) -> Descriptor:
        """Return a blob that is what its digest says: by its receipt, or by reading it."""
        if not is_whole(self._store, blob):
            raise StoreError(f"blob {blob.digest} is damaged or missing; `triolet model verify`")
        return blob
