"""Tests of watching a file: a change counts once it has settled, and an unreadable file is reported
once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from triolet.errors import ConfigError
from triolet.watched_file import WatchedFile

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 100


def written(path: Path, text: str, age_s: int = 0) -> WatchedFile:
    """Write a file with a given age, and return it."""
    path.write_text(text)
    os.utime(path, (1_000_000 + age_s, 1_000_000 + age_s))
    return WatchedFile(str(path), "words", MAX_BYTES)


def test_a_file_is_read_and_has_not_changed_since(tmp_path: Path) -> None:
    file = written(tmp_path / "file", "one")
    assert file.read() == b"one"
    assert not file.has_settled()
    assert not file.has_settled()


def test_a_change_counts_when_it_has_stood_for_one_more_look(tmp_path: Path) -> None:
    file = written(tmp_path / "file", "one")
    file.read()
    written(tmp_path / "file", "half", age_s=1)
    assert not file.has_settled()
    written(tmp_path / "file", "two", age_s=2)
    assert not file.has_settled()
    assert file.has_settled()
    assert file.read() == b"two"
    assert not file.has_settled()


def test_another_file_in_its_place_is_noticed_whatever_its_age(tmp_path: Path) -> None:
    file = written(tmp_path / "file", "one")
    file.read()
    written(tmp_path / "new", "two")
    (tmp_path / "new").replace(tmp_path / "file")
    assert [file.has_settled(), file.has_settled()] == [False, True]


def test_a_file_that_is_gone_has_changed_too_and_is_told_of_once(tmp_path: Path) -> None:
    file = written(tmp_path / "file", "one")
    file.read()
    (tmp_path / "file").unlink()
    assert [file.has_settled(), file.has_settled()] == [False, True]
    file.note_tried()
    with pytest.raises(ConfigError, match="the file of words cannot be read"):
        file.read()
    assert [file.has_settled(), file.has_settled()] == [False, False]


def test_a_file_beyond_its_bound_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "file", "x" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match=f"longer than the {MAX_BYTES} bytes of a file of words"):
        file.read()


def test_a_guarded_file_that_others_may_write_is_refused_until_they_may_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    file = WatchedFile(str(path), "words", MAX_BYTES, is_guarded=True)
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"words, has mode {mode:04o}.*`chmod go-w "):
            file.read()
        assert [file.has_settled(), file.has_settled()] == [False, False]
    path.chmod(0o644)
    assert [file.has_settled(), file.has_settled()] == [False, True]
    assert file.read() == b"one"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_guarded_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345, expected 0 or root"):
        WatchedFile(str(path), "words", MAX_BYTES, is_guarded=True).read()
    assert WatchedFile(str(path), "words", MAX_BYTES).read() == b"one"
