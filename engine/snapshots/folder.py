"""The private, size-limited cache folder of snapshots. The first process builds one, others wait.

Errors never prevent a model from being served: they are logged, and the weights are packed into the
process's own memory.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from store.packed_weights import (
    OWN_STEM,
    PACKED,
    UNFINISHED,
    hold,
    is_locked_by_us,
    packed_folder,
    remove_unless_held,
)
from store.receipts import now_ns
from triolet.errors import ConfigError
from triolet.private_files import FILE_MODE, make_private_folder
from triolet.process import return_free_memory

from ..native.packing import own_pages
from ..native.pieces import ReusedPages
from ..weights import weights_digest
from .file import SnapshotDamagedError, map_snapshot, write_snapshot
from .receipts import DigestReceipts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from triolet.config import SnapshotConfig

    from ..native.pieces import Packing, Piece
    from .file import SnapshotKey

log = structlog.get_logger(__name__)

BUILD_WAIT_S: Final = 60.0
"""Longest wait for another process that packs the same weights: half of the supervisor's timeout
for progress. A billion weights take about three seconds."""
BUILD_POLL_S: Final = 0.005
STRAY_AGE_NS: Final = 3600 * 10**9
"""Age after which a killed process's unfinished receipt is removed."""
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class _NotKeptError(Exception):
    """The folder or a file in it cannot be used; the text says why and what to do."""


class Snapshots:
    """The snapshots of one model.

    Args:
      config: settings of snapshots.
      files: the model's weight files.
      is_on: False if `files` do not determine the weights.
    """

    def __init__(
        self, config: SnapshotConfig, files: Sequence[Path], *, is_on: bool = True
    ) -> None:
        self._config = config
        self._files = files
        self._is_on = is_on and config.keep and self._num_bytes() >= config.min_bytes
        self._digest = ""

    @property
    def place(self) -> str:
        """Resolved paths of the weight files; in a store, these contain their SHA-256 digests."""
        return "\n".join(str(path.resolve()) for path in self._files)

    @property
    def folder(self) -> Path:
        """Path of the folder.

        Raises:
          _NotKeptError: no folder is configured, and this user has no home directory.
        """
        try:
            return packed_folder(self._config.folder)
        except ConfigError as error:
            raise _NotKeptError(
                "this user has no home directory: set XDG_CACHE_HOME, or "
                "worker.engine.snapshots.folder"
            ) from error

    def weights_digest(self) -> str:
        """Return the digest of the model's weights, from a receipt if the files have not
        changed."""
        self._digest = self._digest or self._find_digest()
        return self._digest

    def _find_digest(self) -> str:
        if not self._is_on:
            return weights_digest(self._files)
        try:
            self._take_folder()
            receipts = DigestReceipts(self.folder)
            digest = receipts.find(self._files)
            if digest is None:
                began_at_ns = now_ns()
                digest = weights_digest(self._files)
                with suppress(OSError):  # a lost receipt only costs time
                    receipts.write(self._files, digest, began_at_ns)
        except (OSError, _NotKeptError) as error:
            self._give_up(error)
            digest = weights_digest(self._files)
        return digest

    def load(self, key: SnapshotKey, packing: Packing, num_threads: int) -> dict[str, Piece]:
        """Return packed weights, mapped from a snapshot. Write the snapshot if it does not exist.

        Args:
          key: the snapshot's key.
          packing: packs the weights.
          num_threads: number of threads if other processes pack at the same time.

        Raises:
          ModelError: a tensor is missing, unknown or of another shape.
        """
        if self._is_on:
            try:
                pieces = self._mapped(key)
                if pieces is None:
                    return self._built(key, packing)
                packing.on_progress(1.0)
                return pieces
            except (OSError, _NotKeptError) as error:
                self._give_up(error)
        return dict(packing.pieces(own_pages, num_threads))

    def _num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def _give_up(self, error: OSError | _NotKeptError) -> None:
        self._is_on = False
        named = self._config.folder or "triolet/packed in this user's cache"
        log.warning("packed_weights_not_kept", folder=named, reason=str(error))

    def _take_folder(self) -> None:
        make_private_folder(self.folder)
        found = self.folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_MAY_WRITE:
            raise _NotKeptError(
                f"other users can write there (mode {stat.S_IMODE(found.st_mode):04o}, owner "
                f"{found.st_uid}) and could replace the weights: `chmod 700` it, or set "
                "worker.engine.snapshots.folder to a folder of this user"
            )

    def _mapped(self, key: SnapshotKey) -> dict[str, Piece] | None:
        """Return the pieces of an intact snapshot, or None."""
        path = self.folder / key.name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            hold(fd)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise SnapshotDamagedError("it is not a file of this user")
            if found.st_mode & _OTHERS_MAY_WRITE:
                raise SnapshotDamagedError("other users can write it")
            pieces = map_snapshot(fd, key)
            with suppress(OSError):  # read-only file systems
                os.utime(fd)  # for removing the least recently used
        except SnapshotDamagedError as error:
            log.warning("packed_weights_refused", path=str(path), reason=f"{error}; packed again")
            path.unlink(missing_ok=True)
            return None
        finally:
            os.close(fd)
        log.info("packed_weights_mapped", path=str(path))
        return pieces

    def _built(self, key: SnapshotKey, packing: Packing) -> dict[str, Piece]:
        """Write a snapshot and map it, or wait for the process that writes it."""
        path = self.folder / key.name
        unfinished = path.with_suffix(UNFINISHED)
        give_up = time.monotonic() + BUILD_WAIT_S
        while True:
            # The kernel releases the lock when its process ends, even after a crash.
            fd = os.open(
                unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE
            )
            try:
                if is_locked_by_us(fd, unfinished):
                    pieces = self._mapped(key)
                    if pieces is not None:
                        unfinished.unlink()
                        return pieces
                    return self._written(fd, unfinished, key, packing)
            finally:
                os.close(fd)
            if time.monotonic() >= give_up:
                raise _NotKeptError(
                    f"another process did not finish packing these weights in {BUILD_WAIT_S:.0f} s"
                )
            time.sleep(BUILD_POLL_S)
            pieces = self._mapped(key)
            if pieces is not None:
                return pieces

    def _written(
        self, fd: int, unfinished: Path, key: SnapshotKey, packing: Packing
    ) -> dict[str, Piece]:
        began_at = time.monotonic()
        path = self.folder / key.name
        # Other starting processes wait for this one, so their cores are free.
        is_linux = sys.platform == "linux"
        num_threads = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
        try:
            os.ftruncate(fd, 0)  # remove a killed process's data
            num_bytes = write_snapshot(fd, key, packing.pieces(ReusedPages(), num_threads))
            self._make_room(num_bytes)
            pieces = map_snapshot(fd, key)
            unfinished.rename(path)
            hold(fd)  # shared now; waiting processes would otherwise write it again
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return_free_memory()  # memory used for packing
        elapsed_s = round(time.monotonic() - began_at, 3)
        log.info("packed_weights_kept", path=str(path), bytes=num_bytes, seconds=elapsed_s)
        return pieces

    def _make_room(self, num_bytes: int) -> None:
        """Remove leftovers, and the least recently used snapshots until a new one fits.

        Raises:
          _NotKeptError: the new one is too large, alone or together with those in use.
        """
        most = self._config.max_bytes
        if num_bytes > most:
            raise _NotKeptError(
                f"the packed weights are {num_bytes} bytes, and "
                f"worker.engine.snapshots.max_bytes is {most}: raise it, or set "
                "worker.engine.snapshots.keep=false"
            )
        kept = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process has removed it
                found = path.stat()
                if not OWN_STEM.fullmatch(path.stem):
                    continue
                if path.suffix == PACKED:
                    kept.append((found.st_mtime_ns, found.st_size, path))
                elif path.suffix == UNFINISHED:
                    remove_unless_held(path)
                elif path.suffix[1:].isdecimal() and now_ns() - found.st_mtime_ns > STRAY_AGE_NS:
                    path.unlink()
        total = num_bytes + sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= most:
                break
            if remove_unless_held(path):
                total -= size
                log.info("packed_weights_removed", path=str(path), bytes=size, max_bytes=most)
        if total > most:
            raise _NotKeptError(
                f"the packed weights are {num_bytes} bytes, those used by other processes "
                f"{total - num_bytes}, and worker.engine.snapshots.max_bytes is {most}: raise it"
            )
