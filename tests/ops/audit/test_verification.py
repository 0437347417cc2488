"""Tests of `triolet audit verify`: it finds every change, with file, line and the last trusted
head."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.audit import segments
from ops.audit.events import Action, AuditEvent, encode_line, time_text
from ops.audit.log import AuditLog
from ops.audit.recording import record
from ops.audit.segments import segment_files, segment_path
from ops.audit.verification import (
    MAX_DEFECTS,
    newest_head,
    prove,
    read_entries,
    read_witnesses,
    take_snapshot,
    verify,
)
from triolet.errors import AuditLogError

from .proofs import check_proof

if TYPE_CHECKING:
    from pathlib import Path

EVENT: Final = AuditEvent(action=Action.MODEL_ALIAS, subject="llama", actor="key:root")
SIZES: Final = (6, 11, 16)
"""Number of entries that each of the three heads signs: log.begin, then five at a time."""
SEGMENT: Final = "0000000000000000.jsonl"
HEADS: Final = "heads.jsonl"


def write_log(folder: Path) -> None:
    for _ in SIZES:
        with AuditLog(folder) as log:
            log.append(*[EVENT] * 5)


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log with three heads for tests to copy."""
    folder = tmp_path_factory.mktemp("pattern") / "audit"
    write_log(folder)
    assert [head["size"] for head in heads_of(folder)] == list(SIZES)
    return folder


@pytest.fixture
def folder(pattern: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pattern, tmp_path / "audit")


def heads_of(folder: Path) -> list[dict[str, int]]:
    lines = (folder / HEADS).read_bytes().splitlines()
    return [msgspec.json.decode(line)["body"] for line in lines]


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def found(folder: Path) -> tuple[list[tuple[str, int]], int]:
    """Return the file and line of each defect, and the number of entries of the trusted head."""
    verdict = verify(folder)
    trusted = 0 if verdict.trusted is None else verdict.trusted.size
    return [(defect.file, defect.line) for defect in verdict.defects], trusted


def rewritten(index: int, subject: str) -> bytes:
    """Return a line with another event and its correct hash."""
    event = msgspec.structs.replace(EVENT, subject=subject)
    return encode_line(event, index, time_text(0.0))[0] + b"\n"


def test_a_log_as_it_was_written_is_right(folder: Path) -> None:
    verdict = verify(folder)
    assert (verdict.entries, verdict.heads, verdict.unsigned) == (16, 3, 0)
    assert verdict.trusted is not None
    assert verdict.trusted.size == 16
    assert not verdict.defects + verdict.notes


def test_a_copy_without_locks_and_key_can_be_verified(folder: Path) -> None:
    for name in ("lock", "sync", "key.pem"):
        (folder / name).unlink()
    assert found(folder) == ([], 16)


@pytest.mark.slow
@given(data=st.data())
def test_any_flipped_bit_of_an_entry_is_found_in_its_line(
    pattern: Path, data: st.DataObject
) -> None:
    path = pattern / SEGMENT
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    line = content.count(b"\n", 0, place) + 1
    try:
        path.write_bytes(changed)
        places, trusted = found(pattern)
    finally:
        path.write_bytes(content)
    # Without its newline the last line is incomplete, so that the log ends one line earlier.
    is_end = place == len(content) - 1
    assert places[0] == (SEGMENT, line - 1 if is_end else line)
    assert trusted == max((size for size in SIZES if size < line), default=0)


@pytest.mark.slow
@given(data=st.data())
def test_any_flipped_bit_of_a_head_is_found_in_its_line(pattern: Path, data: st.DataObject) -> None:
    path = pattern / HEADS
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 2))
    changed = bytearray(content)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(changed)
        places, trusted = found(pattern)
    finally:
        path.write_bytes(content)
    line = content.count(b"\n", 0, place) + 1
    assert places[0] == (HEADS, line)
    # Each other head covers all entries before it; a lost newline removes two heads.
    assert trusted == {1: 16, 2: 6 if content[place] == 10 else 16, 3: 11}[line]


def test_an_altered_entry_leaves_the_others_checked(folder: Path) -> None:
    path = folder / SEGMENT
    lines = lines_of(path)
    lines[7] = lines[7].replace(b"llama", b"lloma")
    path.write_bytes(b"".join(lines))
    verdict = verify(folder)
    assert [(one.line, one.what) for one in verdict.defects] == [
        (8, "entry 7 was altered: its content does not match its hash")
    ]
    assert verdict.heads == 3, "the hash beside it is the signed one"
    assert found(folder)[1] == 6


def test_an_entry_that_was_rewritten_with_its_hash_is_found_by_the_next_head(folder: Path) -> None:
    path = folder / SEGMENT
    lines = lines_of(path)
    lines[7] = rewritten(7, "another")
    path.write_bytes(b"".join(lines))
    assert found(folder) == ([(HEADS, 2), (HEADS, 3)], 6)
    assert "one of 6 to 10 was rewritten together with its hash" in verify(folder).defects[0].what


@pytest.mark.parametrize("gone", [0, 7, 11])
def test_a_removed_line_is_found(folder: Path, gone: int) -> None:
    path = folder / SEGMENT
    lines = lines_of(path)
    del lines[gone]
    path.write_bytes(b"".join(lines))
    trusted = max((size for size in SIZES if size <= gone), default=0)
    assert found(folder) == ([(SEGMENT, gone + 1)], trusted)
    assert f"has entry {gone + 1} in place of {gone}" in verify(folder).defects[0].what


def test_exchanged_and_added_lines_are_found(folder: Path) -> None:
    path = folder / SEGMENT
    lines = lines_of(path)
    lines[12], lines[13] = lines[13], lines[12]
    path.write_bytes(b"".join(lines))
    assert found(folder) == ([(SEGMENT, 13)], 11)
    lines[12], lines[13] = lines[13], lines[12]
    path.write_bytes(b"".join([*lines[:8], lines[7], *lines[8:]]))
    assert found(folder) == ([(SEGMENT, 9)], 6)


@pytest.mark.parametrize("kept", [15, 11, 10, 1, 0])
def test_a_tail_that_was_cut_off_is_found(folder: Path, kept: int) -> None:
    path = folder / SEGMENT
    path.write_bytes(b"".join(lines_of(path)[:kept]))
    trusted = max((size for size in SIZES if size <= kept), default=0)
    assert found(folder) == ([(SEGMENT, kept)], trusted)
    assert verify(folder).defects[0].what == (
        f"the log ends after {kept} entries, but heads.jsonl, line 3, signs 16: the end was cut off"
    )


def test_a_segment_that_is_gone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 500)
    folder = tmp_path / "audit"
    write_log(folder)
    first, second, third = segment_files(folder)
    assert found(folder) == ([], 16)
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    assert found(folder)[0][0] == (second.name, content.count(b"\n"))
    second.unlink()
    assert found(folder) == ([(third.name, 0)], 6)
    second.write_bytes(content)
    third.unlink()
    assert found(folder) == ([(second.name, content.count(b"\n"))], 11)
    first.unlink()
    assert found(folder) == ([(second.name, 0)], 0)


@pytest.mark.parametrize("order", [(0, 2), (1, 2), (0, 2, 1), (0, 1, 1, 2)])
def test_heads_that_were_removed_moved_or_added_are_found(
    folder: Path, order: tuple[int, ...]
) -> None:
    path = folder / HEADS
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[place] for place in order))
    places, _ = found(folder)
    assert places[0][0] == HEADS
    wrong = next(n for n, place in enumerate(order) if place != n)
    assert places[0][1] == wrong + 1


def test_heads_of_another_log_are_found(folder: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "other")
    path = folder / HEADS
    lines, others = lines_of(path), lines_of(tmp_path / "other" / HEADS)
    path.write_bytes(b"".join([lines[0], others[1], lines[2]]))
    assert found(folder)[0][0] == (HEADS, 2)


def test_what_only_heads_kept_elsewhere_can_find(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_bytes(lines_of(folder / HEADS)[1] + lines_of(folder / HEADS)[2])
    witnesses = read_witnesses(kept)
    assert verify(folder, witnesses).witnessed == 2
    # Entries and heads cut off together.
    for name, count in ((SEGMENT, 11), (HEADS, 2)):
        (folder / name).write_bytes(b"".join(lines_of(folder / name)[:count]))
    assert found(folder) == ([], 11)
    verdict = verify(folder, witnesses)
    assert [(one.file, one.line) for one in verdict.defects] == [(SEGMENT, 11)]
    assert "kept.jsonl, line 2, signs 16" in verdict.defects[0].what
    # Another history, signed with the log's key.
    path = folder / SEGMENT
    lines = lines_of(path)[:6]
    lines.append(rewritten(6, "another"))
    path.write_bytes(b"".join(lines))
    (folder / HEADS).write_bytes(lines_of(folder / HEADS)[0])
    record(Action.MODEL_TAG, "x", folder=folder)
    with AuditLog(folder) as log:
        log.append(*[EVENT] * 8)
    assert found(folder) == ([], 16)
    assert [(one.file, one.line) for one in verify(folder, witnesses).defects] == [
        (str(kept), 1),
        (str(kept), 2),
    ]
    # A new log with its own key.
    shutil.rmtree(folder)
    write_log(folder)
    assert found(folder) == ([], 16)
    assert {one.what for one in verify(folder, witnesses).defects} == {
        "it is signed by another key than the heads of this log"
    }


def test_a_head_kept_without_its_newline_counts(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    lines = lines_of(folder / HEADS)
    kept.write_bytes(lines[0] + lines[2].rstrip())
    assert verify(folder, read_witnesses(kept)).witnessed == 2
    kept.write_bytes(lines[0] + lines[2][:-9])
    with pytest.raises(AuditLogError, match="line 2: it does not have the form of a head"):
        read_witnesses(kept)


def test_a_file_that_holds_no_heads_is_no_witness(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with pytest.raises(AuditLogError, match="cannot be read"):
        read_witnesses(path)
    path.write_text("")
    with pytest.raises(AuditLogError, match="has no head; `triolet audit head` prints one"):
        read_witnesses(path)
    path.write_text("{}\n")
    with pytest.raises(AuditLogError, match="line 1: it does not have the form of a head"):
        read_witnesses(path)


def test_a_log_that_is_all_wrong_is_not_looked_at_for_ever(folder: Path) -> None:
    with AuditLog(folder) as log:
        log.append(*[EVENT] * 200)
    path = folder / SEGMENT
    path.write_bytes(path.read_bytes().replace(b"llama", b"lloma"))
    (folder / HEADS).write_bytes((folder / HEADS).read_bytes() + b"{}\n" * 200)
    assert len(verify(folder).defects) == MAX_DEFECTS


@pytest.mark.parametrize("index", [0, 5, 14, 15])
def test_a_proof_is_taken_by_a_verifier_of_its_own(folder: Path, index: int) -> None:
    text = msgspec.json.encode(prove(folder, index)).decode()
    entry = check_proof(text)
    assert entry["action"] == ("model.alias" if index else "log.begin")
    with pytest.raises(AssertionError):
        check_proof(text.replace("llama", "lloma") if index else text.replace("begin", "began"))


def test_what_no_head_covers_is_not_proven(folder: Path) -> None:
    with pytest.raises(AuditLogError, match="covers entries 0 to 15, not 16"):
        prove(folder, 16)


def test_a_damaged_log_proves_nothing(folder: Path) -> None:
    path = folder / SEGMENT
    lines = lines_of(path)
    path.write_bytes(b"".join([*lines[:7], rewritten(7, "another"), *lines[8:]]))
    with pytest.raises(AuditLogError, match="do not match its newest head"):
        prove(folder, 3)
    path.write_bytes(b"".join(lines[:12]))
    with pytest.raises(AuditLogError, match="only 12 of 16 leaves exist"):
        prove(folder, 3)
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(AuditLogError, match="line 1: it has entry 1 in place of 0"):
        list(read_entries(take_snapshot(folder)))


def test_no_log_and_no_head_are_told_apart(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AuditLogError, match="has no audit log"):
        take_snapshot(tmp_path / "nowhere")
    # A process was killed before the first head, so no key exists yet.
    (folder / HEADS).write_bytes(b"")
    (folder / "key.pem").unlink()
    verdict = verify(folder)
    assert (verdict.unsigned, verdict.trusted, verdict.defects) == (16, None, [])
    with pytest.raises(AuditLogError, match=r"has no head; .* the next append signs the first"):
        newest_head(take_snapshot(folder))
    record(Action.MODEL_TAG, "x", folder=folder)
    assert found(folder) == ([], 17)
    assert segment_path(folder, 0).name == SEGMENT


@pytest.mark.parametrize("kept_bytes", [None, 0, 100])
def test_a_log_whose_heads_are_all_gone_is_wrong_and_never_signed_again(
    folder: Path, kept_bytes: int | None
) -> None:
    lines = lines_of(folder / SEGMENT)
    (folder / SEGMENT).write_bytes(b"".join([*lines[:7], rewritten(7, "other"), *lines[8:]]))
    heads = (folder / HEADS).read_bytes()
    (folder / HEADS).unlink()
    if kept_bytes is not None:
        (folder / HEADS).write_bytes(heads[:kept_bytes])
    for _ in range(2):
        verdict = verify(folder)
        assert found(folder) == ([(HEADS, 0)], 0)
        assert verdict.defects[0].what == (
            "it has no head, but key.pem has signed one: the heads were removed"
        )
        with pytest.raises(AuditLogError, match=r"heads were removed; .* or move .* away"):
            record(Action.MODEL_TAG, "x", folder=folder)
        assert (folder / HEADS).read_bytes() == heads[: kept_bytes or 0]
    (folder / SEGMENT).unlink()
    assert found(folder) == ([(HEADS, 0)], 0)
    with pytest.raises(AuditLogError, match="heads were removed"):
        record(Action.MODEL_TAG, "x", folder=folder)
    folder.rename(folder.with_name("kept"))  # follow the remedy in the error
    record(Action.MODEL_TAG, "x", folder=folder)
    assert found(folder) == ([], 2)
