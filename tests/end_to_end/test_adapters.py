"""A fleet whose model has adapters: each answers as its merged weights do, beside the base."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from ops.model_directory import demo_model_path
from tests.adapters import write_adapter, write_merged
from tests.engine.driver import generate, ids, open_engine
from triolet.config import Dtype, EngineConfig
from triolet.units import MIB

from .conftest import PATIENT, WATCHED
from .fleet_process import FleetProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a little dog with a red ball, and each day it went to a park"
"""Several blocks: what is found again of it in caches of KV must be the adapter's own."""
NUM_TOKENS = 12
ADAPTED: dict[str, dict[str, Any]] = {
    "chat:whole": {},
    "chat:part": {"modules": ("q_proj", "v_proj", "down_proj")},
}


def reference(model_dir: Path) -> str:
    """Return the greedy completion of a model without any fleet."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    assert len(prompt) > 16, "a whole block at least"
    engine = open_engine(model_dir, EngineConfig(kv_pool_bytes=4 * MIB, dtype=Dtype.FLOAT32))
    (results,) = generate(engine, [prompt], NUM_TOKENS)
    return str(tokenizer.decode(ids(results)))


def complete(fleet: FleetProcess, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = fleet.client.post("/v1/completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def test_the_base_and_two_adapters_answer_at_once(tmp_path: Path) -> None:
    """Only whole processes show that settings, server, prefill and decode mean the same adapters,
    and that what one left in the caches of KV is not found for another."""
    base = demo_model_path()
    expected = {"chat": reference(base)}
    options = []
    for seed, (model, fields) in enumerate(ADAPTED.items(), 1):
        name = model.partition(":")[2]
        adapter = write_adapter(tmp_path / name, base, seed, spread=0.1, **fields)
        expected[model] = reference(write_merged(tmp_path / f"merged-{name}", base, adapter))
        options.append(f"{name}={adapter.path}")
    assert len(set(expected.values())) == 3
    told = ("--set", f"models.chat.adapters={','.join(options)}")
    fleet = FleetProcess(tmp_path / "log", "chat=demo", *told, *WATCHED, *PATIENT)
    try:
        fleet.wait_ready()
        asked = 4 * list(expected)  # later ones find KV of the same prompt
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(lambda model: complete(fleet, model), asked))
        assert answers == 4 * list(expected.values())
        cards = {one["id"]: one for one in fleet.client.get("/v1/models").json()["data"]}
        assert cards.keys() == expected.keys()
        for model in ADAPTED:
            assert (cards[model]["parent"], cards[model]["root"]) == ("chat", "chat")
            assert cards[model]["digest"].startswith("sha256:")
        unknown = fleet.client.post("/v1/completions", json={"model": "chat:sql", "prompt": "a"})
        assert unknown.status_code == 404
        assert "chat, chat:whole, chat:part" in unknown.json()["error"]["message"]
        fleet.wait_at_rest()
    finally:
        fleet.stop()
