"""Tests of `python -m loadtest.run`, which starts its own server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from loadtest.run import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_short_run_against_its_own_server_has_no_failures(tmp_path: Path) -> None:
    small = ["--users", "2", "--spawn-rate", "10", "--duration", "3"]
    assert main([*small, "--out", str(tmp_path)]) == 0, (tmp_path / "locust.out").read_text()
    records = json.loads((tmp_path / "streams.json").read_text())
    assert {record["protocol"] for record in records} == {"SSE", "WS"}
    assert all(record["tokens"] > 0 for record in records)
    assert (tmp_path / "report.html").stat().st_size > 0


def test_a_server_that_does_not_start_is_explained_by_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "no-model-here"
    assert main(["--out", str(tmp_path), "--", str(missing)]) == 2
    shown = capsys.readouterr().out
    assert "the server exited with code 2" in shown
    assert missing.name in shown
