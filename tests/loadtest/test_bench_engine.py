"""The benchmark of the engine: its model works, its peers are asked alike, its verdict is right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from engine.load import load_engine
from loadtest.bench.engine import OURS, Case, measure, ratios_of, rows_of
from loadtest.bench.model import SHAPES, Shape, write_model
from loadtest.bench.peer_loop import prompts_of
from loadtest.bench.peer_triolet import TrioletSession
from loadtest.bench.peers import PEERS, Peer
from loadtest.bench.report import Ratio, Report, plot
from triolet.config import EngineConfig
from triolet.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Shape(32, 48, 2, 2, 1, head_dim=16, vocab_size=2100, max_position_embeddings=256)


class FakePeer:
    """Takes a fixed time for everything, and notes when it was asked."""

    def __init__(self, name: str, seconds: float, asked: list[str]) -> None:
        self.peer = Peer(name, "nowhere")
        self._seconds = seconds
        self._asked = asked

    def run(self, batch: int, context: int, steps: int) -> tuple[float, list[float]]:
        self._asked.append(self.peer.name)
        return self._seconds * context, [self._seconds] * steps


def test_the_models_have_the_sizes_that_they_are_called_by() -> None:
    count = {
        name: sum(_product(size) for size in shape.tensors().values())
        for name, shape in SHAPES.items()
    }
    assert round(count["150m"] / 1e6) == 152
    assert round(count["15m"] / 1e6) == 16
    assert SHAPES["150m"].kv_bytes_per_token == 12_288
    assert SHAPES["15m"].kv_bytes_per_token == 3_072


def _product(size: tuple[int, ...]) -> int:
    total = 1
    for number in size:
        total *= number
    return total


@pytest.mark.slow
def test_a_written_model_runs_and_gives_its_blocks_back(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL)
    assert len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]) == 2100
    engine = load_engine(tmp_path, EngineConfig(kv_pool_bytes=1 * MIB), lambda *_: None)
    for batch, context, steps in ((1, 5, 3), (3, 200, 2), (2, 128, 0)):
        prefill_s, step_s = TrioletSession(engine).run(prompts_of(batch, context), steps)
        assert prefill_s > 0
        assert len(step_s) == steps
    assert engine.ledger.leased_blocks == 0


def test_every_peer_gets_the_same_prompts_and_none_is_like_another() -> None:
    prompts = prompts_of(8, 16)
    assert prompts == prompts_of(8, 16)
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 8


def test_peers_take_turns_and_the_first_round_does_not_count() -> None:
    asked: list[str] = []
    peers = [FakePeer(OURS, 0.5, asked), FakePeer("other", 1.0, asked)]
    cases = (Case(1, 64, 0), Case(4, 64, 3))
    console = Console(quiet=True)
    seconds = measure(peers, cases, 2, console)  # type: ignore[arg-type]
    assert asked[:6] == [OURS, "other", "other", OURS, OURS, "other"]
    assert seconds[OURS, cases[0]] == [32.0, 32.0]
    assert seconds["other", cases[1]] == [1.0] * 6
    rows = rows_of(seconds)
    assert [row["tokens_per_s"] for row in rows if row["engine"] == OURS] == [2.0, 8.0]
    ratios = ratios_of(seconds)
    assert ratios == {
        "prefill 1 x 64 vs other": Ratio(2.0, 1.0),
        "decode b4 at 64 vs other": Ratio(2.0, 1.0),
    }
    assert not Ratio(0.99, 1.0).is_met


def test_a_report_is_table_json_and_plot(tmp_path: Path) -> None:
    machine = {"cpu": "x", "threads": 1, "cores": 2, "instructions": [], "load_average": 0.5}
    rows = [{"case": "a<b", "speed": 10.0}, {"case": "c", "speed": 5.0}]
    skipped = {"vllm": "not here"}
    report = Report("x", machine, rows, {"r": Ratio(1.2345, 1.0)}, skipped, (("case",), "speed"))
    written = json.loads(report.write(tmp_path).read_text())
    assert written["ratios"] == {"r": {"value": 1.234, "floor": 1.0}}
    assert written["rows"] == rows
    assert "a&lt;b" in (tmp_path / "x.svg").read_text()
    assert plot("t", [("one", 3.0)]).count("<rect") == 1
    console = Console(record=True, width=120, quiet=False, file=(tmp_path / "out").open("w"))
    with console.file:
        report.show(console)
    shown = console.export_text()
    assert "r: 1.23 (at least 1.0: met)" in shown
    assert "vllm skipped: not here" in shown


def test_a_peer_without_its_environment_says_why() -> None:
    assert "no environment" in str(Peer("x", "m", environment="nowhere").why_not())
    assert Peer("x", "m", package="no_such_package").why_not() == "no_such_package is not installed"
    assert {peer.name for peer in PEERS if peer.environment is None and peer.why_not() is None} >= {
        OURS,
        "triolet sdpa",
    }
