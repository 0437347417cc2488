"""Tests of the engine benchmark: its models run, every engine gets the same prompts, and ratios are
computed correctly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from rich.console import Console

from engine.load import load_engine
from loadtest.bench import engines as environment
from loadtest.bench.drivers.llama import gguf_name, tensors_of, turn_heads
from loadtest.bench.drivers.loop import prompts_of
from loadtest.bench.drivers.triolet import TrioletSession
from loadtest.bench.engine import (
    OURS,
    PEERS,
    WARM_STEPS,
    Case,
    Peer,
    PeerLost,
    decode_work,
    explain,
    head_weights,
    layer_weights,
    limits_of,
    measure,
    prefill_work,
    ratios_of,
    rows_of,
)
from loadtest.bench.engines import install, why_not
from loadtest.bench.limits import Limits
from loadtest.bench.model import SHAPES, Shape, shape_of_gguf, write_model
from loadtest.harness.report import Ratio, Report
from tests.gguf_files import byte_vocabulary, finish, write_header
from tests.loadtest.wheels import write_wheel
from triolet.config import EngineConfig
from triolet.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Shape(32, 48, 2, 2, 1, head_dim=16, vocab_size=2100, max_position_embeddings=256)


class FakePeer:
    """A fake engine that takes a fixed time for each call, and records the calls."""

    def __init__(self, name: str, seconds: float, asked: list[str], dies_at: str = "") -> None:
        self.peer = Peer(name, "nowhere")
        self._seconds = seconds
        self._asked = asked
        self._dies_at = dies_at

    def begin(self, batch: int, context: int, most_steps: int) -> float:
        self._note(f"begin {most_steps}")
        return self._seconds * context

    def decode(self, steps: int) -> list[float]:
        self._note(f"decode {steps}")
        return [self._seconds * 100] * WARM_STEPS + [self._seconds] * (steps - WARM_STEPS)

    def end(self) -> None:
        self._note("end")

    def parts(self) -> dict[str, float]:
        return {"products": 0.25, "rest": 0.125}

    def _note(self, what: str) -> None:
        self._asked.append(f"{self.peer.name}: {what}")
        if what == self._dies_at:
            raise PeerLost("it fell asleep")


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
        session = TrioletSession(engine)
        session.begin(prompts_of(batch, context), steps)
        for _ in range(steps):
            session.step()
        assert engine.ledger.leased_blocks
        session.end()
    assert engine.ledger.leased_blocks == 0


def test_every_peer_gets_the_same_prompts_and_none_is_like_another() -> None:
    prompts = prompts_of(8, 16)
    assert prompts == prompts_of(8, 16)
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 8


def run_fakes(
    peers: list[FakePeer], cases: tuple[Case, ...], repetitions: int
) -> tuple[dict[tuple[str, Case], list[float]], dict[str, str]]:
    return measure(peers, cases, repetitions)  # type: ignore[arg-type]


def test_peers_take_turns_and_what_warms_up_does_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []
    peers = [FakePeer(OURS, 0.5, asked), FakePeer("vllm", 1.0, asked)]
    cases = (Case(1, 512, 0), Case(8, 128, 3))
    seconds, lost = run_fakes(peers, cases, 2)
    turns = [f"{name}: begin 6" for name in (OURS, "vllm", "vllm", OURS, OURS, "vllm")]
    assert [line for line in asked[:12] if "begin" in line] == turns
    assert asked[12:] == [
        *("triolet: begin 15", "triolet: decode 5", "vllm: begin 15", "vllm: decode 5"),
        *("vllm: decode 5", "vllm: end", "triolet: decode 5", "triolet: end"),
    ]
    assert lost == {}
    assert capsys.readouterr().out.splitlines() == [
        "prefill 1 x 512, round 1 of 3, tokens/s: warmed up",
        "prefill 1 x 512, round 2 of 3, tokens/s: triolet 2, vllm 1",
        "prefill 1 x 512, round 3 of 3, tokens/s: triolet 2, vllm 1",
        "decode b8 at 128, round 1 of 2, tokens/s: triolet 16, vllm 8",
        "decode b8 at 128, round 2 of 2, tokens/s: triolet 16, vllm 8",
    ]
    assert seconds[OURS, cases[0]] == [256.0, 256.0]
    assert seconds["vllm", cases[1]] == [1.0] * 6
    rows = rows_of(seconds, {cases[0]: 64.0, cases[1]: 0.1})
    ours = [row for row in rows if row["engine"] == OURS]
    assert [row["tokens_per_s"] for row in ours] == [2.0, 16.0]
    assert [row["percent_of_limits"] for row in ours] == [25, 20]
    assert [row["ours_is_times"] for row in rows] == [1.0, 2.0, 1.0, 2.0]
    assert ratios_of(seconds) == {
        "prefill 1 x 512 vs vllm": Ratio(2.0, 1.0),
        "decode b8 at 128 vs vllm": Ratio(2.0, 1.0),
    }
    assert ratios_of({(OURS, cases[0]): [1.0], ("transformers", cases[0]): [1.0]}) == {}


def test_a_peer_that_dies_is_left_out_and_ours_is_not() -> None:
    cases = (Case(1, 512, 0), Case(8, 128, 3))
    other = FakePeer("vllm", 1.0, [], dies_at="decode 5")
    seconds, lost = run_fakes([FakePeer(OURS, 0.5, []), other], cases, 2)
    assert lost == {"vllm": "it fell asleep"}
    assert set(seconds) == {("vllm", cases[0]), (OURS, cases[0]), (OURS, cases[1])}
    with pytest.raises(PeerLost):
        run_fakes([FakePeer(OURS, 0.5, [], dies_at="end")], cases, 2)


def test_the_time_of_our_steps_is_told_apart() -> None:
    rows = explain(FakePeer(OURS, 1.0, []), (Case(1, 2, 0), Case(8, 2, 4)))  # type: ignore[arg-type]
    assert rows[0] == {
        "case": "prefill 1 x 2",
        "total_ms": 2000.0,
        "products_ms": 250.0,
        "rest_ms": 125.0,
        "python_ms": 1625.0,
    }
    assert rows[1]["products_ms"] == 62.5, "products are measured per step"


def test_limits_are_those_of_memory_or_of_products() -> None:
    shape = SHAPES["150m"]
    weights = layer_weights(shape) + head_weights(shape)
    assert round(weights / 1e6) == 152
    alone = decode_work(shape, "bfloat16", 2, 1, 128)
    assert alone.weight_bytes == 2 * weights
    assert alone.kv_bytes == 128 * shape.kv_bytes_per_token
    assert alone.at_limits_s(1e9, 1e15) == (alone.weight_bytes + alone.kv_bytes) / 1e9
    prompt = prefill_work(shape, 2, 1, 512)
    assert prompt.at_limits_s(1e15, 1e9) == (prompt.products + prompt.attention) / 1e9
    assert prompt.products == 2 * (512 * layer_weights(shape) + head_weights(shape))
    case = Case(1, 128, 4)
    limits = Limits(1.0, 1e6, "products")
    assert limits_of(shape, (case,), limits, "bfloat16", 2.0)[case] == alone.at_limits_s(1e9, 1e15)


def test_a_report_is_table_and_json(tmp_path: Path) -> None:
    machine = {"cpu": "x", "threads": 1, "cores": 2, "instructions": [], "load_average": 0.5}
    rows = [{"case": "a<b", "speed": 10.0}, {"case": "c", "speed": 5.0}]
    skipped = {"vllm": "not [here]"}
    ratios = {"r": Ratio(1.2345, 1.0), "wire": Ratio(3.0, ceiling=2.0), "stated": Ratio(0.5)}
    more = {"where_time_goes": [{"part": "all", "ms": 1.0}]}
    report = Report("x", machine, rows, ratios, skipped, more)
    written = json.loads(report.write(tmp_path).read_text())
    assert written["ratios"] == {
        "r": {"value": 1.234, "floor": 1.0},
        "wire": {"value": 3.0, "ceiling": 2.0},
        "stated": {"value": 0.5},
    }
    assert written["where_time_goes"] == more["where_time_goes"]
    assert written["rows"] == rows
    console = Console(record=True, width=120, quiet=False, file=(tmp_path / "out").open("w"))
    with console.file:
        report.show(console)
    shown = console.export_text()
    assert "r: 1.23 (at least 1.0: met)" in shown
    assert "wire: 3.00 (at most 2.0: missed)" in shown
    assert "stated: 0.50\n" in shown
    assert "vllm skipped: not [here]" in shown
    assert "where time goes" in shown


def test_an_engine_that_is_not_installed_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path / "peers")
    [vllm] = [peer for peer in PEERS if peer.name == "vllm"]
    assert vllm.why_not() == "not installed: make bench-peers (no peers/vllm)"
    assert Peer("x", "m", package="no_such_package").why_not() == "no_such_package is not installed"
    assert {peer.name for peer in PEERS if peer.environment is None and peer.why_not() is None} >= {
        OURS,
        "triolet sdpa",
    }


@pytest.mark.long
@pytest.mark.slow
def test_what_cannot_be_installed_leaves_a_note_and_what_can_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path)
    reason = install("x", ("--no-index", "no-such-package-anywhere"), timeout_s=120)
    assert "no-such-package-anywhere" in str(reason)
    assert why_not("x") == reason
    wheels = [str(write_wheel(tmp_path, name, "1.0")) for name in ("wanted", "along")]
    packages = ("--no-index", *wheels)
    assert install("x", packages, unwanted=("along",), timeout_s=120) is None
    assert why_not("x") is None
    [site] = tmp_path.glob("x/lib/python*/site-packages")
    assert {path.name for path in site.glob("*.py")} == {"wanted.py"}
    assert install("x", packages) is None, "the environment exists already"


def test_a_model_file_says_its_shape_and_who_reads_it_takes_part(tmp_path: Path) -> None:
    writer = write_header(tmp_path / "x.gguf", byte_vocabulary())
    writer.add_tensor("token_embd.weight", np.zeros((256, 64), np.float32))
    finish(writer)
    assert shape_of_gguf(tmp_path / "x.gguf") == Shape(64, 128, 2, 4, 2, 16, 256, 512)
    assert [peer.name for peer in PEERS if peer.reads_gguf] == [OURS, "triolet dtype", "llama.cpp"]


def test_a_model_file_for_llama_cpp_has_its_names_and_its_order_of_heads(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL)
    names = [gguf_name(name) for name, _ in tensors_of(tmp_path / "model.safetensors")]
    assert len(names) == len(set(names)) == len(SMALL.tensors())
    assert {"token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_norm.weight"} <= set(names)
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    bits = np.arange(16).reshape(8, 2)
    turned = turn_heads("model.layers.0.self_attn.q_proj.weight", bits, config)
    assert turned[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]
    assert turn_heads("model.layers.0.mlp.up_proj.weight", bits, config) is bits
