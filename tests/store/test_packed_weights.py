"""Tests of removing packed weights on any file system, also while processes write some."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from store.packed_weights import collect_packed, hold

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

NAME = f"{'0123' * 8}.packed"


class Busy(type(Path())):  # type: ignore[misc]
    """A folder that lists a file which a worker has just renamed."""

    def iterdir(self) -> Iterator[Path]:
        yield Path(self, f"{'0123' * 8}.unfinished")
        yield Path(self, NAME)


def test_on_nfs_what_no_process_uses_is_removed_and_what_one_has_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def nfs_flock(fd: int, operation: int) -> None:
        """NFS locks only files open for writing exclusively."""
        is_read_only = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if is_read_only and operation & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", nfs_flock)
    path = tmp_path / NAME
    path.write_bytes(b"12345")
    with path.open("rb") as held:
        hold(held.fileno())
        assert collect_packed(tmp_path) == (0, 0, 1)
    assert collect_packed(tmp_path) == (1, 5, 0)


def test_a_file_that_a_worker_renames_meanwhile_is_no_error(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"12345")
    assert collect_packed(Busy(tmp_path)) == (1, 5, 0)
