"""The files of the log: segments of entries, one line each, and the locks of those that write.

A segment is named by the index of its first entry. Whatever writes holds the lock `lock`; a lock
of the kernel ends with its process, however this ends.
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
"""A segment that is at least so large is followed by another one: a file that a person can still
open and copy."""
INDEX_DIGITS: Final = 16
"""Of a segment's name, so that names sort as numbers do: 2**53 has 16 digits."""
LOCK_WAIT_S: Final = 30.0
"""A holder writes one batch or waits for one fsync: seconds on the slowest disk."""
FIRST_PAUSE_S: Final = 0.0002
LAST_PAUSE_S: Final = 0.002
"""Between two tries for a lock. The kernel's own wait has no deadline."""
READ_BYTES: Final = MIB


class Position(NamedTuple):
    """Where entries end: the first index of a segment, and bytes in it."""

    segment: int
    offset: int


class FileLock:
    """An exclusive lock among threads and processes, for `with`. Open one after a fork.

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
        """Take the lock, unless it becomes needless meanwhile; return whether it is held.

        Raises:
          TimeoutError: another one held it for too long.
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
        """Give it back."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        self._mutex.release()

    def close(self) -> None:
        """Close its file."""
        os.close(self.fd)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _late(self) -> TimeoutError:
        return TimeoutError(
            f"another process has held {self._path} for {LOCK_WAIT_S:g} s, and "
            f"`fuser {self._path}` names it"
        )


def segment_path(folder: Path, first: int) -> Path:
    """Return the file of the segment that begins with an index."""
    return folder / f"{first:0{INDEX_DIGITS}d}.jsonl"


def segment_files(folder: Path) -> list[Path]:
    """Return the segments of a log, in order."""
    return sorted(folder.glob(f"{'[0-9]' * INDEX_DIGITS}.jsonl"))


def read_lines(path: Path, offset: int, end: int) -> Iterator[bytes]:
    """Yield the lines of a file without their newlines; what is left at the end comes as it is.

    Args:
      path: of the file.
      offset: where to begin.
      end: where to stop, in bytes.

    Yields:
      Lines; the last one is empty if the file ends with a newline, else it is torn.
    """
    rest = b""
    with path.open("rb") as file:
        file.seek(offset)
        while offset < end and (chunk := file.read(min(READ_BYTES, end - offset))):
            offset += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            # Longer than any entry, so no line; not kept until the file's end is found.
            if len(rest) > 2 * MAX_ENTRY_BYTES:
                yield rest
                rest = b""
    yield rest


class Segments:
    """The end of the log, as an appender knows it. Every method wants the lock `lock` held.

    Attributes:
      tree: over the entries up to `position`.
      position: where they end.
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
        """Return a descriptor of the last segment, to be closed by the caller."""
        return os.dup(self._fd)

    def catch_up(self) -> bytes:
        """Read what others have appended; cut a torn tail off and return it.

        Raises:
          AuditLogError: what is there does not continue the log.
          OSError: it cannot be read.
        """
        while True:
            torn = self._read_on()
            first = self.tree.size
            following = segment_path(self._folder, first)
            if first == self.position.segment or not following.exists():
                break
            if torn:
                raise self._damage("ends within an entry, though another segment follows it")
            self._take(self._open(first), first)
        if torn:
            os.ftruncate(self._fd, self.position.offset)
        return torn

    def write(self, lines: Sequence[bytes], leaves: Sequence[bytes]) -> None:
        """Append entries; all of them are there afterwards, or none.

        Raises:
          OSError: there is no room, or the disk fails.
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
        # What is known of a later segment's sync then holds for all of this one.
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
                f"{path} is missing, though a signed head of the audit log names it; "
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
            raise self._damage(f"has {end} bytes, and had at least {offset}")
        lines = read_lines(segment_path(self._folder, segment), offset, end)
        line = next(lines)
        for following in lines:
            try:
                content, leaf = split_line(line)
                index = decode_entry(content).index
            except AuditLineError as error:
                raise self._damage(f"has a wrong line at byte {offset}: {error}") from None
            if index != self.tree.size:
                raise self._damage(f"has entry {index} in the place of {self.tree.size}")
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
        f"`triolet audit verify --audit {folder}` says what is wrong; keep the folder as it is, "
        "and begin a new log by `--audit` with another one"
    )


def write_whole(fd: int, content: bytes, offset: int) -> None:
    """Write all of some bytes at an offset.

    Raises:
      OSError: a part of them was not written.
    """
    rest = memoryview(content)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Let the names in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
