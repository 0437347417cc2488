"""Segment files of the audit log (one entry per line), and the file locks of its writers.

A segment is named after the index of its first entry. Writers hold the lock `lock`, an flock, which
the kernel releases when its process ends.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from triolet.errors import AuditLogError
from triolet.private_files import FILE_MODE
from triolet.units import MIB

from .events import MAX_ENTRY_BYTES, AuditLineError, decode_entry, split_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from .merkle import Frontier

SEGMENT_BYTES: Final = 64 * MIB
"""Size at which a new segment begins, so that files stay easy to open and copy."""
INDEX_DIGITS: Final = 16
"""Digits in a segment's name: names sort like numbers, and 2**53 has 16 digits."""
LOCK_WAIT_S: Final = 30.0
"""A holder writes one batch or waits for one fsync, which takes seconds on the slowest disk."""
FIRST_PAUSE_S: Final = 0.0002
LAST_PAUSE_S: Final = 0.002
"""Pauses between tries for a lock: the kernel's blocking flock has no timeout."""
READ_BYTES: Final = MIB


class Position(NamedTuple):
    """End of entries: first index of a segment, and byte offset in it."""

    segment: int
    offset: int


class FileLock:
    """An exclusive lock among threads and processes; a context manager. Open it after forking.

    Raises:
      OSError: its file cannot be opened.
    """

    def __init__(self, path: Path, *, may_make: bool = True) -> None:
        flags = os.O_RDWR | os.O_CREAT if may_make else os.O_RDONLY
        self._path = path
        self.fd = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
        self._mutex = threading.Lock()

    def __enter__(self) -> Self:
        self.acquire(lambda: False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def acquire(self, is_needless: Callable[[], bool]) -> bool:
        """Take the lock, unless it becomes unnecessary while waiting. Return whether it is held.

        Raises:
          TimeoutError: another holder kept it too long.
        """
        until = time.monotonic() + LOCK_WAIT_S
        if not self._mutex.acquire(timeout=LOCK_WAIT_S):
            raise self._late()
        is_held = False
        try:
            pause_s = FIRST_PAUSE_S
            while not is_needless() and not (is_held := self._try()):
                if time.monotonic() > until:
                    raise self._late()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        finally:
            if not is_held:
                self._mutex.release()
        return is_held

    def release(self) -> None:
        """Release the lock."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        self._mutex.release()

    def close(self) -> None:
        """Close the lock's file."""
        os.close(self.fd)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _late(self) -> TimeoutError:
        return TimeoutError(
            f"another process has held {self._path} for {LOCK_WAIT_S:g} s (`fuser {self._path}` "
            "shows it)"
        )


def segment_path(folder: Path, first: int) -> Path:
    """Return the path of the segment that begins with an index."""
    return folder / f"{first:0{INDEX_DIGITS}d}.jsonl"


def segment_files(folder: Path) -> list[Path]:
    """Return the segments of a log, in order."""
    return sorted(folder.glob(f"{'[0-9]' * INDEX_DIGITS}.jsonl"))


def read_lines(path: Path, offset: int, end: int) -> Iterator[bytes]:
    """Yield the lines of a file without their newlines.

    Args:
      path: the file.
      offset: where to begin, in bytes.
      end: where to stop, in bytes.

    Yields:
      Lines; the last one is empty if the file ends with a newline, else incomplete.
    """
    rest = b""
    with path.open("rb") as file:
        file.seek(offset)
        while offset < end and (chunk := file.read(min(READ_BYTES, end - offset))):
            offset += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            # Longer than any entry: yield it now, so that it does not fill the memory.
            if len(rest) > 2 * MAX_ENTRY_BYTES:
                yield rest
                rest = b""
    yield rest


class Segments:
    """The segments of a log, open for appending. All methods require holding `lock`.

    Attributes:
      tree: tree over the entries up to `position`.
      position: end of the known entries.
    """

    def __init__(self, folder: Path, tree: Frontier, position: Position) -> None:
        self._folder = folder
        self.tree = tree
        self.position = position
        self._fd = self._open(position.segment, os.O_CREAT if tree.size == 0 else 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def duplicate(self) -> int:
        """Return a new descriptor of the last segment; the caller closes it."""
        return os.dup(self._fd)

    def catch_up(self) -> bytes:
        """Read entries appended by others. Truncate an incomplete last line and return it.

        Raises:
          AuditLogError: the entries do not continue the log.
          OSError: they cannot be read.
        """
        while True:
            torn = self._read_on()
            first = self.tree.size
            following = segment_path(self._folder, first)
            if first == self.position.segment or not following.exists():
                break
            if torn:
                raise self._damage("ends within an entry, but another segment follows it")
            self._take(self._open(first), first)
        if torn:
            os.ftruncate(self._fd, self.position.offset)
        return torn

    def write(self, lines: Sequence[bytes], leaves: Sequence[bytes]) -> None:
        """Append all entries, or none.

        Raises:
          OSError: the disk is full or fails.
        """
        if self.position.offset >= SEGMENT_BYTES:
            self._roll()
        segment, offset = self.position
        content = b"\n".join((*lines, b""))
        try:
            write_whole(self._fd, content, offset)
        except OSError:
            os.ftruncate(self._fd, offset)
            raise
        self.position = Position(segment, offset + len(content))
        for leaf in leaves:
            self.tree.push(leaf)

    def _roll(self) -> None:
        # Sync this segment first: a synced position in a later segment implies that it is synced.
        os.fsync(self._fd)
        fd = self._open(self.tree.size, os.O_CREAT | os.O_EXCL)
        try:
            sync_folder(self._folder)
        except BaseException:
            os.close(fd)
            raise
        self._take(fd, self.tree.size)

    def _open(self, first: int, flags: int = 0) -> int:
        path = segment_path(self._folder, first)
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, FILE_MODE)
        except FileNotFoundError:
            raise AuditLogError(
                f"{path} is missing, but a signed head of the audit log refers to it; "
                f"{_remedy(self._folder)}"
            ) from None

    def _take(self, fd: int, first: int) -> None:
        os.close(self._fd)
        self._fd = fd
        self.position = Position(first, 0)

    def _read_on(self) -> bytes:
        segment, offset = self.position
        end = os.fstat(self._fd).st_size
        if end == offset:
            return b""
        if end < offset:
            raise self._damage(f"has {end} bytes, but had at least {offset}")
        lines = read_lines(segment_path(self._folder, segment), offset, end)
        line = next(lines)
        for following in lines:
            try:
                content, leaf = split_line(line)
                index = decode_entry(content).index
            except AuditLineError as error:
                raise self._damage(f"has an invalid line at byte {offset}: {error}") from None
            if index != self.tree.size:
                raise self._damage(f"has entry {index} in place of {self.tree.size}")
            self.tree.push(leaf)
            offset += len(line) + 1
            self.position = Position(segment, offset)
            line = following
        return line

    def _damage(self, what: str) -> AuditLogError:
        path = segment_path(self._folder, self.position.segment)
        return AuditLogError(f"{path} {what}; {_remedy(self._folder)}")


def _remedy(folder: Path) -> str:
    return (
        f"`triolet audit verify --audit {folder}` shows what is wrong; keep the directory, and "
        "start a new log with `--audit` and another directory"
    )


def write_whole(fd: int, content: bytes, offset: int) -> None:
    """Write all bytes at an offset.

    Raises:
      OSError: some of them were not written.
    """
    rest = memoryview(content)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Sync a directory, so that its names survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
