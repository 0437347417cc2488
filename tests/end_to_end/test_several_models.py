"""Tests of two models in one fleet: names, and starting and stopping each separately."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from ops.models.model_directory import demo_model_path
from tests import forked
from tests.engine.driver import generate, ids, open_engine
from tests.packaging.test_commands_in_documents import commands
from triolet.config import Dtype, EngineConfig
from triolet.units import MIB

from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, running_fleet, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was"
NUM_TOKENS = 12
LONG = 200
"""Tokens of streams under which workers are restarted."""
LADDER = (
    *("--set", "auto.ladder=code,chat"),
    *("--set", 'auto.limits=[{"model": "code", "context_tokens": 40}]'),
)
LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_shallow(path: Path, num_layers: int = 2) -> Path:
    """Write the demo model's first layers as another model, which gives other answers."""
    shutil.copytree(demo_model_path(), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if (layer := LAYER.match(name)) is None or int(layer[1]) < num_layers
    }
    save_file(kept, file, {"format": "pt"})
    return path


def reference(model_dir: Path) -> str:
    """Return the greedy completion of a model, computed without a fleet."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    engine = open_engine(model_dir, EngineConfig(kv_pool_bytes=4 * MIB, dtype=Dtype.FLOAT32))
    (results,) = generate(engine, [tokenizer.encode(PROMPT).ids], NUM_TOKENS)
    return str(tokenizer.decode(ids(results)))


def complete(fleet: FleetProcess, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = fleet.client.post("/v1/completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def streamed(fleet: FleetProcess, body: dict[str, object]) -> list[str]:
    """Return the pieces of a streamed completion that ends normally."""
    with fleet.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        *pieces, end = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert end == "[DONE]"
    return [str(json.loads(piece)["choices"][0]["text"]) for piece in pieces]


def triolet(fleet: FleetProcess, *words: str) -> str:
    """Run `triolet model …` for a fleet and return its output."""
    code, lines = fleet.run_triolet("model", *words)
    assert code == 0, lines
    return "".join(f"{line}\n" for line in lines)


def processes(fleet: FleetProcess) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(triolet(fleet, "ps", "--json"))}


def pids(row: dict[str, Any]) -> dict[str, int]:
    return {worker["name"]: worker["pid"] for worker in row["workers"]}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shallow(tmp_path_factory.mktemp("models") / "shallow")


@pytest.fixture(scope="module")
def two(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """A separate fleet, because its workers are stopped and killed."""
    log = tmp_path_factory.mktemp("two") / "fleet.log"
    state = str(tmp_path_factory.mktemp("state"))
    models = ("chat=demo", f"code={shallow}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", state)  # for the audit log
        options = (*models, *LADDER, *WATCHED, *PATIENT)
        with running_fleet(log, *options, at_rest=True) as fleet:
            # Before, one of the models or control may be missing.
            wait_until(lambda: any(fleet.log_events("ready")), PATIENCE_S, "all of it is up")
            yield fleet


@pytest.mark.promise
def test_each_model_answers_under_its_name(two: FleetProcess, shallow: Path) -> None:
    expected = {"chat": reference(demo_model_path()), "code": reference(shallow)}
    assert expected["chat"] != expected["code"]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda model: complete(two, model), 2 * list(expected)))
    assert answers == 2 * list(expected.values())
    # The fleet accepts requests a moment before it announces that.
    wait_until(lambda: any(two.log_events("ready")), PATIENCE_S, "it says that it is ready")
    (ready,) = two.log_events("ready")
    assert ready["models"] == {"chat": str(demo_model_path()), "code": str(shallow)}
    refused = two.client.post("/v1/completions", json={"model": "demo", "prompt": "a"})
    assert refused.status_code == 404


def test_the_server_chooses_between_real_models(two: FleetProcess, shallow: Path) -> None:
    def ask(max_tokens: int) -> dict[str, Any]:
        body = {"model": "auto", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
        answer = two.client.post("/v1/completions", json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    expected = {"chat": reference(demo_model_path()), "code": reference(shallow)}
    for max_tokens, name in ((NUM_TOKENS, "code"), (60, "chat")):
        answer = ask(max_tokens)
        assert answer["model"] == name
        assert answer["choices"][0]["text"].startswith(expected[name])
    triolet(two, "sleep", "code")
    wait_until(lambda: states(two)["code"] == "sleeping", PATIENCE_S, "the server was told")
    assert ask(NUM_TOKENS)["model"] == "chat"
    assert states(two) == {"chat": "serving", "code": "sleeping", "auto": "serving"}
    assert complete(two, "code") == expected["code"]
    lines = [line for line in two.log_events("request_ended") if "auto" in line]
    assert [(line["model"], line["auto"], line["auto_largest"]) for line in lines] == [
        ("code", "smallest", "chat"),
        ("chat", "context", "chat"),
        ("chat", "asleep", "chat"),
    ]
    for name in ("chat", "code"):
        used = {line["model_digest"] for line in two.log_events("request_ended")}
        tokens = two.metric("triolet_version_tokens_total", model=name, kind="completion")
        ended = [line for line in two.log_events("request_ended") if line["model"] == name]
        assert tokens == sum(line["completion_tokens"] for line in ended) > 0
    assert used == {None}, "directories, of no store"


def states(fleet: FleetProcess) -> dict[str, str]:
    listed = fleet.client.get("/v1/models").json()["data"]
    return {one["id"]: one["state"] for one in listed}


def test_the_commands_of_the_operators_page_work_one_after_another(two: FleetProcess) -> None:
    said = {
        line: triolet(two, *words)
        for line in commands("docs/operations/models.md")
        for _, command, *words in [shlex.split(line)]
        if command == "model"
    }
    assert [line.removeprefix("triolet model ") for line in said] == [
        *("ps", "ps --json"),
        *("sleep code", "wake code", "unload code", "load code"),
    ]
    assert said["triolet model ps"].startswith("chat  serving  workers running\n")
    assert said["triolet model sleep code"].endswith("code is sleeping\n")
    assert said["triolet model load code"].endswith("code is ready\n")


def test_a_request_wakes_a_model_that_sleeps(two: FleetProcess) -> None:
    before, answer = processes(two), complete(two, "code")
    triolet(two, "sleep", "code")
    asleep = processes(two)
    assert (asleep["code"]["state"], asleep["code"]["workers_state"]) == ("sleeping", "stopped")
    assert set(pids(asleep["code"]).values()) == {None}
    assert complete(two, "code") == answer
    after = processes(two)
    assert pids(after["chat"]) == pids(before["chat"])
    assert set(pids(after["code"])) == {"code.prefill-0", "code.decode-0"}
    assert all(worker["memory_bytes"] for worker in after["code"]["workers"])


def test_the_workers_of_one_model_are_restarted_and_its_streams_go_on(two: FleetProcess) -> None:
    """Tests a server, a spare and streams together."""
    body = {"model": "code", "prompt": PROMPT, "max_tokens": LONG, "temperature": 0}
    body |= {"ignore_eos": True}
    whole = two.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    before = processes(two)
    command = [forked.TRIOLET, "restart", "code", "--role", "decode", "--port", str(two.port)]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            assert "".join(streamed(two, body)) == whole
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out.decode()
    assert [line.split()[2] for line in out.decode().splitlines()] == [
        *("code.decode-spare:", "code.decode-0:", "code.decode-spare:"),
        "done:",
    ]
    after = processes(two)
    assert pids(after["chat"]) == pids(before["chat"])
    new, old = pids(after["code"]), pids(before["code"])
    assert new.keys() == old.keys()
    assert {name for name in new if new[name] != old[name]} == {"code.decode-0"}


def test_a_worker_that_dies_is_restarted_alone(two: FleetProcess) -> None:
    answer, before = complete(two, "code"), processes(two)
    victim = pids(before["code"])["code.decode-0"]
    os.kill(victim, signal.SIGKILL)
    assert complete(two, "code") == answer
    after = processes(two)
    new = pids(after["code"])["code.decode-0"]
    assert new not in (victim, None)
    assert pids(after["chat"]) == pids(before["chat"])
    assert pids(after["code"]) == pids(before["code"]) | {"code.decode-0": new}
