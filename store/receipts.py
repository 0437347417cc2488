"""Receipts record a file's digest with the state of its inode, so that an unchanged file need not
be read again. A lost receipt only costs time."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from .manifest import Digest  # noqa: TC001 (msgspec reads the annotations)

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

MAX_RECEIPT_BYTES: Final = 1024
"""Size of a receipt: five numbers and a digest."""
SETTLED_NS: Final = 2_000_000_000
"""An inode that changed less than this before it was read gets no receipt: a write just after the
read could leave the same times. The coarsest file systems count in steps of 2 s."""


class Receipt(msgspec.Struct, frozen=True):
    """State of a file's inode when its digest was computed.

    Attributes:
      ctime_ns: no program can set it: writing in place changes it, and so does restoring mtime.
    """

    dev: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    digest: Digest


class Receipts:
    """The receipts of a store, one small file per inode.

    Args:
      folder: folder of the receipts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, found: os.stat_result) -> str | None:
        """Return the digest of a file that has not changed since it was read; None if unknown."""
        receipt = _read(self._path(found))
        if receipt is None or receipt != receipt_of(found, receipt.digest):
            return None
        return receipt.digest

    def write(self, found: os.stat_result, digest: str) -> None:
        """Record a file's digest.

        Raises:
          OSError: it cannot be written.
        """
        path = self._path(found)
        temporary = path.with_suffix(f".{os.getpid()}")
        with suppress(FileNotFoundError):  # a collection has just removed the folder
            # Not synced: a receipt torn by a power cut counts as missing.
            temporary.write_bytes(msgspec.json.encode(receipt_of(found, digest)))
            temporary.rename(path)

    def write_settled(self, found: os.stat_result, digest: str, read_at_ns: int) -> None:
        """Record the digest of a file that others may write, if a later write would be noticed.

        Args:
          found: its state, before and after it was read.
          digest: digest of its content.
          read_at_ns: time at which reading began, in nanoseconds since 1970.

        Raises:
          OSError: it cannot be written.
        """
        is_settled = max(found.st_ctime_ns, found.st_mtime_ns) + SETTLED_NS < read_at_ns
        if is_settled and self._may_write:
            self.write(found, digest)

    def drop(self, found: os.stat_result) -> None:
        """Drop the receipt of a file that does not match it."""
        if self._may_write:
            self._path(found).unlink(missing_ok=True)

    def keep_only(self, digests: Collection[str]) -> None:
        """Remove the receipts of all other content, and leftovers of killed processes."""
        for path in sorted(self.folder.iterdir()):
            receipt = _read(path)
            if path.suffix != ".json" or receipt is None or receipt.digest not in digests:
                path.unlink(missing_ok=True)

    @property
    def _may_write(self) -> bool:
        return os.access(self.folder, os.W_OK)

    def _path(self, found: os.stat_result) -> Path:
        return self.folder / f"{found.st_dev}-{found.st_ino}.json"


def _read(path: Path) -> Receipt | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_RECEIPT_BYTES), type=Receipt)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None  # missing or torn: the file is read


def now_ns() -> int:
    """Return the clock that stamps inodes, in nanoseconds since 1970."""
    return time.time_ns()


def receipt_of(found: os.stat_result, digest: str) -> Receipt:
    """Return the receipt for a file's present state."""
    return Receipt(
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        digest,
    )
