"""Views of versions: folders of links to blobs under their file names, for model loaders.

A view follows from the manifest alone, so concurrent processes create the same one. While a version
is served, a shared lock on its manifest protects its blobs from `gc`.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from triolet.errors import StoreError

from .layout import explained, take_lock
from .verify import require_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .layout import ModelStore
    from .manifest import Manifest

VIEWS: Final = "views"
COLLECTION_S: Final = 30.0
"""Seconds to wait for a collection that removes a version: it unlinks a few hundred files."""


@contextmanager
def opened(store: ModelStore, digest: str) -> Iterator[tuple[Path, Manifest]]:
    """Protect a version from removal, and yield the folder of its files, all checked.

    Args:
      store: store with the version.
      digest: digest of its manifest.

    Raises:
      StoreError: a blob is missing or damaged, or the folder cannot be written.
    """
    with explained(store.root):
        try:
            descriptor = os.open(store.blob_path(digest), os.O_RDONLY)
        except FileNotFoundError:
            raise StoreError(
                f"{store.root} no longer has version {digest}; import the model again"
            ) from None
    try:
        complaint = (
            f"`triolet model gc` has been running in {store.root} for {COLLECTION_S:g} s; wait for "
            "it, and try again"
        )
        take_lock(descriptor, fcntl.LOCK_SH, COLLECTION_S, lambda: complaint)
        manifest = store.manifest(digest)  # only after locking: it may just have been removed
        require_whole(store, digest, manifest.blobs)
        with explained(store.root):
            view = _written(store, digest, manifest)
        yield view, manifest
    finally:
        os.close(descriptor)


def _written(store: ModelStore, digest: str, manifest: Manifest) -> Path:
    """Create missing links, and return the folder."""
    view = store.root / VIEWS / digest.removeprefix("sha256:")
    for layer in manifest.layers:
        if layer.file_name is None:
            continue
        link = view / layer.file_name
        link.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(store.blob_path(layer.digest), link.parent)
        if link.is_symlink() and os.readlink(link) == target:
            continue
        link.unlink(missing_ok=True)
        with suppress(FileExistsError):  # another process has just created it
            link.symlink_to(target)
    return view
