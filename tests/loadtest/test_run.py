"""Tests of `python -m loadtest.run` with real locust users against a server with canned streams."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

from loadtest.run import main

from .fake_stream_server import MODEL, TOKENS, streaming_server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def run(url: str, out: Path, *options: str) -> int:
    small = ("--users", "4", "--spawn-rate", "50", "--duration", "1")
    return main(["--url", url, "--out", str(out), *small, *options])


def test_a_healthy_server_gets_a_report_of_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming_server() as server:
        assert run(server.url, tmp_path) == 0
        seen = server.seen
    records = json.loads((tmp_path / "streams.json").read_text())
    assert {record["protocol"] for record in records} == {"SSE", "WS"}
    assert all(record["tokens"] == TOKENS for record in records)
    assert len(records) == len(seen)
    assert all(asked["model"] == MODEL for asked in seen)
    seeds = [asked["seed"] for asked in seen]
    assert len(set(seeds)) == len(seeds)
    report = (tmp_path / "report.html").read_text()
    shown = capsys.readouterr().out
    for protocol in ("SSE", "WS"):
        for figure in ("TTFT", "ITL", "tokens/s"):
            assert f"{protocol} {figure}" in shown
            is_time = figure != "tokens/s"
            assert (f'"name": "{protocol} {figure}"' in report) is is_time, (
                "the report labels every figure as ms"
            )
    assert "failures: 0" in shown


def test_streams_that_merely_stop_are_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming_server(is_broken=True) as server:
        assert run(server.url, tmp_path) == 1
    shown = capsys.readouterr().out
    assert "SSE: ended without a terminal event" in shown
    assert "WS: ended without a terminal event" in shown
    assert "SSE TTFT" not in shown


def test_one_protocol_can_be_loaded_alone(tmp_path: Path) -> None:
    with streaming_server() as server:
        assert run(server.url, tmp_path, "--protocol", "ws") == 0
    records = json.loads((tmp_path / "streams.json").read_text())
    assert {record["protocol"] for record in records} == {"WS"}


def test_a_server_that_is_not_there_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert run(f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path) == 1
    assert "locust measured nothing" in capsys.readouterr().out


def test_options_for_a_server_that_is_not_started_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run("http://127.0.0.1:1", tmp_path, "--", "--prefill", "2")
    assert caught.value.code == 2
    assert "--url starts no server" in capsys.readouterr().err
