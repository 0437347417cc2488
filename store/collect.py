"""What goes: versions on request, and blobs that no version names.

Each step leaves a valid store: a version goes from the index first, its blobs follow.
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
"""Manifests that one collection removes: each is an open file meanwhile, and 1,024 are usual."""


class Removed(NamedTuple):
    """What a removal took.

    Attributes:
      pointer: the tag or alias, if one was named.
      digest: the version, unless another tag or alias names it.
    """

    pointer: Pointer | None
    digest: str | None


class CollectedVersions(NamedTuple):
    """What a collection removed.

    Attributes:
      num_blobs: how many; what a pull has left unfinished counts as one each.
      num_bytes: of these.
      in_use: removed versions that are served, and stay until a collection after that.
    """

    num_blobs: int
    num_bytes: int
    in_use: list[str]


def remove(writer: Writer, aliases: Aliases, reference: Reference) -> Removed:
    """Remove a tag or alias, and the version that a reference means if nothing else names it.

    Raises:
      StoreError: there is none, or the version itself is meant and has a tag or alias.
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
    """Remove all blobs that neither a version in the index nor a served one names, and what pulls
    have begun, unless one runs.

    Args:
      writer: of the store.
      wanted: digests of blobs that stay all the same.

    Raises:
      StoreError: a manifest cannot be read, so that what it names is not known; nothing is removed.
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
    """Return versions that stay though no name has them any more: those that are served, and those
    beyond MAX_HELD. All others cannot be served until `held` is closed."""
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
        return False  # some other small file, or one that nothing can be served by
    return True


def _views(store: ModelStore) -> list[Path]:
    folder = store.root / VIEWS
    return sorted(folder.iterdir()) if folder.is_dir() else []
