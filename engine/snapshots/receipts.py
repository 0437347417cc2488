"""Cache the digests of weight files with their inodes' state, to avoid reading unchanged files
again.

A lost receipt only costs time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from store.receipts import SETTLED_NS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SUFFIX: Final = ".digest"
MAX_RECEIPTS: Final = 256
"""Most receipts: far more models than a machine serves. The oldest are removed."""
MAX_RECEIPT_BYTES: Final = 64 * 1024
"""Largest receipt: a hundred bytes per file of a model."""


class _State(msgspec.Struct, frozen=True, array_like=True):
    """A file's inode. Programs cannot set ctime, so a write in place is visible."""

    name: str
    dev: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int


class _Receipt(msgspec.Struct, frozen=True):
    """The files of one model and the digest of their content."""

    files: tuple[_State, ...]
    digest: str


class DigestReceipts:
    """The receipts of one folder, one small file per set of weight files.

    Args:
      folder: private folder of the receipts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, files: Sequence[Path]) -> str | None:
        """Return the digest of files that have not changed since they were read, or None.

        Raises:
          OSError: a file is missing.
        """
        states = _states(files)
        try:
            with self._path(states).open("rb") as file:
                receipt = msgspec.json.decode(file.read(MAX_RECEIPT_BYTES), type=_Receipt)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None  # missing or damaged: read the files
        return receipt.digest if receipt.files == states else None

    def write(self, files: Sequence[Path], digest: str, read_at_ns: int) -> None:
        """Record the digest of files, if a write since they were read would be visible.

        Args:
          files: the model's weight files.
          digest: digest of their content.
          read_at_ns: when reading started, in nanoseconds since 1970.

        Raises:
          OSError: the receipt cannot be written, or a file is missing.
        """
        states = _states(files)
        changed_at_ns = max(max(one.mtime_ns, one.ctime_ns) for one in states)
        if changed_at_ns + SETTLED_NS >= read_at_ns:
            return
        path = self._path(states)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(_Receipt(states, digest)))
        temporary.rename(path)
        kept = sorted(self._folder.glob(f"*{SUFFIX}"), key=_changed_at)
        for old in kept[:-MAX_RECEIPTS]:
            old.unlink(missing_ok=True)

    def _path(self, states: tuple[_State, ...]) -> Path:
        return self._folder / f"{xxhash.xxh3_128(msgspec.json.encode(states)).hexdigest()}{SUFFIX}"


def _states(files: Sequence[Path]) -> tuple[_State, ...]:
    found = [(path.name, path.stat()) for path in files]
    return tuple(
        _State(name, one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns)
        for name, one in found
    )


def _changed_at(path: Path) -> int:
    with suppress(FileNotFoundError):  # another process has removed it
        return path.stat().st_mtime_ns
    return 0
