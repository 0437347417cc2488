"""Read a log as it is: its entries, whether it is what was signed, and proofs of single entries.

Nothing here writes. What is not as it should be is located: file, line, what is wrong, and the last
signed head before it.
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
"""After so many the rest of a log is not looked at: it is beyond doubt that it was changed."""


class Defect(msgspec.Struct, frozen=True):
    """One thing that is wrong.

    Attributes:
      file: name of the file.
      line: in it, from 1; 0 for the file as a whole.
      what: in words.
    """

    file: str
    line: int
    what: str


class LogVerdict(msgspec.Struct, frozen=True):
    """What a verification found.

    Attributes:
      entries: number of entries that were read.
      heads: number of heads with a right signature and a right root.
      witnessed: number of heads kept elsewhere that the log agrees with.
      trusted: newest head such that it and everything before it is as it was signed; None if there
        is none.
      unsigned: entries after the newest head: whole, but nothing vouches for them yet.
      defects: what is wrong.
      notes: what a process that was killed leaves, and the next append mends.
    """

    entries: int
    heads: int
    witnessed: int
    trusted: Head | None
    unsigned: int
    defects: list[Defect]
    notes: list[str]


class File(NamedTuple):
    """A file of the log, and how much of it was there when it was looked at."""

    path: Path
    size_bytes: int


class Snapshot(NamedTuple):
    """A log at one moment, while others append to it."""

    segments: list[File]
    heads: File


class SignedHead(NamedTuple):
    """A head, and where it stands."""

    head: Head
    file: str
    line: int


def take_snapshot(folder: Path) -> Snapshot:
    """Look at a log between two writes.

    Raises:
      AuditLogError: there is no log, or it cannot be read.
    """
    try:
        with ExitStack() as locks:
            for name in (SYNC_LOCK, WRITE_LOCK):
                # A copy of a log may come without them.
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
            f"there is no audit log in {folder}; the first administrative command begins it, "
            "and `--audit` names another folder"
        )
    return Snapshot(segments, found)


def read_entries(snapshot: Snapshot) -> Iterator[tuple[bytes, AuditEntry]]:
    """Yield the entries of a log with their canonical JSON.

    Raises:
      AuditLogError: a line is no entry, or was altered.
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
                    raise AuditLineError(f"it holds entry {entry.index} in the place of {index}")
            except AuditLineError as error:
                raise AuditLogError(
                    f"{file.path}, line {number}: {error}; `triolet audit verify --audit "
                    f"{file.path.parent}` says how much of the log can be trusted"
                ) from None
            yield content, entry
            index += 1


def _marked(file: File) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines of a file; True beside what stands after its last newline, if anything.

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
    """Yield line number, line and head of each line; an error instead of a wrong head.

    Args:
      heads: the file.
      may_be_torn: a last line without a newline is left out.

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
      AuditLogError: there is none, or it is wrong.
    """
    found: tuple[bytes, Head] | None = None
    for number, line, head in read_heads(snapshot.heads):
        if isinstance(head, HeadError):
            raise AuditLogError(
                f"{snapshot.heads.path}, line {number}: {head}; `triolet audit verify` says more"
            )
        found = line, head
    if found is None:
        raise AuditLogError(
            f"{snapshot.heads.path} holds no head; `triolet audit verify` says whether the next "
            "append signs the first one"
        )
    return found


class Proof(msgspec.Struct, frozen=True):
    """That an entry is in the log, by a signed head.

    Attributes:
      index: of the entry.
      entry: its canonical JSON, the bytes that are hashed.
      path: hashes from the leaf's sibling to a child of the root (RFC 6962, 2.1.1).
      head: the line of the head: `body` and `signature`.
    """

    index: int
    entry: str
    path: list[str]
    head: msgspec.Raw


def prove(folder: Path, index: int) -> Proof:
    """Prove an entry against the newest head.

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
        raise AuditLogError(f"{folder}: {error}; `triolet audit verify` says more") from None
    if root != head.root:
        raise AuditLogError(
            f"the entries in {folder} are not those that its newest head signs, so nothing is "
            f"proven; `triolet audit verify --audit {folder}` says what is wrong"
        )
    return Proof(index, proven.decode(), [node.hex() for node in path], msgspec.Raw(line))


def read_witnesses(file: Path) -> list[SignedHead]:
    """Return heads that were kept elsewhere, one a line.

    Raises:
      AuditLogError: the file cannot be read, or a line is no head.
    """
    try:
        size_bytes = file.stat().st_size
    except OSError as error:
        raise AuditLogError(f"the heads in {file} cannot be read: {error}") from error
    kept = []
    for number, _, head in read_heads(File(file, size_bytes), may_be_torn=False):
        if isinstance(head, HeadError):
            raise AuditLogError(
                f"{file}, line {number}: {head}; a line is what `triolet audit head` prints"
            )
        kept.append(SignedHead(head, str(file), number))
    if not kept:
        raise AuditLogError(f"{file} holds no head; `triolet audit head` prints one")
    return kept


def verify(folder: Path, witnesses: Sequence[SignedHead] = ()) -> LogVerdict:
    """Compare every entry with every head.

    Args:
      folder: of the log.
      witnesses: heads that were kept elsewhere.

    Raises:
      AuditLogError: there is no log, or it cannot be read.
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
    """One pass over a log, and what it has found."""

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
                what = "it names another head before it: one was removed, added or moved"
            elif before is not None and head.key != before.head.key:
                what = "it is signed by another key than the head before it"
            elif before is not None and head.size <= before.head.size:
                what = f"it covers {head.size} entries, no more than the head before it"
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
                f"{heads.path.name} ends within a head: a process was killed as it wrote it; the "
                "next append cuts it off"
            )

    def add_witnesses(self, witnesses: Sequence[SignedHead]) -> None:
        """Have the log compared with heads that were kept elsewhere."""
        for one in witnesses:
            if self.own and one.head.key != self.own[0].head.key:
                self._note_defect(
                    one.file, one.line, "it is signed by another key than the heads of this log"
                )
                continue
            self._witnesses.setdefault(one.head.size, []).append(one)

    def read_segments(self, segments: Sequence[File]) -> None:
        """Check every entry, and the root wherever a head signs one."""
        for place, file in enumerate(segments):
            name = file.path.name
            if int(file.path.stem) != self.tree.size:
                what = f"entry {self.tree.size} should be its first: a segment is missing or cut"
                self._stop(name, 0, what)
                return
            for number, (line, is_torn) in enumerate(_marked(file), 1):
                if not is_torn:
                    self._check_line(name, number, line)
                elif place == len(segments) - 1:
                    self.notes.append(
                        f"{name} ends within an entry ({len(line)} bytes): a process was killed as "
                        "it wrote it; the next append cuts it off, with a note in the log"
                    )
                else:
                    self._stop(name, number, "it ends within an entry, and another segment follows")
                if not self._is_whole:
                    return

    def check_ends(self, snapshot: Snapshot) -> None:
        """Report heads that sign more than there is."""
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
                f"the log ends after {size} entries, and {one.file}, line {one.line}, signs "
                f"{one.head.size}: the tail was cut off",
            )

    def _check_line(self, name: str, number: int, line: bytes) -> None:
        index = self.tree.size
        try:
            content, leaf = split_line(line)
            entry = decode_entry(content)
            if entry.index != index:
                raise AuditLineError(
                    f"it holds entry {entry.index} in the place of {index}: a line was removed, "
                    "added or moved"
                )
        except AlteredLine as error:
            # If the hash beside it is the signed one, all that follows can still be checked.
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
            f"it signs other entries than the log holds: one of {since} to {one.head.size - 1} was "
            "rewritten together with its hash",
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
