"""Tests of appending to the audit log: durability, order and signatures, also after crashes and on
a full disk."""

from __future__ import annotations

import json
import stat
import sys
import threading
import time
from contextlib import closing
from errno import ENOSPC
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from ops.audit import heads as heads_module
from ops.audit import log as log_module
from ops.audit import segments
from ops.audit.events import (
    MAX_ENTRY_BYTES,
    Action,
    AuditEvent,
    AuditOutcome,
    digest,
    encode_line,
    os_user,
    time_text,
)
from ops.audit.log import MAX_BATCH_ENTRIES, AuditLog
from ops.audit.recording import record, recorded, why_failed
from ops.audit.segments import FileLock, segment_files, segment_path
from ops.audit.verification import read_entries, take_snapshot, verify
from tests.forked import Popen
from triolet.errors import AuditLogError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from ops.audit.events import AuditEntry

EVENT: Final = AuditEvent(action=Action.MODEL_TAG, subject="llama", actor="key:root")
PATIENCE_S: Final = 60.0
WRITER: Final = """
import sys
from pathlib import Path
from ops.audit.events import Action, AuditEvent
from ops.audit.log import AuditLog
folder, name, count = sys.argv[1:]
with AuditLog(Path(folder)) as log:
    for number in range(int(count)):
        event = AuditEvent(action=Action.MODEL_TAG, subject=f"{name}-{number}", actor="key:root")
        print(log.append(event), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "audit"


def entries(folder: Path) -> list[AuditEntry]:
    return [entry for _, entry in read_entries(take_snapshot(folder))]


def subjects(folder: Path) -> list[str]:
    return [entry.subject for entry in entries(folder) if entry.subject]


def check_whole(folder: Path) -> None:
    verdict = verify(folder)
    assert not verdict.defects
    assert not verdict.notes
    assert not verdict.unsigned


def events(*names: str) -> list[AuditEvent]:
    return [msgspec.structs.replace(EVENT, subject=name) for name in names]


def test_entries_say_what_was_done_and_lie_in_private_files(folder: Path) -> None:
    before, after = digest(b"one"), digest(b"two")
    counts = {"bytes": 3}
    index = record(
        Action.TENANT_ADD, "alice", folder=folder, before=before, after=after, counts=counts
    )
    begin, entry = entries(folder)
    assert (begin.action, entry.index) == ("log.begin", index)
    assert (entry.action, entry.subject, entry.outcome) == ("tenant.add", "alice", "done")
    assert (entry.actor, entry.before, entry.after) == (os_user(), before, after)
    assert entry.counts == counts
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "key.pem").read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    check_whole(folder)


def test_lines_are_canonical_json(folder: Path) -> None:
    record(Action.MODEL_TAG, 'llama "ä" \n', folder=folder, request_id="r")
    for line in segment_path(folder, 0).read_bytes().splitlines():
        canonical = json.dumps(
            json.loads(line), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        assert canonical.encode() == line


def test_wide_rights_are_taken_away(folder: Path) -> None:
    record(Action.MODEL_TAG, "x", folder=folder)
    for path in (folder, folder / "key.pem"):
        path.chmod(0o755)
    record(Action.MODEL_TAG, "y", folder=folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o700


def test_bytes_of_a_path_that_are_no_text_are_escaped(folder: Path) -> None:
    record(Action.MODEL_REMOVE, "a\udcff", folder=folder)
    assert subjects(folder) == ["a\\xff"]


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (msgspec.structs.replace(EVENT, subject="x" * 1025), "length <= 1024"),
        (msgspec.structs.replace(EVENT, subject="\udcff"), "surrogates"),
        (msgspec.structs.replace(EVENT, actor=""), "length >= 1"),
        (msgspec.structs.replace(EVENT, before="the prompt itself"), "matching regex"),
        (msgspec.structs.replace(EVENT, counts={"tokens": -1}), ">= 0"),
        (
            msgspec.structs.replace(
                EVENT,
                subject="\x01" * 1024,
                counts={"\x01" * 127 + chr(n): 1 for n in range(2, 18)},
            ),
            "shorten its subject or counts",
        ),
    ],
)
def test_an_event_that_is_not_fit_is_refused_and_none_beside_it_is_taken(
    folder: Path, event: AuditEvent, told: str
) -> None:
    with AuditLog(folder) as log:
        with pytest.raises(AuditLogError, match=told):
            log.append(EVENT, event)
        assert log.append(EVENT) == 1
    assert len(entries(folder)) == 2
    check_whole(folder)


def test_a_batch_has_a_bound(folder: Path) -> None:
    with AuditLog(folder) as log:
        assert log.append(*[EVENT] * 500) == 1
        assert log.append(EVENT) == 501
        for count in (0, MAX_BATCH_ENTRIES + 1):
            with pytest.raises(AuditLogError, match="1 to 10000 events in one append"):
                log.append(*[EVENT] * count)
    assert len(entries(folder)) == 502
    check_whole(folder)


def test_a_head_is_signed_after_a_thousand_entries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "HEAD_S", 3600.0)
    heads = folder / "heads.jsonl"
    with AuditLog(folder) as log:
        log.append(EVENT)  # the first one, with log.begin
        log.append(*[EVENT] * 999)
        assert len(heads.read_bytes().splitlines()) == 1
        log.append(EVENT)
        assert len(heads.read_bytes().splitlines()) == 2
        log.append(EVENT)
    assert len(heads.read_bytes().splitlines()) == 3, "the last one as it is closed"
    check_whole(folder)


def test_what_nothing_follows_is_signed_after_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "HEAD_S", 0.05)
    with AuditLog(folder) as log:
        log.append(EVENT)
        log.append(EVENT)
        until = time.monotonic() + PATIENCE_S
        while verify(folder).unsigned:
            assert time.monotonic() < until
    check_whole(folder)


def test_segments_follow_one_another_and_every_appender_finds_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1000)
    with AuditLog(folder) as one, AuditLog(folder) as other:
        for number in range(6):
            one.append(*events(*"abc"))
            assert other.append(EVENT) == 4 * number + 4
    assert len(segment_files(folder)) > 3
    assert len(subjects(folder)) == 24
    record(Action.MODEL_TAG, "later", folder=folder)
    assert subjects(folder)[-1] == "later"
    check_whole(folder)


def test_several_that_have_written_share_one_fsync(folder: Path) -> None:
    with AuditLog(folder) as log:
        log.append(EVENT)
        before = log.syncs
        threads = [threading.Thread(target=log.append, args=(EVENT,)) for _ in range(8)]
        path = segment_path(folder, 0)
        with closing(FileLock(folder / "sync")) as lock, lock:
            for thread in threads:
                thread.start()
            until = time.monotonic() + PATIENCE_S
            while path.read_bytes().count(b"\n") < 10:
                assert time.monotonic() < until
        for thread in threads:
            thread.join()
        assert log.syncs == before + 1
    check_whole(folder)


def test_a_lock_that_is_never_given_back_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AuditLog(folder) as log:
        monkeypatch.setattr(segments, "LOCK_WAIT_S", 0.01)
        with (
            closing(FileLock(folder / "lock")) as lock,
            lock,
            pytest.raises(
                AuditLogError, match=r"has held .*/audit/lock for .*nothing was recorded"
            ),
        ):
            log.append(EVENT)
        monkeypatch.undo()
        log.append(EVENT)
    check_whole(folder)


LINE: Final = encode_line(EVENT, 2, time_text(0.0))[0] + b"\n"


@pytest.mark.parametrize("length", [1, len(LINE) // 2, len(LINE) - 2, len(LINE) - 1])
def test_a_torn_tail_is_cut_and_the_log_says_so(folder: Path, length: int) -> None:
    record(Action.MODEL_TAG, "before", folder=folder)
    torn = LINE[:length]
    with segment_path(folder, 0).open("ab") as file:
        file.write(torn)
    assert "ends within an entry" in verify(folder).notes[0]
    assert subjects(folder) == ["before"]
    record(Action.MODEL_TAG, "after", folder=folder)
    assert [entry.action for entry in entries(folder)] == [
        *("log.begin", "model.tag", "log.cut", "model.tag")
    ]
    cut = entries(folder)[2]
    assert (cut.before, cut.counts) == (digest(torn), {"bytes": length})
    check_whole(folder)


def test_the_first_entry_of_all_may_be_torn(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    segment_path(folder, 0).write_bytes(LINE[:50])
    record(Action.MODEL_TAG, "x", folder=folder)
    assert [entry.action for entry in entries(folder)] == ["log.begin", "log.cut", "model.tag"]
    check_whole(folder)


def test_a_torn_head_is_cut_and_the_next_one_follows_the_last_whole_one(folder: Path) -> None:
    for name in "ab":
        record(Action.MODEL_TAG, name, folder=folder)
    heads = folder / "heads.jsonl"
    heads.write_bytes(heads.read_bytes()[:-10])
    verdict = verify(folder)
    assert (verdict.unsigned, len(verdict.notes), verdict.defects) == (1, 1, [])
    record(Action.MODEL_TAG, "c", folder=folder)
    check_whole(folder)
    assert verify(folder).heads == 2


def test_what_a_killed_process_wrote_is_signed_by_the_next(folder: Path) -> None:
    record(Action.MODEL_TAG, "before", folder=folder)
    with segment_path(folder, 0).open("ab") as file:
        file.write(LINE)
    assert verify(folder).unsigned == 1
    with AuditLog(folder):
        assert verify(folder).unsigned == 1
    check_whole(folder)


@pytest.mark.slow
def test_several_processes_append_at_once_and_nothing_is_lost(folder: Path) -> None:
    # Takes over a second: only real processes test the file locks.
    names, count = "abcd", 20
    writers = [
        Popen([sys.executable, "-c", WRITER, str(folder), name, str(count)], stdout=-1)
        for name in names
    ]
    told = []
    for writer in writers:
        out, _ = writer.communicate(timeout=PATIENCE_S)
        assert writer.returncode == 0
        told.append([int(line) for line in out.split()])
    whole = entries(folder)
    assert len(whole) == len(names) * count + 1
    for name, indices in zip(names, told, strict=True):
        assert [whole[index].subject for index in indices] == [f"{name}-{n}" for n in range(count)]
    check_whole(folder)


@pytest.mark.slow
def test_sigkill_at_any_moment_loses_nothing_that_was_acknowledged(folder: Path) -> None:
    # Takes over a second: three processes are killed while appending, at different moments.
    acknowledged: list[tuple[int, str]] = []
    for name, reads in (("a", 1), ("b", 7), ("c", 20)):
        command = [sys.executable, "-c", WRITER, str(folder), name, "100000"]
        with Popen(command, stdout=-1) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(reads)]
            writer.kill()
            lines += writer.stdout.readlines()
        whole = [line for line in lines if line.endswith(b"\n")]
        acknowledged += [(int(line), f"{name}-{n}") for n, line in enumerate(whole)]
        assert not verify(folder).defects
    record(Action.MODEL_TAG, "after", folder=folder)
    found = entries(folder)
    assert all(found[index].subject == subject for index, subject in acknowledged)
    check_whole(folder)


FULL: Final = """
import resource, sys
from pathlib import Path
from ops.audit.events import Action
from ops.audit.recording import record
from triolet.errors import AuditLogError
folder = Path(sys.argv[1])
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
for room in (0, 1, 100, 150):
    size = (folder / f"{0:016d}.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
    try:
        record(Action.MODEL_TAG, "too much", folder=folder)
    except AuditLogError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
record(Action.MODEL_TAG, "after", folder=folder)
"""


@pytest.mark.slow
def test_a_full_disk_refuses_the_entry_and_leaves_the_log_as_it_was(folder: Path) -> None:
    with AuditLog(folder) as log:
        # More bytes of entries than of heads, so that the entries hit the limit first.
        log.append(*[EVENT] * 20)
    with Popen([sys.executable, "-c", FULL, str(folder)], stdout=-1) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    refusals = out.decode().splitlines()
    assert len(refusals) == 4
    assert all(
        "File too large; nothing was recorded: free disk space there" in one for one in refusals
    )
    assert subjects(folder) == ["llama"] * 20 + ["after"]
    check_whole(folder)


NO_ROOM_FOR_HEADS: Final = """
import resource, sys
from pathlib import Path
from ops.audit.events import Action
from ops.audit.recording import record
folder = Path(sys.argv[1])
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
size = (folder / "heads.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
record(Action.MODEL_TAG, "without a head", folder=folder)
"""


@pytest.mark.slow
def test_an_entry_is_kept_where_only_its_head_has_no_room(folder: Path) -> None:
    for _ in range(3):
        record(Action.MODEL_TAG, "x", folder=folder)  # heads are longer than entries
    with Popen([sys.executable, "-c", NO_ROOM_FOR_HEADS, str(folder)], stdout=-1) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert b"audit_head_not_written" in out
    verdict = verify(folder)
    assert (verdict.unsigned, verdict.defects, verdict.notes) == (1, [], [])
    record(Action.MODEL_TAG, "after", folder=folder)
    assert subjects(folder)[-2:] == ["without a head", "after"]
    check_whole(folder)


def test_a_log_that_is_shorter_than_signed_takes_no_entry(folder: Path) -> None:
    record(Action.MODEL_TAG, "x", folder=folder)
    path = segment_path(folder, 0)
    content = path.read_bytes()
    path.write_bytes(content[:-300])
    with pytest.raises(AuditLogError, match=r"has \d+ bytes, but had at least .* verify"):
        record(Action.MODEL_TAG, "y", folder=folder)
    assert path.read_bytes() == content[:-300]
    path.unlink()
    with pytest.raises(AuditLogError, match="is missing, but a signed head"):
        record(Action.MODEL_TAG, "y", folder=folder)


@pytest.mark.parametrize("line", [b"{}\n", LINE.replace(b"llama", b"lloma"), LINE * 2])
def test_a_wrong_line_after_the_last_head_is_named(folder: Path, line: bytes) -> None:
    record(Action.MODEL_TAG, "x", folder=folder)
    with segment_path(folder, 0).open("ab") as file:
        file.write(line)
    with pytest.raises(AuditLogError, match=r"has an invalid line at byte|has entry 2 in place"):
        record(Action.MODEL_TAG, "y", folder=folder)


def test_a_key_that_was_exchanged_signs_nothing(folder: Path, tmp_path: Path) -> None:
    record(Action.MODEL_TAG, "x", folder=folder)
    record(Action.MODEL_TAG, "x", folder=tmp_path / "other")
    key = folder / "key.pem"
    key.write_bytes((tmp_path / "other" / "key.pem").read_bytes())
    with pytest.raises(AuditLogError, match=r"not signed by the key in key\.pem"):
        record(Action.MODEL_TAG, "y", folder=folder)
    key.write_text("no key")
    with pytest.raises(AuditLogError, match="is not a private key in PEM format"):
        record(Action.MODEL_TAG, "y", folder=folder)
    key.unlink()
    with pytest.raises(AuditLogError, match="the key that signed them, is missing"):
        record(Action.MODEL_TAG, "y", folder=folder)
    assert not key.exists(), "a new one would look like the log's own"


@pytest.mark.parametrize("count", [0, 1])
def test_an_open_log_signs_nothing_once_heads_were_removed(folder: Path, count: int) -> None:
    heads = folder / "heads.jsonl"
    record(Action.MODEL_TAG, "x", folder=folder)
    with AuditLog(folder) as log:
        log.append(EVENT)
        record(Action.MODEL_TAG, "y", folder=folder)
        log.append(EVENT)
        lines = heads.read_bytes().splitlines(keepends=True)
        heads.write_bytes(b"".join(lines[:count]))
        with pytest.raises(AuditLogError, match=r"heads\.jsonl: it .*: heads were removed; "):
            log.append(EVENT)
    assert heads.read_bytes() == b"".join(lines[:count])


def test_a_kill_between_the_first_head_and_the_name_of_its_key_leaves_a_whole_log(
    folder: Path,
) -> None:
    record(Action.MODEL_TAG, "x", folder=folder)
    key = folder / "key.pem"
    content = key.read_bytes()
    key.rename(folder / "key.pem.new")
    record(Action.MODEL_TAG, "y", folder=folder)
    assert key.read_bytes() == content
    assert subjects(folder) == ["x", "y"]
    check_whole(folder)


def test_a_key_without_room_for_its_first_head_is_no_key_of_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(fd: int, content: bytes, offset: int) -> None:
        raise OSError(ENOSPC, "no room")

    with monkeypatch.context() as full:
        full.setattr(heads_module, "write_whole", no_room)
        record(Action.MODEL_TAG, "x", folder=folder)
    assert not (folder / "key.pem").exists()
    assert verify(folder).unsigned == 2
    record(Action.MODEL_TAG, "y", folder=folder)
    assert subjects(folder) == ["x", "y"]
    check_whole(folder)


def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AuditLogError, match=r"cannot be written: Not a directory; nothing was"):
        record(Action.MODEL_TAG, "x", folder=tmp_path / "file" / "audit")


def test_a_folder_that_others_enter_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "of another").write_text("")
    with pytest.raises(ConfigError, match="holds other files too: `chmod 700"):
        record(Action.MODEL_TAG, "x", folder=tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_what_waits_for_an_fsync_that_never_ends_says_that_the_entry_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AuditLog(folder) as log:
        with closing(FileLock(folder / "sync")) as lock, lock:
            monkeypatch.setattr(segments, "LOCK_WAIT_S", 0.01)
            with pytest.raises(AuditLogError, match=r"has entry 1, but may lose it .* has held"):
                log.append(EVENT)
        monkeypatch.undo()
    check_whole(folder)


def test_the_failure_of_an_action_is_not_hidden_by_that_of_its_record(folder: Path) -> None:
    def fail() -> None:
        (folder / "key.pem").write_text("no key")
        raise ConfigError("its own")

    with (
        pytest.raises(ConfigError, match="its own"),
        recorded(Action.TENANT_ADD, "alice", folder=folder),
    ):
        fail()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("secret"), "invalid input"),
        (AuditLogError("secret"), "failed before the end"),
        (OSError("secret"), "refused by the operating system"),
        (ValueError("secret"), "unexpected error"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_why_an_action_failed_is_told_in_words(error: BaseException, words: str) -> None:
    assert why_failed(error) == words


def test_an_action_is_recorded_before_it_begins_and_after_it_has_ended(folder: Path) -> None:
    after = digest(b"new")
    with recorded(Action.TENANT_ADD, "alice", folder=folder, after=after) as running:
        begun = entries(folder)[-1]
        assert (begun.outcome, begun.after) == (AuditOutcome.BEGUN, None)
    done = entries(folder)[-1]
    assert (done.outcome, done.after) == (AuditOutcome.DONE, after)
    with pytest.raises(ConfigError), recorded(Action.TENANT_ADD, "bob", folder=folder):
        raise ConfigError("the text of an error may hold anything")
    failed = entries(folder)[-1]
    assert (failed.outcome, failed.reason, failed.after) == (
        "failed",
        "invalid input",
        None,
    )
    assert begun.request_id == done.request_id == running.request_id != failed.request_id
    assert "anything" not in segment_path(folder, 0).read_text()
    check_whole(folder)


def test_an_action_that_cannot_be_recorded_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    begun = []
    with (
        pytest.raises(AuditLogError, match="nothing was recorded"),
        recorded(Action.TENANT_ADD, "alice", folder=tmp_path / "file"),
    ):
        begun.append(1)
    assert not begun


def test_an_action_whose_end_cannot_be_recorded_says_that_it_was_done(folder: Path) -> None:
    with (
        pytest.raises(AuditLogError, match=r"tenant.add alice was done, but .* not its end"),
        recorded(Action.TENANT_ADD, "alice", folder=folder),
    ):
        (folder / "key.pem").write_text("no key")


def test_the_longest_line_fits_its_bound(folder: Path) -> None:
    event = AuditEvent(
        action=Action.LOG_BEGIN,
        subject="x" * 1024,
        actor="y" * 128,
        before=digest(b""),
        after=digest(b""),
        counts={f"{n:0128d}": 2**53 for n in range(16)},
        reason="z" * 128,
        request_id="r" * 128,
    )
    with AuditLog(folder) as log:
        log.append(event)
    assert len(max(segment_path(folder, 0).read_bytes().splitlines(), key=len)) < MAX_ENTRY_BYTES
    check_whole(folder)
