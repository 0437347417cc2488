"""Appends to the audit log, from any number of threads and processes.

An append writes under the lock `lock`, then ensures an fsync under the lock `sync` (group commit):
the first appender to get `sync` syncs the entries of all, and records the synced position in the
file `sync`; the others read it there. Heads are signed under `sync` too, over synced entries only.
Lock order: `sync` before `lock`.
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
"""A head is signed after this many entries, or this many seconds after the last one."""
MAX_BATCH_ENTRIES: Final = 10_000
"""Limit of one append. Others wait for it for a fifth of a second."""
WRITE_LOCK: Final = "lock"
SYNC_LOCK: Final = "sync"
OWN_NAMES: Final = (WRITE_LOCK, SYNC_LOCK, KEY_NAME, HEADS_NAME, "0")
"""Prefixes of file names in the directory. Names of segments begin with 0 up to 10**15 entries."""
_MARK_BYTES: Final = 128
_MARK: Final = re.compile(rb"(\S+ \d+ \d+) (\d+) *\n")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class AuditLog:
    """An audit log in a directory; a context manager. `append` is thread-safe.

    Raises:
      AuditLogError: the directory cannot be used, or the log in it is damaged.
      ConfigError: other users can read it, and this user cannot change that.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._boot = _BOOT.read_bytes().strip() if _BOOT.exists() else b""
        self._signer: threading.Thread | None = None
        self._is_unsigned = threading.Event()
        self._is_closing = threading.Event()
        self.syncs = 0
        """Number of fsync calls for entries: fewer than appends if several shared one."""
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
        """Sign unsigned entries and close the files."""
        self._is_closing.set()
        self._is_unsigned.set()
        if self._signer is not None:
            self._signer.join()
        self._sign_rest()
        self._files.close()

    def append(self, *events: AuditEvent) -> int:
        """Append events in one batch and return the index of the first, after an fsync.

        Raises:
          AuditLogError: an event is invalid, the disk is full or fails, or the log is damaged. None
            of the events is in the log, unless the text says that it may be.
        """
        if not 0 < len(events) <= MAX_BATCH_ENTRIES:
            raise AuditLogError(
                f"the audit log accepts 1 to {MAX_BATCH_ENTRIES} events in one append, not "
                f"{len(events)}; nothing was recorded: split them"
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
                f"machine fails now: {error}; fix the disk, then run `triolet audit verify`"
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
                    f"{found[0]} is the first segment of the audit log, but entries before it are "
                    f"missing; `triolet audit verify --audit {self._folder}` shows details"
                )
            return Segments(self._folder, Frontier(), Position(0, 0))
        return Segments(self._folder, head.tree(), Position(head.segment, head.offset))

    def _catch_up(self) -> None:
        """Read entries appended by others. Requires holding `lock`."""
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
        """Sync all written entries, and sign a head if it is due. Requires holding `sync`."""
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
            # The entries are safe: later appends sync again, and the next head covers them.
            log.error("audit_head_not_written", folder=str(self._folder), error=str(error))

    def _sign_later(self) -> None:
        """Sign unsigned entries after HEAD_S. Requires holding `sync`."""
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
            # The entries are safe; the next process that appends signs them.
            log.error("audit_head_not_written", folder=str(self._folder), error=str(error))

    def _read_mark(self) -> Position:
        """Return the position up to which entries are known to be synced."""
        mark = os.pread(self._sync_lock.fd, _MARK_BYTES, 0)
        match = _MARK.fullmatch(mark)
        # Check the CRC, because it may be read while it is written, and the boot id, because after
        # a power loss it may be newer than the entries.
        if match is None or int(match[2]) != crc32(match[1]) or not self._boot:
            return Position(0, 0)
        boot, segment, offset = match[1].split()
        return Position(int(segment), int(offset)) if boot == self._boot else Position(0, 0)

    def _write_mark(self, end: Position) -> None:
        text = b"%s %d %d" % (self._boot, end.segment, end.offset)
        line = b"%s %d" % (text, crc32(text))
        write_whole(self._sync_lock.fd, line.ljust(_MARK_BYTES - 1) + b"\n", 0)

    def _refusal(self, error: OSError) -> AuditLogError:
        remedy = "free disk space there, or give a writable directory with `--audit`"
        if isinstance(error, TimeoutError):
            remedy = "end that process if it hangs"
        return AuditLogError(
            f"the audit log in {self._folder} cannot be written: {error.strerror or error}; "
            f"nothing was recorded: {remedy}"
        )
