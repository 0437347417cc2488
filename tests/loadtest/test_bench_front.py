"""Tests of the server benchmark: tokens are counted on arrival, and each delay is assigned to its
token."""

from __future__ import annotations

import argparse
from array import array
from typing import TYPE_CHECKING

import pytest

from loadtest.bench import front
from loadtest.bench.engines import install
from loadtest.bench.front import DEMO, FASTAPI, OURS, Case, TokenStream, delays_ms, ratios_of
from loadtest.bench.front_source import word_ids
from loadtest.harness.report import Ratio

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def stream() -> TokenStream:
    stream = TokenStream(seed=3)
    stream.take(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", 0.0)
    return stream


def test_words_are_counted_in_chunks_however_they_are_cut(stream: TokenStream) -> None:
    ours = b'data: {"choices":[{"delta":{"content":" one two"}}]}\n\n'
    theirs = b'data: {"choices": [{"delta": {"content": " three"}}]}\n\n'
    data = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n' + ours + theirs
    for at in range(len(data)):
        stream.take(data[at : at + 1], float(at))
    assert len(stream.arrivals) == 3
    assert stream.arrivals[0] == stream.arrivals[1] < stream.arrivals[2] == len(data) - 1
    assert stream.num_events == 2


def test_a_delay_is_that_of_the_same_token(stream: TokenStream) -> None:
    stream.arrivals = array("d", [1.0, 2.5, 3.25])
    sent = {3: [0.5, 2.0, 3.0, 3.2], 4: [2.0]}
    assert delays_ms([stream], sent, 1.0, 3.1) == [250.0, 500.0]
    # A token that has not arrived counts as delayed until the last arrival.
    assert delays_ms([stream], sent, 3.1, 4.0) == [pytest.approx(50.0)]


def test_the_verdict_is_about_the_yardstick_and_the_many_streams() -> None:
    def row(server: str, streams: int, cpu: float) -> dict[str, object]:
        numbers = {"cpu_us_per_token": cpu, "delay_p99_ms": 60.0, "idle_stream_kib": 40.0}
        return {"server": server, "streams": streams, **numbers}

    rows = [
        row(OURS.name, 100, 10.0),
        row(OURS.name, 1000, 8.0),
        row(FASTAPI.name, 1000, 16.0),
        row("another", 1000, 4.0),
    ]
    ratios = ratios_of(rows)
    assert ratios[f"CPU per token vs {FASTAPI.name}, 1000 streams"] == Ratio(0.5, ceiling=1.0)
    assert ratios["CPU per token vs another, 1000 streams"].is_met
    assert not ratios["relay delay p99 in ms, 1000 streams"].is_met
    assert ratios["idle stream in KiB"].is_met


def test_words_begin_with_a_space_and_there_are_enough() -> None:
    assert len(word_ids(DEMO / "tokenizer.json")) > 64


def test_an_environment_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("loadtest.bench.engines.ENVIRONMENTS", blocked / "peers")
    assert str(install("x", ())).startswith("its environment cannot be created: ")


@pytest.mark.long
@pytest.mark.slow
def test_a_small_run_measures_our_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "WARM_UP_S", 0.3)
    monkeypatch.setattr(front, "describe", lambda threads: {"threads": threads})
    arguments = argparse.Namespace(
        fronts=[OURS.name], few=[2], streams=8, seconds=1.0, rounds=1, workers=2, rate=20.0
    )
    report = front.run(arguments)
    few, many = report.rows
    assert (few["streams"], many["streams"]) == (2, 8)
    assert all(row["tokens_per_s"] > 0 and row["cpu_us_per_token"] > 0 for row in report.rows)
    assert set(report.ratios) == {"relay delay p99 in ms, 8 streams", "idle stream in KiB"}
    assert Case(8, 1.0).streams == many["streams"]
