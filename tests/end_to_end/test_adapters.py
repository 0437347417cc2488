"""Tests of a fleet with LoRA adapters: each answers like a model with merged weights."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from tokenizers import Tokenizer

from ops.models.model_directory import demo_model_path
from tests.adapters import write_adapter, write_merged
from tests.engine.driver import generate, ids, open_engine
from tests.ops.control.fleets import admin
from triolet.config import Dtype, EngineConfig
from triolet.units import MIB

from . import paced
from .conftest import EAGER, PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, running_fleet, wait_until
from .test_residency import folder_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a little dog with a red ball, and each day it went to a park"
"""A prompt of several blocks: cached KV must belong to the same adapter."""
NUM_TOKENS, SOME_TOKENS, LONG_TOKENS = 12, 40, 80
ADAPTED: dict[str, dict[str, Any]] = {
    "chat:whole": {},
    "chat:part": {"modules": ("q_proj", "v_proj", "down_proj")},
}


def reference(model_dir: Path, num_tokens: int = NUM_TOKENS) -> str:
    """Return the greedy completion of a model, computed without a fleet."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    assert len(prompt) > 16, "a whole block at least"
    engine = open_engine(model_dir, EngineConfig(kv_pool_bytes=4 * MIB, dtype=Dtype.FLOAT32))
    (results,) = generate(engine, [prompt], num_tokens)
    return str(tokenizer.decode(ids(results)))


def body_of(model: str, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0}
    return body | {"ignore_eos": True}


def complete(fleet: FleetProcess, model: str) -> str:
    answer = fleet.client.post("/v1/completions", json=body_of(model))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.promise
def test_the_base_and_two_adapters_answer_at_once(tmp_path: Path) -> None:
    """Server, prefill and decode must use the same adapters, and cached KV of one adapter must not
    be used for another."""
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
    options = ("chat=demo", *told, *WATCHED, *PATIENT)
    with running_fleet(tmp_path / "log", *options, at_rest=True) as fleet:
        asked = 4 * list(expected)  # later requests find KV of the same prompt
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


def streamed(fleet: FleetProcess, model: str, num_tokens: int, begun: Event) -> str:
    """Stream an answer and return its text; set `begun` at the first piece."""
    text, body = "", body_of(model, num_tokens) | {"stream": True}
    with httpx2.stream(
        "POST", f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE_S
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["text"]
                begun.set()
    return text


def keep_asking(fleet: FleetProcess, has_begun: Event, is_over: Event) -> list[str]:
    """Return long answers of the base model, requested one after the other until an event."""
    texts = []
    while not is_over.is_set():
        texts.append(streamed(fleet, "chat", LONG_TOKENS, has_begun))
    return texts


def asked(fleet: FleetProcess, order: str, **body: str) -> httpx2.Response:
    """Send a request to vLLM's routes on the admin listener."""
    with admin(folder_of(fleet)) as client:
        return client.post(f"/v1/{order}_lora_adapter", json=body)


def test_an_adapter_comes_and_goes_beside_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams must move between workers with and without the adapter, and requests may use it only
    while every worker has it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # for the audit log
    base = demo_model_path()
    adapter = write_adapter(tmp_path / "sql", base, 1, spread=0.1)
    merged = write_merged(tmp_path / "merged", base, adapter)
    # Do not wait for streams: each moves to another worker.
    told = ("--decode", "2", "--set", "worker.drain_timeout_s=0.1")
    options = ("chat=demo", *told, *WATCHED, *PATIENT, *EAGER)
    with running_fleet(tmp_path / "log", *options, at_rest=True, command=paced.COMMAND) as fleet:
        wait_until(lambda: bool(list(fleet.log_events("ready"))), PATIENCE_S, "the fleet is up")
        before = {*fleet.pids("prefill"), *fleet.pids("decode")}
        with ThreadPoolExecutor(2) as threads:
            begun, is_loaded = [Event(), Event()], Event()
            streams = [threads.submit(keep_asking, fleet, one, is_loaded) for one in begun]
            try:
                assert all(one.wait(PATIENCE_S) for one in begun)
                answer = asked(fleet, "load", lora_name="chat:sql", lora_path=str(adapter.path))
            finally:
                is_loaded.set()
            assert (answer.status_code, answer.text[:8]) == (200, "Success:"), answer.text
            texts = [text for one in streams for text in one.result(PATIENCE_S)]
        assert set(texts) == {reference(base, LONG_TOKENS)}
        failed = fleet.samples("triolet_attempts_failed_total")
        assert "drain" in {one.labels["cause"] for one in failed}, "a stream was moved"
        loaded = {*fleet.pids("prefill"), *fleet.pids("decode")}
        assert len(loaded) == 3
        assert not loaded & before
        assert complete(fleet, "chat:sql") == reference(merged)
        assert complete(fleet, "chat") == reference(base)
        again = asked(fleet, "load", lora_name="chat:sql", lora_path=str(adapter.path))
        assert again.status_code == 200
        assert {*fleet.pids("prefill"), *fleet.pids("decode")} == loaded
        assert fleet.client.post("/v1/load_lora_adapter", json={}).status_code == 404
        whole = streamed(fleet, "chat:sql", SOME_TOKENS, Event())
        with ThreadPoolExecutor(1) as threads:
            has_begun = Event()
            stream = threads.submit(streamed, fleet, "chat:sql", SOME_TOKENS, has_begun)
            assert has_begun.wait(PATIENCE_S)
            code, said = fleet.run_triolet("adapter", "unload", "chat:sql")
            assert (code, said[-1].partition("s  ")[2]) == (0, "chat:sql is unloaded"), said
            assert stream.result(PATIENCE_S) == whole
        unknown = fleet.client.post("/v1/completions", json=body_of("chat:sql"))
        assert unknown.status_code == 404
        assert "there is chat" in unknown.json()["error"]["message"]
        assert complete(fleet, "chat") == reference(base)
