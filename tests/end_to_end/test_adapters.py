"""A fleet whose model has adapters: each answers as its merged weights do, beside the base."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ops.model_directory import demo_model_path
from tests.adapters import write_adapter, write_merged

from .conftest import PATIENT, WATCHED
from .fleet_process import FleetProcess
from .test_several_models import complete, reference

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

ADAPTED = {"chat:whole": {}, "chat:part": {"modules": ("q_proj", "v_proj", "down_proj")}}


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
    numbers = ("--set", "worker.engine.dtype=float32")
    fleet = FleetProcess(tmp_path / "log", "chat=demo", *told, *numbers, *WATCHED, *PATIENT)
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
