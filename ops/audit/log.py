"""The log of administrative events, open for appending by any number of threads and processes.

Not the audit of a fleet's blocks (triolet/audit.py): this one is kept on disk and proves that it
was not changed.

An append writes under the lock `lock`, then makes sure of its fsync under the lock `sync`: the
first that gets there syncs for all that have written, and notes in `sync` how far; those that wait
read that. Heads are signed under `sync` too, over synced entries only. Whatever takes both locks
takes `sync` first.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self
from zlib import crc32

import structlog

from triolet.errors import AuditLogError
from triolet.private_files import take_private_folder

from .events import Action, AuditEvent, check_event, digest, encode_line, os_user, time_text
from .heads import HEADS_NAME, KEY_NAME, HeadFile
from .merkle import Frontier
from .segments import FileLock, Position, Segments, segment_files, sync_folder, write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

log = structlog.get_logger(__name__)

HEAD_ENTRIES: Final = 1_000
HEAD_S: Final = 1.0
"""A head is signed when so many entries or seconds have come since the last one."""
MAX_BATCH_ENTRIES: Final = 10_000
"""Entries of one append, which others wait for: a fifth of a second."""
WRITE_LOCK: Final = "lock"
SYNC_LOCK: Final = "sync"
OWN_NAMES: Final = (WRITE_LOCK, SYNC_LOCK, KEY_NAME, HEADS_NAME, "0")
"""How names in the folder begin: those of segments with a digit that is 0 for 10**15 entries."""
_MARK_BYTES: Final = 128
_MARK: Final = re.compile(rb"(\S+ \d+ \d+) (\d+) *\n")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class AuditLog:
    """A folder with a log. For `with`; `append` may be called by several threads.

    Raises:
      AuditLogError: the folder cannot be used, or the log in it is damaged.
      ConfigError: others may read it, and this user may not change that.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._boot = _BOOT.read_bytes().strip() if _BOOT.exists() else b""
        self._signer: threading.Thread | None = None
        self._is_unsigned = threading.Event()
        self._is_closing = threading.Event()
        self.syncs = 0
        """Calls of fsync for entries: fewer than appends where several shared one."""
        with ExitStack() as files:
            try:
                self._open(files)
            except OSError as error:
                raise self._refusal(error) from error
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Sign what is unsigned, and close the files."""
        self._is_closing.set()
        self._is_unsigned.set()
        if self._signer is not None:
            self._signer.join()
        self._sign_rest()
        self._files.close()

    def append(self, *events: AuditEvent) -> int:
        """Append events side by side and return the index of the first; they are on disk then.

        Raises:
          AuditLogError: an event is not fit, the disk is full or fails, the log is damaged. None of
            the events is in the log, except where the text says that it may be.
        """
        if not 0 < len(events) <= MAX_BATCH_ENTRIES:
            raise AuditLogError(
                f"the audit log takes 1 to {MAX_BATCH_ENTRIES} events at once, not {len(events)}; "
                "nothing was recorded: divide them"
            )
        for event in events:
            check_event(event)
        try:
            with self._write_lock:
                self._catch_up()
                first = self._segments.tree.size
                self._write(events)
                mine = self._segments.position
        except OSError as error:
            raise self._refusal(error) from error
        try:
            if self._sync_lock.acquire(lambda: self._read_mark() >= mine):
                try:
                    self._commit()
                finally:
                    self._sync_lock.release()
        except OSError as error:
            raise AuditLogError(
                f"the audit log in {self._folder} has entry {first}, but may lose it if the "
                f"machine fails now: {error}; see to it, then look at `triolet audit verify`"
            ) from error
        return first

    def _write(self, events: Sequence[AuditEvent]) -> None:
        now = time_text(time.time())
        size = self._segments.tree.size
        pairs = [encode_line(event, size + n, now) for n, event in enumerate(events)]
        lines, leaves = zip(*pairs, strict=True)
        self._segments.write(lines, leaves)

    def _open(self, files: ExitStack) -> None:
        folder = self._folder
        take_private_folder(folder, OWN_NAMES)
        self._sync_lock = files.enter_context(closing(FileLock(folder / SYNC_LOCK)))
        self._write_lock = files.enter_context(closing(FileLock(folder / WRITE_LOCK)))
        with self._sync_lock, self._write_lock:
            self._heads = files.enter_context(closing(HeadFile(folder)))
            self._segments = files.enter_context(closing(self._open_segments()))
            self._catch_up()
            sync_folder(folder)

    def _open_segments(self) -> Segments:
        head = self._heads.newest
        if head is None:
            if (found := segment_files(self._folder)) and int(found[0].stem) != 0:
                raise AuditLogError(
                    f"{found[0]} is the first segment of the audit log, and entries before it are "
                    f"missing; `triolet audit verify --audit {self._folder}` says more"
                )
            return Segments(self._folder, Frontier(), Position(0, 0))
        return Segments(self._folder, head.tree(), Position(head.segment, head.offset))

    def _catch_up(self) -> None:
        """Know what others have appended. Holds the lock `lock`."""
        segments = self._segments
        notes = []
        if torn := segments.catch_up():
            log.warning("audit_log_tail_cut", folder=str(self._folder), size_bytes=len(torn))
            notes.append(self._own(Action.LOG_CUT, digest(torn), {"bytes": len(torn)}))
        if segments.tree.size == 0:
            notes.insert(0, self._own(Action.LOG_BEGIN))
        if notes:
            self._write(notes)

    @staticmethod
    def _own(
        action: Action, before: str | None = None, counts: dict[str, int] | None = None
    ) -> AuditEvent:
        return AuditEvent(action=action, subject="", actor=os_user(), before=before, counts=counts)

    def _commit(self, *, must_sign: bool = False) -> None:
        """Sync what all have written, and sign a head if it is time. Holds the lock `sync`."""
        with self._write_lock:
            self._catch_up()
            end, tree = self._segments.position, self._segments.tree.copy()
            descriptor = self._segments.duplicate()
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.syncs += 1
        try:
            self._write_mark(end)
            self._heads.catch_up()
            num_unsigned = tree.size - self._heads.size
            age_s = self._heads.age_s(time.time())
            if num_unsigned and (must_sign or num_unsigned >= HEAD_ENTRIES or age_s >= HEAD_S):
                self._heads.sign(tree, end, time.time())
            elif num_unsigned:
                self._sign_later()
        except OSError as error:
            # The entries are safe: others sync once more, and the next head covers them.
            log.error("audit_head_not_written", folder=str(self._folder), error=str(error))

    def _sign_later(self) -> None:
        """Have what is unsigned signed soon, if nothing is appended until then. Holds `sync`."""
        self._is_unsigned.set()
        if self._signer is None:
            self._signer = threading.Thread(target=self._keep_signing, daemon=True)
            self._signer.start()

    def _keep_signing(self) -> None:
        while True:
            self._is_unsigned.wait()
            if self._is_closing.wait(HEAD_S):
                return
            self._is_unsigned.clear()
            self._sign_rest()

    def _sign_rest(self) -> None:
        try:
            with self._sync_lock:
                self._heads.catch_up()
                if self._heads.size < self._segments.tree.size:
                    self._commit(must_sign=True)
        except (AuditLogError, OSError) as error:
            # What was appended is safe; the next process that appends signs it.
            log.error("audit_head_not_written", folder=str(self._folder), error=str(error))

    def _read_mark(self) -> Position:
        """Return up to where entries are synced, as far as that can be known."""
        mark = os.pread(self._sync_lock.fd, _MARK_BYTES, 0)
        match = _MARK.fullmatch(mark)
        # It may be read while it is written, and after a loss of power it may have outlived what it
        # speaks of.
        if match is None or int(match[2]) != crc32(match[1]) or not self._boot:
            return Position(0, 0)
        boot, segment, offset = match[1].split()
        return Position(int(segment), int(offset)) if boot == self._boot else Position(0, 0)

    def _write_mark(self, end: Position) -> None:
        text = b"%s %d %d" % (self._boot, end.segment, end.offset)
        line = b"%s %d" % (text, crc32(text))
        write_whole(self._sync_lock.fd, line.ljust(_MARK_BYTES - 1) + b"\n", 0)

    def _refusal(self, error: OSError) -> AuditLogError:
        remedy = "make room there, or give a folder that you can write to by `--audit`"
        if isinstance(error, TimeoutError):
            remedy = "end that process if it hangs"
        return AuditLogError(
            f"the audit log in {self._folder} takes no entry: {error.strerror or error}; nothing "
            f"was recorded: {remedy}"
        )
