"""Tests that the commands on the operators' page about registries work in the order shown."""

from __future__ import annotations

import io
import shlex
from typing import TYPE_CHECKING

import pytest

from ops.cli import main
from tests.packaging.test_commands_in_documents import commands

if TYPE_CHECKING:
    from pathlib import Path

    from .docker_registry import DockerRegistry


@pytest.mark.slow
def test_the_commands_of_the_page_work_one_after_another(
    registry: DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    printed = {}
    for line in commands("docs/operations/registry.md"):
        here = line.replace("registry.example", registry.host).replace("/srv/", f"{tmp_path}/")
        _, command, *arguments = shlex.split(here)
        if command == "model":
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"password\n")))
            assert main([command, *arguments]) == 0, line
            printed[line] = capsys.readouterr().out.strip()
    (listed,) = (out for line, out in printed.items() if line.endswith(" list"))
    digests = set(printed.values()) - {"", listed}
    assert len(digests) == 1, "one digest, here and there"
    assert digests.pop() in listed
