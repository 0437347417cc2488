"""Tests that the commands on the operators' page about the model store work in the order shown."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ops.cli import main
from tests.packaging.test_commands_in_documents import commands

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_commands_of_the_page_work_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sampling.json").write_text('{"temperature": 0.2}')
    said = {}
    for line in commands("docs/operations/store.md"):
        _, command, *arguments = shlex.split(line)
        if command == "model":
            assert main([command, *arguments]) == 0, line
            said[line.removeprefix("triolet model ")] = capsys.readouterr()
    first, second = (out.out.strip() for line, out in said.items() if line.startswith("import"))
    assert [move.split()[-1] for move in said["alias chat@stable"].out.splitlines()] == [
        first,
        second,
        first,
    ]
    assert f"chat@{second}" in said["list"].out
    assert said["gc"].err == "0 blobs removed, 0 B\n"


def test_the_commands_of_the_page_on_signatures_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    for line in commands("docs/operations/signatures.md"):
        _, *arguments = shlex.split(line)
        assert main(arguments) == 0, line
        said = capsys.readouterr()
        if arguments[1] == "key":
            ours = said.out.strip()
        if arguments[1] == "verify":
            assert f"is signed by {ours}" in said.err
    assert "no longer requires a signature" in said.err
