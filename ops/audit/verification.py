"""Reads and verifies an audit log: entries, signed heads, and inclusion proofs. Never writes.

A verification reports each defect with file and line, and the last head that can be trusted.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from triolet.errors import AuditLogError

from .events import AlteredLine, AuditLineError, decode_entry, split_line
from .heads import (
    HEADS_NAME,
    KEY_NAME,
    NO_HEAD,
    NO_HEAD_LEFT,
    Head,
    HeadError,
    head_digest,
    read_head,
)
from .log import SYNC_LOCK, WRITE_LOCK
from .merkle import Frontier, inclusion_path, leaf_hash, root_of_path
from .segments import FileLock, read_lines, segment_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .events import AuditEntry

MAX_DEFECTS: Final = 100
"""Verification stops after this many defects: the log was certainly changed."""


class Defect(msgspec.Struct, frozen=True):
    """A defect of a log.

    Attributes:
      file: name of the file.
      line: line number, from 1; 0 for the whole file.
      what: description.
    """

    file: str
    line: int
    what: str


class LogVerdict(msgspec.Struct, frozen=True):
    """Result of a verification.

    Attributes:
      entries: number of entries read.
      heads: number of heads with a correct signature and root.
      witnessed: number of heads kept elsewhere that match the log.
      trusted: newest head that, with everything before it, is unchanged; None if there is none.
      unsigned: number of complete entries after the newest head.
      defects: what is wrong.
      notes: incomplete lines of killed processes, which the next append repairs.
    """

    entries: int
    heads: int
    witnessed: int
    trusted: Head | None
    unsigned: int
    defects: list[Defect]
    notes: list[str]


class File(NamedTuple):
    """A file of the log, and its size at the snapshot."""

    path: Path
    size_bytes: int


class Snapshot(NamedTuple):
    """The files of a log at one moment, while others append to it."""

    segments: list[File]
    heads: File


class SignedHead(NamedTuple):
    """A head with its file and line."""

    head: Head
    file: str
    line: int


def take_snapshot(folder: Path) -> Snapshot:
    """Record the sizes of a log's files between two writes.

    Raises:
      AuditLogError: no log exists, or it cannot be read.
    """
    try:
        with ExitStack() as locks:
            for name in (SYNC_LOCK, WRITE_LOCK):
                # A copy of a log may lack the lock files.
                if (folder / name).exists():
                    lock = locks.enter_context(closing(FileLock(folder / name, may_make=False)))
                    locks.enter_context(lock)
            segments = [File(path, path.stat().st_size) for path in segment_files(folder)]
            heads = folder / HEADS_NAME
            found = File(heads, heads.stat().st_size if heads.exists() else 0)
    except OSError as error:
        raise AuditLogError(f"the audit log in {folder} cannot be read: {error}") from error
    if not segments and not found.size_bytes and not (folder / KEY_NAME).exists():
        raise AuditLogError(
            f"{folder} has no audit log; the first administrative command creates it, and "
            "`--audit` selects another directory"
        )
    return Snapshot(segments, found)


def read_entries(snapshot: Snapshot) -> Iterator[tuple[bytes, AuditEntry]]:
    """Yield the entries of a log with their canonical JSON.

    Raises:
      AuditLogError: a line is malformed or was altered.
    """
    index = 0
    for file in snapshot.segments:
        for number, (line, is_torn) in enumerate(_marked(file), 1):
            if is_torn:
                continue
            try:
                content, _ = split_line(line)
                entry = decode_entry(content)
                if entry.index != index:
                    raise AuditLineError(f"it has entry {entry.index} in place of {index}")
            except AuditLineError as error:
                raise AuditLogError(
                    f"{file.path}, line {number}: {error}; `triolet audit verify --audit "
                    f"{file.path.parent}` shows how much of the log can be trusted"
                ) from None
            yield content, entry
            index += 1


def _marked(file: File) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines of a file, with True for an incomplete last line.

    Raises:
      AuditLogError: it cannot be read.
    """
    lines = read_lines(file.path, 0, file.size_bytes)
    try:
        line = next(lines)
        for following in lines:
            yield line, False
            line = following
    except OSError as error:
        raise AuditLogError(f"{file.path} cannot be read: {error.strerror}") from error
    if line:
        yield line, True


def read_heads(
    heads: File, *, may_be_torn: bool = True
) -> Iterator[tuple[int, bytes, Head | HeadError]]:
    """Yield the number, content and head of each line, or an error in place of the head.

    Args:
      heads: the file.
      may_be_torn: skip an incomplete last line.

    Raises:
      AuditLogError: it cannot be read.
    """
    if not heads.size_bytes:
        return
    for number, (line, is_torn) in enumerate(_marked(heads), 1):
        if is_torn and may_be_torn:
            continue
        try:
            yield number, line, read_head(line)
        except HeadError as error:
            yield number, line, error


def newest_head(snapshot: Snapshot) -> tuple[bytes, Head]:
    """Return the newest head and its line.

    Raises:
      AuditLogError: no head exists, or a head is invalid.
    """
    found: tuple[bytes, Head] | None = None
    for number, line, head in read_heads(snapshot.heads):
        if isinstance(head, HeadError):
            raise AuditLogError(
                f"{snapshot.heads.path}, line {number}: {head}; `triolet audit verify` shows "
                "details"
            )
        found = line, head
    if found is None:
        raise AuditLogError(
            f"{snapshot.heads.path} has no head; `triolet audit verify` shows whether the next "
            "append signs the first one"
        )
    return found


class Proof(msgspec.Struct, frozen=True):
    """Proof that a signed head covers an entry.

    Attributes:
      index: index of the entry.
      entry: its canonical JSON, which is hashed.
      path: hashes from the leaf's sibling to a child of the root (RFC 6962, 2.1.1).
      head: line of the head: `body` and `signature`.
    """

    index: int
    entry: str
    path: list[str]
    head: msgspec.Raw


def prove(folder: Path, index: int) -> Proof:
    """Prove that the newest head covers an entry.

    Raises:
      AuditLogError: no head covers it, or the log is damaged.
    """
    snapshot = take_snapshot(folder)
    line, head = newest_head(snapshot)
    if not 0 <= index < head.size:
        raise AuditLogError(
            f"the newest head of {folder} covers entries 0 to {head.size - 1}, not {index}"
        )
    proven = b""

    def leaves() -> Iterator[bytes]:
        nonlocal proven
        for content, entry in read_entries(snapshot):
            if entry.index == index:
                proven = content
            yield leaf_hash(content)

    try:
        path = inclusion_path(leaves(), index, head.size)
        root = root_of_path(leaf_hash(proven), index, head.size, path).hex()
    except ValueError as error:
        raise AuditLogError(f"{folder}: {error}; `triolet audit verify` shows details") from None
    if root != head.root:
        raise AuditLogError(
            f"the entries in {folder} do not match its newest head, so nothing is proven; "
            f"`triolet audit verify --audit {folder}` shows what is wrong"
        )
    return Proof(index, proven.decode(), [node.hex() for node in path], msgspec.Raw(line))


def read_witnesses(file: Path) -> list[SignedHead]:
    """Read heads that were kept elsewhere, one per line.

    Raises:
      AuditLogError: the file cannot be read, or a line is not a head.
    """
    try:
        size_bytes = file.stat().st_size
    except OSError as error:
        raise AuditLogError(f"the heads in {file} cannot be read: {error}") from error
    kept = []
    for number, _, head in read_heads(File(file, size_bytes), may_be_torn=False):
        if isinstance(head, HeadError):
            raise AuditLogError(
                f"{file}, line {number}: {head}; each line must be output of `triolet audit head`"
            )
        kept.append(SignedHead(head, str(file), number))
    if not kept:
        raise AuditLogError(f"{file} has no head; `triolet audit head` prints one")
    return kept


def verify(folder: Path, witnesses: Sequence[SignedHead] = ()) -> LogVerdict:
    """Check every entry against every head.

    Args:
      folder: directory of the log.
      witnesses: heads that were kept elsewhere.

    Raises:
      AuditLogError: no log exists, or it cannot be read.
    """
    snapshot = take_snapshot(folder)
    walk = _Walk()
    walk.read_heads(snapshot.heads)
    walk.add_witnesses(witnesses)
    walk.read_segments(snapshot.segments)
    walk.check_ends(snapshot)
    newest = max((one.head.size for one in walk.own), default=0)
    return LogVerdict(
        entries=walk.tree.size,
        heads=walk.num_right,
        witnessed=walk.num_witnessed,
        trusted=walk.trusted,
        unsigned=max(0, walk.tree.size - newest),
        defects=walk.defects,
        notes=walk.notes,
    )


class _Walk:
    """One pass over a log, with its findings."""

    def __init__(self) -> None:
        self.tree = Frontier()
        self.own: list[SignedHead] = []
        self.defects: list[Defect] = []
        self.notes: list[str] = []
        self.trusted: Head | None = None
        self.num_right = 0
        self.num_witnessed = 0
        self._own_at: dict[int, SignedHead] = {}
        self._witnesses: dict[int, list[SignedHead]] = {}
        self._are_entries_right = True
        self._is_whole = True

    def read_heads(self, heads: File) -> None:
        """Check signatures and the chain of heads."""
        before: SignedHead | None = None
        previous: str | None = NO_HEAD
        for number, line, head in read_heads(heads):
            if not self._is_whole:
                return
            if isinstance(head, HeadError):
                self._note_defect(heads.path.name, number, str(head))
                previous = None
                continue
            one = SignedHead(head, heads.path.name, number)
            if previous is not None and head.previous != previous:
                what = "it refers to another previous head: one was removed, added or moved"
            elif before is not None and head.key != before.head.key:
                what = "it is signed by another key than the previous head"
            elif before is not None and head.size <= before.head.size:
                what = f"it covers {head.size} entries, not more than the previous head"
            else:
                what = ""
            previous = head_digest(line)
            if what:
                self._note_defect(one.file, number, what)
                continue
            before = one
            self.own.append(one)
            self._own_at[head.size] = one
        if previous == NO_HEAD and (heads.path.parent / KEY_NAME).exists():
            self._note_defect(heads.path.name, 0, NO_HEAD_LEFT)
        if heads.size_bytes and any(is_torn for _, is_torn in _marked(heads)):
            self.notes.append(
                f"{heads.path.name} ends within a head, because a process was killed while writing "
                "it; the next append removes it"
            )

    def add_witnesses(self, witnesses: Sequence[SignedHead]) -> None:
        """Add heads that were kept elsewhere to the check."""
        for one in witnesses:
            if self.own and one.head.key != self.own[0].head.key:
                self._note_defect(
                    one.file, one.line, "it is signed by another key than the heads of this log"
                )
                continue
            self._witnesses.setdefault(one.head.size, []).append(one)

    def read_segments(self, segments: Sequence[File]) -> None:
        """Check every entry, and the root of every head."""
        for place, file in enumerate(segments):
            name = file.path.name
            if int(file.path.stem) != self.tree.size:
                what = f"its first entry should be {self.tree.size}: a segment is missing or cut"
                self._stop(name, 0, what)
                return
            for number, (line, is_torn) in enumerate(_marked(file), 1):
                if not is_torn:
                    self._check_line(name, number, line)
                elif place == len(segments) - 1:
                    self.notes.append(
                        f"{name} ends within an entry ({len(line)} bytes), because a process was "
                        "killed while writing it; the next append removes it and records that"
                    )
                else:
                    self._stop(name, number, "it ends within an entry, but another segment follows")
                if not self._is_whole:
                    return

    def check_ends(self, snapshot: Snapshot) -> None:
        """Report heads that cover more entries than exist."""
        if not self._is_whole:
            return
        file = snapshot.segments[-1] if snapshot.segments else snapshot.heads
        size = self.tree.size
        longest = max(self.own, key=lambda one: one.head.size, default=None)
        beyond = []
        if longest is not None and longest.head.size > size:
            beyond.append(longest)
        beyond += [one for n, some in self._witnesses.items() if n > size for one in some]
        for one in beyond:
            self._note_defect(
                file.path.name,
                sum(1 for _, is_torn in _marked(file) if not is_torn),
                f"the log ends after {size} entries, but {one.file}, line {one.line}, signs "
                f"{one.head.size}: the end was cut off",
            )

    def _check_line(self, name: str, number: int, line: bytes) -> None:
        index = self.tree.size
        try:
            content, leaf = split_line(line)
            entry = decode_entry(content)
            if entry.index != index:
                raise AuditLineError(
                    f"it has entry {entry.index} in place of {index}: a line was removed, added or "
                    "moved"
                )
        except AlteredLine as error:
            # The rest can still be checked with the hash in the line, if that was signed.
            self._note_defect(name, number, f"entry {index} was altered: {error}")
            self._are_entries_right = False
            leaf = error.leaf
        except AuditLineError as error:
            self._stop(name, number, str(error))
            return
        self.tree.push(leaf)
        if self.tree.size in self._witnesses or self.tree.size in self._own_at:
            self._check_root()

    def _check_root(self) -> None:
        size, root = self.tree.size, self.tree.root().hex()
        for one in self._witnesses.get(size, ()):
            if self._is_right(one, root):
                self.num_witnessed += 1
        own = self._own_at.get(size)
        if own is not None and self._is_right(own, root):
            self.num_right += 1
            if self._are_entries_right:
                self.trusted = own.head

    def _is_right(self, one: SignedHead, root: str) -> bool:
        if one.head.root == root:
            return True
        since = 0 if self.trusted is None else self.trusted.size
        self._note_defect(
            one.file,
            one.line,
            f"it does not match the entries: one of {since} to {one.head.size - 1} was rewritten "
            "together with its hash",
        )
        self._are_entries_right = False
        return False

    def _stop(self, name: str, number: int, what: str) -> None:
        self._note_defect(name, number, what)
        self._is_whole = False

    def _note_defect(self, name: str, number: int, what: str) -> None:
        self.defects.append(Defect(name, number, what))
        if len(self.defects) >= MAX_DEFECTS:
            self._is_whole = False
