"""Tests of a process's status reports: each is one line that parses back to an equal report."""

from __future__ import annotations

import io
import os

import pytest

from triolet.status import (
    ProcessFailed,
    Progress,
    Report,
    ServerReady,
    WorkerReady,
    parse_report,
    report,
)

REPORTS: list[Report] = [
    Progress(stage="weights", done=3, total=10),
    WorkerReady(
        name="decode-0",
        parameters=3_000_000,
        dtype="float32",
        device="cpu",
        num_blocks=511,
        block_size=16,
        pool_bytes=1 << 29,
        max_model_len=1024,
    ),
    ServerReady(url="http://127.0.0.1:8000"),
    ProcessFailed(message='no "config.json"\nin\x1b[31m here'),
]


@pytest.mark.parametrize("what", REPORTS, ids=lambda what: type(what).__name__)
def test_a_report_is_one_line_and_comes_back_equal(what: Report) -> None:
    stream = io.BytesIO()
    report(what, stream)
    line = stream.getvalue()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert b"\x1b" not in line
    assert parse_report(line) == what


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"loading...\n", b"{}", b'{"event":"other"}', b"\xff", b'{"event":"failed"}'],
)
def test_any_other_line_is_no_report(line: bytes) -> None:
    assert parse_report(line) is None


def test_a_reader_that_went_away_does_not_end_the_writer() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb", buffering=0) as stream:
        report(ProcessFailed(message="the port is taken"), stream)
