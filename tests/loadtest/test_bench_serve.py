"""Tests of the HTTP benchmark: scaled traces keep their proportions, and clients time each
token."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loadtest.bench.serve import (
    LIKE,
    SERVERS,
    VLLM,
    Load,
    ask_together,
    at_once,
    loads_of,
    made_up,
    parse,
    ratios_of,
    shape_of,
)
from loadtest.harness.streams import Stream, StreamBrokenError
from loadtest.overload.arrivals import Scale, Sizes, fitted, read_rows
from tests.threaded import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator


TOKENS = 5
SERVERS_MODEL = Path("/models/any")


class Handler(BaseHTTPRequestHandler):
    """Streams TOKENS events. The model's name selects the end: `good`, `cut`, or no reason."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        for number in range(TOKENS):
            reason = "length" if number == TOKENS - 1 and asked["model"] == "good" else None
            choice = {"index": 0, "text": " word", "finish_reason": reason}
            event = json.dumps({"choices": [choice]}, separators=(",", ":"))
            self.wfile.write(f"data: {event}\n\n".encode())
        if asked["model"] != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def completions() -> Iterator[int]:
    with running_server(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield server.server_port


SCALE = Scale(rate=1.0, seconds=3, like=LIKE, sizes=Sizes(most=2000))


def test_a_scaled_trace_keeps_its_proportions_and_moments() -> None:
    taken = fitted([(10.0, 400, 40), (11.0, 800, 4), (14.0, 40_000, 400)], SCALE, 0.25, 0.25)
    assert [(a.prompt_tokens, a.output_tokens) for a in taken] == [(100, 10), (200, 2), (2000, 100)]
    assert [a.at_s for a in taken] == pytest.approx([0.0, 0.5, 2.0])


def test_traces_of_both_kinds_are_read(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("arrival_s,input_tokens,output_tokens\n0.5,10,3\n")
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"timestamp": 500, "input_length": 10, "output_length": 3}\n')
    assert read_rows(table) == read_rows(lines) == [(0.5, 10, 3)]


def test_without_a_trace_the_table_says_that_its_shape_is_made_up(tmp_path: Path) -> None:
    name, arrivals = shape_of(tmp_path / "none.csv", SCALE, 1.0)
    assert name == "synthetic, no trace here"
    assert arrivals == fitted(made_up(3), SCALE, 1.0, 1.0)
    assert 700 < sorted(prompt for _, prompt, _ in made_up(50))[25] < 1500
    options = parse(["--trace", str(tmp_path / "none.csv"), "--seconds", "6"])
    loads = loads_of(options)
    assert [load.name for load in loads][-1] == name
    assert [len(load.arrivals) for load in loads] == [1, 8, 32, 6]


async def test_an_answer_has_a_time_for_each_token() -> None:
    with completions() as port:
        url = f"http://127.0.0.1:{port}"
        answers = await ask_together(url, "good", at_once(3, 4, TOKENS), seed=1)
    assert [len(answer.times) for answer in answers] == [TOKENS] * 3
    assert all(answer.times[0] >= answer.asked_at and min(answer.gaps_s) >= 0 for answer in answers)


@pytest.mark.parametrize("model", ["short", "cut"])
async def test_an_answer_that_ends_otherwise_is_no_measurement(model: str) -> None:
    with completions() as port, pytest.RaisesGroup(StreamBrokenError, flatten_subgroups=True):
        await ask_together(f"http://127.0.0.1:{port}", model, at_once(1, 1, TOKENS), seed=1)


def test_figures_are_medians_of_rounds_and_percentiles_of_streams() -> None:
    load = Load("8 at once", at_once(8, 128, 64))
    for server, step_s in (("triolet", 0.01), (VLLM, 0.02)):
        load.speeds[server] = [100.0 / step_s, 1.0, 200.0 / step_s]
        load.answers[server] = [Stream(0.0, [0.5, 0.5 + step_s, 0.5 + 2 * step_s])] * 4
    rows = [load.row("triolet"), load.row(VLLM)]
    assert rows[0]["tokens_per_s"] == 10_000.0
    assert (rows[0]["ttft_p50_ms"], rows[0]["itl_p99_ms"]) == (500.0, 10.0)
    ratios = ratios_of(rows, "triolet", [VLLM])
    assert ratios["8 at once: tokens/s vs vllm"].value == 2.0
    assert ratios["8 at once: tokens/s vs vllm"].is_met
    assert ratios["8 at once: itl p99 of vllm vs ours"].value == 2.0


def test_ours_refuses_nothing_however_slow_the_machine_is(tmp_path: Path) -> None:
    process = SERVERS[0].process(SERVERS_MODEL, "bfloat16", tmp_path)
    process.close()
    assert "server.overload.admission.is_on=false" in process.command


def test_every_server_is_asked_for_the_same_model(tmp_path: Path) -> None:
    for server in SERVERS:
        process = server.process(SERVERS_MODEL, "bfloat16", tmp_path)
        assert {str(SERVERS_MODEL), str(process.port), "bfloat16"} <= set(process.command)
        process.close()
