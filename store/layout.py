"""The store on disk: `oci-layout`, `index.json`, `blobs/sha256/…`, and the writers' lock.

Every file under its final name is complete: it is written under `tmp/`, synced and renamed, and its
folder is synced. The next writer removes files that a killed writer left in `tmp/`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from triolet.errors import StoreError
from triolet.home import data_home

from .manifest import (
    ARTIFACT_TYPE,
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    Descriptor,
    canonical,
    digest_of,
    read_manifest,
)
from .receipts import Receipts
from .reference import DIGEST, require_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from .manifest import Manifest

LAYOUT_FILE: Final = "oci-layout"
INDEX_FILE: Final = "index.json"
LOCK_FILE: Final = "lock"
_LAYOUT: Final = {"imageLayoutVersion": "1.0.0"}
_INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"
NAME: Final = "vnd.triolet.name"
"""Annotation of a manifest in the index: the model's name."""
SUBJECT: Final = "vnd.triolet.subject"
"""Annotation of an artefact's manifest in the index: the version that it belongs to."""
BLOB_MODE: Final = 0o444
"""A blob never changes."""
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
LOCK_TIMEOUT_S: Final = 900.0
"""Seconds to wait for another writer: an import of 200 GB takes about ten minutes on two cores."""
LOCK_POLL_S: Final = 0.05
"""Interval at which a held lock is tried: not noticeable for people, and negligible next to an
import."""
MAX_INDEX_BYTES: Final = 64 << 20
"""Some 200,000 versions."""
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_RIGHT: Final = {errno.EACCES, errno.EPERM, errno.EROFS}


class StoreEntry(NamedTuple):
    """A version in the index.

    Attributes:
      name: name of the model.
      digest: digest of the manifest.
      size: size of the manifest.
    """

    name: str
    digest: str
    size: int


class Referrer(NamedTuple):
    """An artefact that belongs to a version in the index (referrers.py).

    Attributes:
      subject: digest of the version.
      digest: digest of its own manifest.
      size: size of that manifest.
      artifact_type: kind of artefact.
    """

    subject: str
    digest: str
    size: int
    artifact_type: str


class _Named(Descriptor, frozen=True, rename="camel"):
    """An entry of the index."""

    artifact_type: str = ""


class _Index(msgspec.Struct, frozen=True, rename="camel"):
    schema_version: int
    manifests: tuple[_Named, ...]


def default_store() -> Path:
    """Return this user's default store."""
    return data_home() / "triolet" / "models"


class ModelStore:
    """A store, for any number of readers and one writer at a time.

    Args:
      root: its folder; `writing` creates it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.receipts = Receipts(self.root / "receipts")

    @property
    def is_there(self) -> bool:
        """Return whether the folder contains a store."""
        return (self.root / LAYOUT_FILE).is_file()

    def require(self) -> ModelStore:
        """Return itself.

        Raises:
          StoreError: the folder contains no store.
        """
        if not self.is_there:
            raise StoreError(
                f"{self.root} contains no model store; `triolet model import DIR --name NAME` "
                "creates "
                "one, or name another one with --store"
            )
        return self

    @property
    def blobs(self) -> Path:
        """Folder of the blobs."""
        return self.root / "blobs" / "sha256"

    @property
    def tmp(self) -> Path:
        """Folder for files that are being written."""
        return self.root / "tmp"

    def blob_path(self, digest: str) -> Path:
        """Return the path of a blob, whether it exists or not."""
        if not DIGEST.fullmatch(digest):
            raise StoreError(
                f"{digest!r} is not a digest; allowed: sha256: and 64 digits 0-9 a-f; no path is "
                "made "
                "of anything else"
            )
        return self.blobs / digest.removeprefix("sha256:")

    def entries(self) -> tuple[StoreEntry, ...]:
        """Return every version, sorted by name and digest; empty if there is no store.

        Raises:
          StoreError: the index is broken.
        """
        return self._index()[0]

    def referrers(self, subject: str | None = None) -> tuple[Referrer, ...]:
        """Return the artefacts of a version, or all.

        Raises:
          StoreError: the index is broken.
        """
        return tuple(one for one in self._index()[1] if subject in (None, one.subject))

    def _index(self) -> tuple[tuple[StoreEntry, ...], tuple[Referrer, ...]]:
        path = self.root / INDEX_FILE
        with explained(path):
            try:
                with path.open("rb") as file:
                    content = file.read(MAX_INDEX_BYTES + 1)
            except FileNotFoundError:
                return (), ()
        remedy = "put its last backup there, or move the store away and import its models again"
        if len(content) > MAX_INDEX_BYTES:
            raise StoreError(f"{path} has more than {MAX_INDEX_BYTES} bytes; {remedy}")
        try:
            index = msgspec.json.decode(content, type=_Index)
            entries = tuple(
                StoreEntry(require_name(one.annotations[NAME]), one.digest, one.size)
                for one in index.manifests
                if SUBJECT not in one.annotations
            )
            referrers = tuple(
                Referrer(one.annotations[SUBJECT], one.digest, one.size, one.artifact_type)
                for one in index.manifests
                if SUBJECT in one.annotations
            )
        except KeyError as error:
            raise StoreError(f"{path} names a manifest without {error}; {remedy}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"{path} cannot be read: {error}; {remedy}") from error
        return entries, referrers

    def manifest(self, digest: str) -> Manifest:
        """Return a version's manifest, checked.

        Raises:
          StoreError: it is missing, damaged, or contains an unsafe path.
        """
        return read_manifest(self.read(digest, MAX_MANIFEST_BYTES), digest)

    def read(self, digest: str, max_bytes: int) -> bytes:
        """Return a small blob, checked against its digest.

        Raises:
          StoreError: it is missing, damaged, too large, or others may write it.
        """
        path = self.blob_path(digest)
        with explained(path):
            self.require_sound(path)
            with path.open("rb") as file:
                content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise StoreError(f"{path} has more than {max_bytes} bytes; `triolet model rm` it")
        if digest_of(content) != digest:
            raise StoreError(
                f"{path} holds {digest_of(content)}, expected {digest}; import the model again"
            )
        return content

    def require_sound(self, path: Path) -> os.stat_result:
        """Check that only the owner may write a blob's file, and return its state.

        Raises:
          StoreError: it is missing, not a file, or others may write it.
        """
        try:
            found = path.lstat()
        except FileNotFoundError:
            raise StoreError(
                f"blob {path} is missing; import the model again from its directory"
            ) from None
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(
                f"blob {path} is not a plain file; remove it and import the model again"
            )
        if found.st_mode & _OTHERS_WRITE:
            raise StoreError(
                f"blob {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others may "
                f"change it; expected {BLOB_MODE:04o}: `chmod go-w {path}`, then `triolet model "
                "verify`"
            )
        return found

    @contextmanager
    def writing(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Writer]:
        """Hold the writers' lock; create the store if there is none.

        Args:
          timeout_s: longest wait for another writer.

        Raises:
          StoreError: another process writes for longer, or the folder cannot be written.
        """
        with explained(self.root):
            for folder in (self.blobs, self.tmp, self.receipts.folder):
                folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:

            def complaint() -> str:
                holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
                return (
                    f"process {holder or '(unknown)'} has been writing to the store {self.root} "
                    f"for {timeout_s:g} s; wait for it, or end it, and try again"
                )

            take_lock(descriptor, fcntl.LOCK_EX, timeout_s, complaint)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            with explained(self.root):
                for abandoned in self.tmp.iterdir():
                    abandoned.unlink()
                if not self.is_there:
                    self.write_whole(LAYOUT_FILE, canonical(_LAYOUT))
            yield Writer(self)
        finally:
            os.close(descriptor)

    def write_whole(self, name: str, content: bytes) -> None:
        """Replace a file in the root; called by the writer."""
        temporary = self.tmp / name
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.root / name)
        sync_folder(self.root)


class Writer:
    """Changes the store while its process holds the lock; created by `ModelStore.writing`."""

    def __init__(self, store: ModelStore) -> None:
        self.store = store

    def require_size(self, digest: str) -> int:
        """Return the size of a version's manifest.

        Raises:
          StoreError: the version has been removed.
        """
        for one in self.store.entries():
            if one.digest == digest:
                return one.size
        raise StoreError(f"{digest} has just been removed; see `triolet model list`")

    def put(self, content: bytes) -> str:
        """Store a small blob and return its digest.

        Raises:
          StoreError: it cannot be written.
        """
        digest = digest_of(content)
        with suppress(StoreError):  # missing or damaged: write it
            # An existing blob keeps its inode, which a serving process may have locked.
            self.store.read(digest, len(content))
            return digest
        temporary = self.store.tmp / digest.removeprefix("sha256:")
        with explained(self.store.root):
            with temporary.open("wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), BLOB_MODE)
            self.keep(temporary, digest)
        return digest

    def keep(self, temporary: Path, digest: str, *, is_own: bool = True) -> None:
        """Move a complete file to its final name: sync it, rename it, and make it read-only with a
        receipt, unless the file has other names under which it may be written."""
        path = self.store.blob_path(digest)
        sync_file(temporary)
        temporary.rename(path)
        # POSIX: renaming one hard link over another of the same file does nothing.
        temporary.unlink(missing_ok=True)
        if is_own:
            # Only after the rename: what a killed pull leaves must be writable for the next one.
            path.chmod(BLOB_MODE)
            self.store.receipts.write(path.lstat(), digest)

    def set_entries(
        self, entries: Collection[StoreEntry], referrers: Collection[Referrer] | None = None
    ) -> None:
        """Replace the index, once all blobs are on disk under their names.

        Args:
          entries: all versions.
          referrers: all artefacts, None for the present ones; those of removed versions are
            dropped.

        Raises:
          StoreError: it cannot be written.
        """
        digests = {one.digest for one in entries}
        if referrers is None:
            referrers = self.store.referrers()
        named: list[tuple[str, StoreEntry | Referrer, dict[str, str]]] = [
            *((ARTIFACT_TYPE, one, {NAME: one.name}) for one in sorted(set(entries))),
            *(
                (one.artifact_type, one, {SUBJECT: one.subject})
                for one in sorted(set(referrers))
                if one.subject in digests
            ),
        ]
        index = {
            "schemaVersion": 2,
            "mediaType": _INDEX_TYPE,
            "manifests": [
                {
                    "mediaType": MANIFEST_TYPE,
                    "artifactType": artifact_type,
                    "digest": one.digest,
                    "size": one.size,
                    "annotations": annotations,
                }
                for artifact_type, one, annotations in named
            ],
        }
        content = json.dumps(index, indent=1, sort_keys=True).encode()
        with explained(self.store.root):
            sync_folder(self.store.blobs)
            self.store.write_whole(INDEX_FILE, content)


@contextmanager
def explained(place: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that names the place and the remedy.

    Raises:
      StoreError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_ROOM:
            free = shutil.disk_usage(_existing(place)).free
            remedy = (
                f"{free} bytes are free there: make room (`triolet model gc` removes unnamed "
                "blobs), or give --store on another disk; no version was changed"
            )
        elif error.errno in _NO_RIGHT:
            remedy = "let this user read and write it, or give another --store"
        else:
            remedy = "check the disk, and try again"
        where = error.filename if isinstance(error.filename, str) else place
        raise StoreError(f"{where}: {reason}; {remedy}") from error


def take_lock(descriptor: int, kind: int, timeout_s: float, complaint: Callable[[], str]) -> None:
    """Lock an open file until it is closed.

    Args:
      descriptor: descriptor of the file.
      kind: kind of the lock, as in `flock`.
      timeout_s: longest wait for another process.
      complaint: returns the error's message.

    Raises:
      StoreError: another process holds it for longer.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StoreError(complaint()) from None
            time.sleep(LOCK_POLL_S)
        else:
            return


def sync_file(path: Path) -> None:
    """Flush a file's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk."""
    sync_file(path)


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())
