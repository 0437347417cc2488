"""Remove versions, and unused blobs (`triolet model rm` and `gc`).

Each step leaves a valid store: a version is removed from the index before its blobs are.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.errors import StoreError

from .layout import explained, sync_folder
from .manifest import MAX_MANIFEST_BYTES
from .partial import Partials
from .reference import DIGEST
from .referrers import blobs_of_referrers
from .sources import Sources
from .view import VIEWS

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from .aliases import Aliases
    from .layout import ModelStore, Writer
    from .reference import Pointer, Reference


MAX_HELD: Final = 500
"""Manifests that one collection removes: it keeps each open, and a usual limit is 1,024 files."""


class Removed(NamedTuple):
    """Result of a removal.

    Attributes:
      pointer: the removed tag or alias, if one was named.
      digest: the removed version, unless another tag or alias still names it.
    """

    pointer: Pointer | None
    digest: str | None


class CollectedVersions(NamedTuple):
    """Result of a collection.

    Attributes:
      num_blobs: removed blobs; each unfinished download counts as one.
      num_bytes: their size.
      in_use: removed versions that are still served; their blobs stay until a later collection.
    """

    num_blobs: int
    num_bytes: int
    in_use: list[str]


def remove(writer: Writer, aliases: Aliases, reference: Reference) -> Removed:
    """Remove a tag or alias, and its version if it has no other name.

    Raises:
      StoreError: it does not exist, or the reference is a digest that still has a tag or alias.
    """
    if reference.pointer is None:
        digest = aliases.resolve(reference)
    else:
        digest = aliases.remove(reference.pointer)
        if any(p.name == reference.name and to == digest for p, to in aliases.all().items()):
            return Removed(reference.pointer, None)
    with aliases.unnamed(reference.name, digest):
        entries = writer.store.entries()
        gone = (reference.name, digest)
        writer.set_entries([one for one in entries if (one.name, one.digest) != gone])
    Sources(writer.store).drop(*gone)
    return Removed(reference.pointer, digest)


def collect(writer: Writer, wanted: Collection[str] = ()) -> CollectedVersions:
    """Remove all blobs that belong to no version in the index and to no served one. Unfinished
    downloads go too, unless a pull is running.

    Args:
      writer: writer of the store.
      wanted: digests of further blobs to keep.

    Raises:
      StoreError: a manifest cannot be read, so its blobs are unknown; nothing is removed.
    """
    store = writer.store
    roots = {entry.digest for entry in store.entries()}
    with ExitStack() as held, explained(store.root):
        in_use = _removed_but_served(store, roots, held)
        kept = {*roots, *wanted}
        for digest in roots | set(in_use):
            kept |= {digest, *(blob.digest for blob in store.manifest(digest).blobs)}
        kept |= blobs_of_referrers(store)
        for view in _views(store):
            if f"sha256:{view.name}" not in kept:
                shutil.rmtree(view)
        num_blobs = num_bytes = 0
        for path in sorted(store.blobs.iterdir()):
            digest = f"sha256:{path.name}"
            if DIGEST.fullmatch(digest) and digest not in kept:
                num_bytes += path.lstat().st_size
                path.unlink()
                num_blobs += 1
        sync_folder(store.blobs)
        store.receipts.keep_only(kept)
        num_partial, partial_bytes = Partials(store).collect()
    return CollectedVersions(num_blobs + num_partial, num_bytes + partial_bytes, sorted(in_use))


def _removed_but_served(store: ModelStore, roots: set[str], held: ExitStack) -> set[str]:
    """Return versions without a name that stay: those being served, and those beyond MAX_HELD. The
    others cannot be served until `held` is closed."""
    stay, num_held = set(), 0
    for path in sorted(store.blobs.iterdir()):
        digest = f"sha256:{path.name}"
        if digest in roots or not _is_manifest(store, path, digest):
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if num_held == MAX_HELD:
                raise BlockingIOError
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            stay.add(digest)
        else:
            held.callback(os.close, descriptor)
            num_held += 1
    return stay


def _is_manifest(store: ModelStore, path: Path, digest: str) -> bool:
    if not DIGEST.fullmatch(digest) or path.lstat().st_size > MAX_MANIFEST_BYTES:
        return False
    try:
        store.manifest(digest)
    except StoreError:
        return False  # another small file, or not a usable manifest
    return True


def _views(store: ModelStore) -> list[Path]:
    folder = store.root / VIEWS
    return sorted(folder.iterdir()) if folder.is_dir() else []
