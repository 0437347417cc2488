"""Check blobs against their digests, by reading them or by their receipts."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from triolet.errors import StoreError

from .ingest import MAX_THREADS
from .layout import explained
from .receipts import now_ns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .layout import ModelStore, StoreEntry
    from .manifest import Descriptor


class Verified(NamedTuple):
    """Result of a verification.

    Attributes:
      num_versions: versions checked.
      num_blobs: their blobs, each once.
      num_bytes: total size of these blobs.
      faults: what is wrong, one sentence each with its remedy.
      signed: ids of the keys that signed a version, by its name and digest.
    """

    num_versions: int
    num_blobs: int
    num_bytes: int
    faults: list[str]
    signed: dict[str, tuple[str, ...]]


def verify(store: ModelStore, entries: Iterable[StoreEntry]) -> Verified:
    """Read every byte of some versions, regardless of receipts, and update the receipts.

    Raises:
      StoreError: the store cannot be read at all.
    """
    # Imported late: its libraries take longer to import than verifying by receipts.
    from .measured import measured_of
    from .referrers import CAPACITY_TYPE, GOLDEN_TYPE
    from .signatures import signatures_of

    faults: list[str] = []
    named: dict[str, tuple[Descriptor, str]] = {}
    signed: dict[str, tuple[str, ...]] = {}
    num_versions = 0
    for entry in entries:
        num_versions += 1
        version = f"{entry.name}@{entry.digest}"
        try:
            manifest = store.manifest(entry.digest)
        except StoreError as error:
            faults.append(f"{version}: {error}")
            continue
        for blob in manifest.blobs:
            named.setdefault(blob.digest, (blob, version))
        signatures = signatures_of(store, entry.digest)
        signed[version] = signatures.keys
        faults += [f"{version}: {fault}; sign it again" for fault in signatures.faults]
        faults += [
            f"{version}: {one}; `triolet model probe` measures it again"
            for kind in (GOLDEN_TYPE, CAPACITY_TYPE)
            for one in measured_of(store, entry.digest, kind)
            if isinstance(one, str)
        ]
    blobs = list(named.values())
    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="verify") as threads:
        found = threads.map(lambda one: _fault(store, *one), blobs)
        faults += [fault for fault in found if fault is not None]
    num_bytes = sum(blob.size for blob, _ in blobs)
    return Verified(num_versions, len(blobs), num_bytes, faults, signed)


def require_whole(store: ModelStore, version: str, blobs: Iterable[Descriptor]) -> None:
    """Check that a version's blobs are intact. Blobs unchanged since they were last read are not
    read again.

    Args:
      store: store with the blobs.
      version: for the error.
      blobs: to check.

    Raises:
      StoreError: one is missing or differs.
    """

    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="verify") as threads:
        for complaint in threads.map(lambda one: _unknown_fault(store, one, version), blobs):
            if complaint is not None:
                raise StoreError(complaint)


def is_whole(store: ModelStore, blob: Descriptor) -> bool:
    """Return whether a store has an intact blob."""
    try:
        return _unknown_fault(store, blob, "") is None
    except StoreError:
        return False


def _unknown_fault(store: ModelStore, blob: Descriptor, version: str) -> str | None:
    """Return what is wrong with a blob, if anything; it is not read again if it has not changed.

    Raises:
      StoreError: it is missing, or others may write it.
    """
    found = store.require_sound(store.blob_path(blob.digest))
    if store.receipts.find(found) == blob.digest:
        return None
    return _fault(store, blob, version)


def _num_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


def _fault(store: ModelStore, blob: Descriptor, version: str) -> str | None:
    """Read a blob and return what is wrong with it, if anything."""
    path = store.blob_path(blob.digest)
    what = blob.file_name or blob.media_type
    remedy = "import the model again from a good copy, which replaces the blob, or `triolet model "
    remedy += f"rm {version}`"
    read_at_ns = now_ns()
    try:
        found = store.require_sound(path)
        with explained(path), path.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except StoreError as error:
        return f"{what} of {version}: {error}"
    with explained(store.root):
        if digest != blob.digest:
            store.receipts.drop(found)
            return (
                f"{what} of {version} is damaged: {path} holds {digest}, expected {blob.digest} "
                f"of {blob.size} bytes; {remedy}"
            )
        if found.st_size != blob.size:
            return (
                f"{what} of {version}: the manifest says {blob.size} bytes, {path} has "
                f"{found.st_size} with the right digest; the manifest is wrong: {remedy}"
            )
        store.receipts.write_settled(found, digest, read_at_ns)
    return None
