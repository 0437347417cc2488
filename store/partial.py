"""Unfinished downloads of blobs: kept across interruptions, and moved into the store when complete.

A pull holds a shared lock on the folder, so that a collection leaves it alone. Each blob's file is
locked while it is written, so that two pulls do not write the same one.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Final

from .layout import LOCK_TIMEOUT_S, explained, take_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .layout import ModelStore, Writer

FOLDER: Final = "partial"
LOCK_FILE: Final = "lock"
SUFFIX: Final = ".part"
_MODE: Final = 0o600
"""Mode until it becomes a blob, so that the next pull can write it after a kill at any moment."""


class Partials:
    """The unfinished downloads of a store.

    Args:
      store: store that the blobs are for.
    """

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self.folder = store.root / FOLDER

    def path(self, digest: str) -> Path:
        """Return the path of a blob's unfinished file, whether it exists or not."""
        return self.folder / f"{self._store.blob_path(digest).name}{SUFFIX}"

    def size(self, digest: str) -> int:
        """Return how many bytes of a blob have arrived."""
        path = self.path(digest)
        return path.stat().st_size if path.exists() else 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Protect unfinished downloads from collection; create the folder if there is none.

        Raises:
          StoreError: the folder cannot be written, or a collection takes too long.
        """
        with explained(self._store.root):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            _lock(lock, fcntl.LOCK_SH, f"a collection of {self._store.root}")
            yield
        finally:
            os.close(lock)

    @contextmanager
    def opened(self, digest: str) -> Iterator[IO[bytes]]:
        """Open a blob's file exclusively, with the bytes that have arrived so far.

        Raises:
          StoreError: it cannot be written, or another pull has been writing it for too long.
        """
        path = self.path(digest)
        with explained(self._store.root):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            _lock(descriptor, fcntl.LOCK_EX, f"another pull, which writes {path},")
            with explained(self._store.root):
                yield file

    def keep(self, writer: Writer, digest: str) -> None:
        """Turn a complete and checked file into a blob.

        Raises:
          OSError: it cannot be moved.
        """
        writer.keep(self.path(digest), digest)

    def collect(self) -> tuple[int, int]:
        """Remove all of them unless a pull runs; return their number and bytes.

        Raises:
          OSError: one cannot be removed.
        """
        if not self.folder.is_dir():
            return 0, 0
        num_files = num_bytes = 0
        lock = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0, 0
            for path in sorted(self.folder.glob(f"*{SUFFIX}")):
                num_bytes += path.stat().st_size
                path.unlink()
                num_files += 1
        finally:
            os.close(lock)
        return num_files, num_bytes


def _lock(descriptor: int, kind: int, holder: str) -> None:
    complaint = (
        f"{holder} has taken {LOCK_TIMEOUT_S:g} s; wait for it, or end it, and pull again: the "
        "bytes that have arrived are kept"
    )
    take_lock(descriptor, kind, LOCK_TIMEOUT_S, lambda: complaint)
