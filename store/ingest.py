"""Import a model's files as a version: clone, copy or link them, and hash them in parallel."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from enum import StrEnum
from threading import Event
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.errors import StoreError

from .layout import BLOB_MODE, StoreEntry, explained
from .manifest import (
    EMPTY_POLICY,
    ENGINE_TYPE,
    FILE_NAME,
    MAX_DOCUMENT_BYTES,
    MAX_LAYERS,
    POLICY_TYPE,
    SAMPLING_FILE,
    SAMPLING_TYPE,
    WEIGHT_TYPE,
    canonical,
    config_document,
    file_layer,
    in_order,
    manifest_document,
    media_type_of,
    read_manifest,
)
from .receipts import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from .layout import Writer
    from .manifest import Descriptor, Facts

PIECE_BYTES: Final = 1 << 20
"""Bytes to read, hash and write at once: large enough that the overhead of a call is negligible."""
MAX_THREADS: Final = 8
"""Files hashed at once; with more, disks are slower than processors."""
_FICLONE: Final = 0x40049409
"""Linux ioctl: share the blocks of another file until one of them is written."""
_CANNOT_CLONE: Final = {
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EINVAL,
    errno.EXDEV,
    errno.ENOSYS,
    errno.EPERM,
}
_CANNOT_LINK: Final = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}


class Way(StrEnum):
    """How a file's bytes got into the store."""

    CLONED = "cloned"
    COPIED = "copied"
    LINKED = "linked"
    KNOWN = "already there"


class SourceFile(NamedTuple):
    """A file to import.

    Attributes:
      path: path of the file, not a symbolic link.
      name: path in the model's directory.
      media_type: media type of the layer.
      found: its state before it was read; the import fails if it changes.
      dtype: data type of most numbers in a weights file.
    """

    path: Path
    name: str
    media_type: str
    found: os.stat_result
    dtype: str | None = None


class _Reading(NamedTuple):
    """State shared by the threads of an import.

    Attributes:
      is_over: one of them has failed.
      on_bytes: as in `ingest`.
    """

    is_over: Event
    on_bytes: Callable[[int], None]


class Ingested(NamedTuple):
    """Result of an import.

    Attributes:
      digest: digest of the version.
      num_bytes: bytes of all its files, by the way they were stored.
    """

    digest: str
    num_bytes: Mapping[Way, int]


def source_file(
    path: Path, name: str, media_type: str, root: Path, dtype: str | None = None
) -> SourceFile:
    """Return a file of a model's directory, after checking that it may become a layer.

    Args:
      path: path as found; a symbolic link within `root` is followed.
      name: name of the layer.
      media_type: media type of the layer.
      root: resolved folder that must contain it.
      dtype: dtype of a weights file.

    Raises:
      StoreError: it is a link out of the directory, not a plain file, or has an invalid name.
    """
    if not FILE_NAME.fullmatch(name):
        raise StoreError(
            f"{path}: {name!r} is not a valid file name; allowed: letters, digits and . _ -, "
            "up to 128; rename it"
        )
    with explained(path):
        real = path.resolve(strict=True)
        found = real.stat()
    if not real.is_relative_to(root):
        raise StoreError(
            f"{path} is a link to {real}, outside of {root}: its target depends on this "
            f"machine; copy the directory with `cp -rL {root} COPY` and import the copy"
        )
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a plain file; remove it from the directory")
    return SourceFile(real, name, media_type, found, dtype)


def directory_files(
    directory: Path, weights: Mapping[str, str]
) -> tuple[list[SourceFile], list[str]]:
    """Return the files of a model's directory that belong to a version, and the names of the others
    (without hidden ones).

    Args:
      directory: a Hugging Face directory.
      weights: names of its weights files, each with its dtype.

    Raises:
      StoreError: a file may not be imported.
    """
    root = directory.resolve()
    kept, others = [], []
    with explained(directory):
        names = sorted(path.name for path in directory.iterdir())
        folders = [n for n in names if n[:1].isdigit() and (directory / n).is_dir()]
        inner = [f"{one}/{path.name}" for one in folders for path in (directory / one).iterdir()]
    for name in [one for one in names if one not in folders] + sorted(inner):
        media_type = WEIGHT_TYPE if name in weights else media_type_of(name)
        if name.startswith("."):
            continue  # of version control, of a downloader, of a desktop
        if media_type is not None:
            path = directory / name
            kept.append(source_file(path, name, media_type, root, weights.get(name)))
        else:
            others.append(name)
    return kept, others


def ingest(
    writer: Writer,
    name: str,
    files: Sequence[SourceFile],
    facts: Facts,
    *,
    sampling: Mapping[str, object] | None = None,
    engine: Mapping[str, object],
    may_link: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Ingested:
    """Create a version from files; equal files give the same version.

    Args:
      writer: writer of the store.
      name: name of the model.
      files: files of the model.
      facts: for its config.
      sampling: content of its sampling file; None keeps the model's.
      engine: settings that change its answers.
      may_link: hard-link a file that cannot be cloned.
      on_bytes: called in some thread with each number of bytes that are done.

    Raises:
      StoreError: a file changed during the import, or the store cannot be written. The store is
        then unchanged, except for unnamed blobs.
    """
    if sampling is not None:
        files = [one for one in files if one.media_type != SAMPLING_TYPE]
    if len(files) + len((SAMPLING_TYPE, POLICY_TYPE, ENGINE_TYPE)) > MAX_LAYERS:
        raise StoreError(f"the model has {len(files)} files; allowed: about {MAX_LAYERS}")
    placed = _place_all(writer, files, on_bytes or _ignore, may_link=may_link)
    layers = [layer for layer, _ in placed]
    documents: list[tuple[str, str | None, bytes]] = [
        (POLICY_TYPE, None, EMPTY_POLICY),
        (ENGINE_TYPE, None, canonical(engine)),
    ]
    if sampling is not None:
        documents.append((SAMPLING_TYPE, SAMPLING_FILE, canonical(sampling)))
    for media_type, file_name, content in documents:
        if len(content) > MAX_DOCUMENT_BYTES:
            raise StoreError(f"{file_name} has {len(content)} bytes; allowed: {MAX_DOCUMENT_BYTES}")
        layers.append(file_layer(media_type, file_name, writer.put(content), len(content)))
    layers = in_order(layers)
    config = config_document(facts, layers)
    manifest = manifest_document(config, layers)
    writer.put(config)
    digest = writer.put(manifest)
    read_manifest(manifest, digest)  # check that it can be read
    entry = StoreEntry(name, digest, len(manifest))
    writer.set_entries({*writer.store.entries(), entry})
    num_bytes = dict.fromkeys(Way, 0)
    for layer, way in placed:
        num_bytes[way] += layer.size
    return Ingested(digest, num_bytes)


def _ignore(_: int) -> None:
    """Ignore progress."""


def _place_all(
    writer: Writer,
    files: Sequence[SourceFile],
    on_bytes: Callable[[int], None],
    *,
    may_link: bool,
) -> list[tuple[Descriptor, Way]]:
    """Bring files into the store, several at once; the first failure stops all."""
    reading = _Reading(Event(), on_bytes)
    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    # Largest first, so that no thread is left with a large file at the end.
    order = sorted(range(len(files)), key=lambda number: -files[number].found.st_size)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="ingest") as threads:
        futures = {
            number: threads.submit(
                _place, writer, files[number], number, reading, may_link=may_link
            )
            for number in order
        }
        try:
            for ended in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
                ended.result()  # raises the first failure
            return [futures[number].result() for number in range(len(files))]
        except BaseException:
            reading.is_over.set()
            threads.shutdown(cancel_futures=True)
            raise


def _place(
    writer: Writer, source: SourceFile, number: int, reading: _Reading, *, may_link: bool
) -> tuple[Descriptor, Way]:
    """Bring one file into the store, unless it is already there."""
    temporary = writer.store.tmp / f"file-{number}"
    receipts = writer.store.receipts
    with explained(writer.store.root), source.path.open("rb", buffering=0) as file:
        now, read_at_ns = os.fstat(file.fileno()), now_ns()
        _require_same(source, now)
        digest, way = receipts.find(now), Way.KNOWN
        if digest is None or not _is_kept(writer, digest):
            way = _bring(file.fileno(), source, temporary, may_link=may_link)
            if way is Way.COPIED:
                digest = _copy(file.fileno(), source.path, temporary, reading)
            else:
                with temporary.open("rb", buffering=0) as whole:
                    if way is Way.LINKED:
                        _require_same(source, os.fstat(whole.fileno()))
                    digest = _hash(whole.fileno(), temporary, reading)
            _require_same(source, os.fstat(file.fileno()))
            if _is_kept(writer, digest):
                temporary.unlink()
            else:
                writer.keep(temporary, digest, is_own=way is not Way.LINKED)
            receipts.write_settled(os.fstat(file.fileno()), digest, read_at_ns)
        else:
            reading.on_bytes(source.found.st_size)
    return (
        file_layer(source.media_type, source.name, digest, source.found.st_size, source.dtype),
        way,
    )


def _bring(source: int, file: SourceFile, temporary: Path, *, may_link: bool) -> Way:
    """Clone or link a file; return that it must be copied if neither is possible."""
    with temporary.open("wb") as target:
        try:
            fcntl.ioctl(target.fileno(), _FICLONE, source)
        except OSError as error:
            if error.errno not in _CANNOT_CLONE:
                raise
        else:
            os.fchmod(target.fileno(), BLOB_MODE)
            return Way.CLONED
    is_open = file.found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not may_link or is_open:
        return Way.COPIED
    temporary.unlink()
    try:
        os.link(file.path, temporary)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        return Way.COPIED
    return Way.LINKED


def _copy(source: int, path: Path, temporary: Path, reading: _Reading) -> str:
    """Copy a file and return the digest of the bytes that were written."""
    digest = hashlib.sha256()
    with temporary.open("wb", buffering=0) as target:
        os.fchmod(target.fileno(), BLOB_MODE)
        for piece in _pieces(source, path, reading):
            digest.update(piece)
            left = piece
            while left:
                left = left[target.write(left) :]
    return f"sha256:{digest.hexdigest()}"


def _hash(source: int, path: Path, reading: _Reading) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(source, path, reading):
        digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def _pieces(source: int, path: Path, reading: _Reading) -> Iterator[memoryview]:
    """Yield a file's bytes; each piece is valid until the next."""
    piece = bytearray(PIECE_BYTES)
    while True:
        if reading.is_over.is_set():
            raise StoreError("another file of the model could not be imported")
        with explained(path):
            count = os.readv(source, [piece])
        if not count:
            return
        yield memoryview(piece)[:count]
        reading.on_bytes(count)


def _require_same(source: SourceFile, now: os.stat_result) -> None:
    """Raise an error if a file has been written since it was first seen."""

    def state(found: os.stat_result) -> tuple[int, ...]:
        # Without ctime: creating links to the file, here or in another import, changes it too.
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    if state(now) != state(source.found):
        raise StoreError(
            f"{source.path} changed while it was imported; wait until nothing writes it, and "
            "import the directory again"
        )


def _is_kept(writer: Writer, digest: str) -> bool:
    """Return whether a blob exists and has not changed since it was written."""
    try:
        found = writer.store.require_sound(writer.store.blob_path(digest))
    except StoreError:
        return False
    return writer.store.receipts.find(found) == digest
