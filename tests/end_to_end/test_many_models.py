"""Tests of two versions of the demo model behind one server: tokens are each version's own, and one
version is stopped and started while the other serves.

Takes seconds for five processes. Tests with fakes do not cover `server.main` with two models, or
two checkpoints on the wire.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from ops.models.model_directory import demo_model_path
from tests import forked
from tests.engine.driver import generate, ids, open_engine
from triolet.config import Dtype, EngineConfig
from triolet.status import ServerReady, WorkerReady, parse_report
from triolet.units import MIB

from .fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DIGESTS = {name: "sha256:" + digit * 64 for name, digit in (("old", "0"), ("new", "1"))}
NUM_TOKENS = 16
PROMPTS = [[3 + (7 * i + 31 * n) % 250 for i in range(20 + 9 * n)] for n in range(4)]
ENGINE = EngineConfig(kv_pool_bytes=4 * MIB, dtype=Dtype.FLOAT32)
NOISE = 0.2
"""Relative change of each weight, so that the versions differ."""
WORKER = """
import sys
from triolet.config import Dtype, EngineConfig, LinkConfig, WorkerConfig
from {role}.worker import main
from tests.worker.patience import unhurried
_, name, model, digest, sockets = sys.argv
main(WorkerConfig(
    name=name + ".{role}-0",
    model_dir=model,
    model_digest=digest,
    compute_digest=digest,
    control_address=f"ipc://{{sockets}}/{{name}}.{role}",
    kv_address=f"ipc://{{sockets}}/{{name}}.kv" if "{role}" == "decode" else None,
    engine=EngineConfig(kv_pool_bytes=4 << 20, threads=1, dtype=Dtype.FLOAT32),
    link=unhurried(LinkConfig()),
))
"""
SERVER = """
import sys
from server.main import main
from triolet.config import LinkConfig, LocalPrefill, RoutingConfig, ServerConfig
from triolet.config.models import ServedModelConfig
from tests.worker.patience import unhurried
sockets, *rest = sys.argv[1:]
main(ServerConfig(
    port=0,
    link=unhurried(LinkConfig()),
    routing=RoutingConfig(local_prefill=LocalPrefill.OFF),
    models=tuple(
        ServedModelConfig(
            name=name, model_dir=model, digest=digest, compute_digest=digest,
            aliases=(name + "-alias",),
            prefill_addresses=(f"ipc://{sockets}/{name}.prefill",),
            decode_addresses=(f"ipc://{sockets}/{name}.decode",),
        )
        for name, model, digest in zip(rest[::3], rest[1::3], rest[2::3])
    ),
))
"""


def start(program: str, *args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, *args]
    return forked.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def first_report(process: subprocess.Popen[bytes], kind: type[Any]) -> Any:  # noqa: ANN401
    """Return the report of a process when it is ready."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        if isinstance(report := parse_report(line), kind):
            return report
        lines.append(line.decode())
    raise AssertionError("".join(lines)[-3000:])


@dataclass
class Models:
    """Both versions, their workers and the server."""

    directories: dict[str, Path]
    sockets: Path
    workers: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)
    url: str = ""

    def start_workers(self, name: str) -> None:
        """Start the workers of one version."""
        args = [name, str(self.directories[name]), DIGESTS[name], str(self.sockets)]
        programs = [WORKER.format(role=role) for role in ("prefill", "decode")]
        self.workers[name] = [start(program, *args) for program in programs]

    def wait_ready(self, name: str) -> None:
        """Wait until the workers of one version are ready."""
        for worker in self.workers[name]:
            first_report(worker, WorkerReady)

    def stop_workers(self, name: str) -> None:
        """Stop them cleanly."""
        for worker in self.workers[name]:
            worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=PATIENCE_S)

    def states(self) -> dict[str, str]:
        """Return the server's report about each name."""
        cards = httpx2.get(f"{self.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        return {card["id"]: card["state"] for card in cards}

    def ask(self, name: str, prompt: list[int]) -> httpx2.Response:
        """Request a completion of tokens."""
        body = {"model": name, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        return httpx2.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)


def noisy_copy(model: Path, copy: Path) -> Path:
    """Return a directory with a model that has slightly changed weights."""
    shutil.copytree(model, copy)
    weights = load_file(copy / "model.safetensors")
    numbers = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        noise = 1 + NOISE * torch.randn(tensor.shape, generator=numbers)
        weights[name] = (tensor * noise).to(tensor.dtype)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Models]:
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)
    demo = demo_model_path()
    directories = {"old": demo, "new": noisy_copy(demo, tmp_path / "new")}
    models = Models(directories, sockets)
    rest = [part for name in DIGESTS for part in (name, str(directories[name]), DIGESTS[name])]
    server = start(SERVER, str(sockets), *rest)
    try:
        for name in DIGESTS:
            models.start_workers(name)
        for name in DIGESTS:
            models.wait_ready(name)
        models.url = first_report(server, ServerReady).url
        yield models
    finally:
        for process in (server, *(one for two in models.workers.values() for one in two)):
            process.kill()
            process.communicate()


def test_each_version_answers_with_its_own_tokens_and_goes_and_comes_alone(models: Models) -> None:
    expected = {
        name: [ids(one) for one in generate(open_engine(path, ENGINE), PROMPTS, NUM_TOKENS)]
        for name, path in models.directories.items()
    }
    differing = [a != b for a, b in zip(expected["old"], expected["new"], strict=True)]
    assert all(differing), "the versions can be told apart by every prompt"
    wait_until(lambda: set(models.states().values()) == {"serving"}, PATIENCE_S, "both serve")
    assert list(models.states()) == ["old", "old-alias", "new", "new-alias"]
    asked = [(name, number) for number in range(len(PROMPTS)) for name in ("old", "new-alias")]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda one: models.ask(one[0], PROMPTS[one[1]]), asked))
    for (name, number), answer in zip(asked, answers, strict=True):
        own_name = name.removesuffix("-alias")
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == expected[own_name][number]
        assert answer.json()["model"] == own_name
        assert answer.headers["x-triolet-model-version"] == DIGESTS[own_name]
        assert answer.json()["system_fingerprint"] == f"fp_{DIGESTS[own_name][7:19]}"
    audit = httpx2.get(f"{models.url}/fleet/audit", timeout=PATIENCE_S).json()
    assert audit["violations"] == []
    assert audit["server"]["accepted"] == len(asked)
    names = [f"{name}.{role}-0" for name in DIGESTS for role in ("prefill", "decode")]
    assert [view["name"] for view in audit["workers"]] == names

    models.stop_workers("new")
    wait_until(lambda: models.states()["new"] == "staged", PATIENCE_S, "the new one is gone")
    answer = models.ask("old", PROMPTS[0])
    assert answer.json()["choices"][0]["token_ids"] == expected["old"][0]
    ready = httpx2.get(f"{models.url}/health/ready", timeout=PATIENCE_S)
    assert (ready.status_code, ready.json()["models"][1]["state"]) == (200, "staged")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(models.ask, "new", PROMPTS[1])
        models.start_workers("new")
        answer = waiting.result()
    assert answer.json()["choices"][0]["token_ids"] == expected["new"][1], "it waited for workers"
