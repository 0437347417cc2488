"""Tests of switching a model of a running fleet to another version: no stream fails, and each
stream has tokens of a single version.

Each takes over a second: they need supervisor, control, servers and workers together.
"""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from shutil import copytree
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from ops.cli import main
from ops.models.model_directory import demo_model_path

from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, running_fleet, wait_until
from .test_residency import PROMPT, body, control_pid, order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

LONG_TOKENS = 200
NUM_STREAMS, NUM_ROUNDS = 6, 2
WHOLE_STREAMS, WHOLE_ROUNDS = 50, 10
"""Rounds with `--whole`."""
MEMORY = "1GiB"
"""Memory for the workers of both versions; each takes a fifth of it."""


class Answer(NamedTuple):
    """A stream that was read to its end."""

    version: str
    text: str


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return import_versions(tmp_path_factory.mktemp("versions"))


def import_versions(folder: Path) -> dict[str, str]:
    """Import versions of a model; return the store's path as `store`. `v2` has other weights than
    `v1`, `warm` other sampling defaults."""
    other = copytree(demo_model_path(), folder / "other")
    weights = load_file(other / "model.safetensors")
    changed = {name: tensor.roll(1, 0).contiguous() for name, tensor in weights.items()}
    save_file(changed, other / "model.safetensors")
    sampling = folder / "sampling.json"
    sampling.write_text(json.dumps({"temperature": 0.0}))
    store = ("--store", str(folder / "store"))
    for tag, path, more in (
        ("v1", str(demo_model_path()), ()),
        ("v2", str(other), ()),
        ("warm", str(demo_model_path()), ("--sampling", str(sampling))),
    ):
        assert main(("model", "import", path, "--name", "chat", "--tag", tag, *more, *store)) == 0
    return {"store": str(folder / "store")}


@contextmanager
def fleet_of(
    tmp_path_factory: pytest.TempPathFactory, versions: dict[str, str]
) -> Iterator[FleetProcess]:
    log = tmp_path_factory.mktemp("switch") / "fleet.log"
    given = (
        "chat:v1",  # settings of control name it
        "--store",
        versions["store"],
        "--set",
        f"control.memory_bytes={MEMORY}",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))  # for the audit log
        with running_fleet(log, *given, *WATCHED, *PATIENT, at_rest=True) as one:
            wait_until(lambda: bool(list(one.log_events("ready"))), PATIENCE_S, "the fleet is up")
            yield one


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, versions: dict[str, str]
) -> Iterator[FleetProcess]:
    """A separate fleet, because its model changes, and control and workers are killed."""
    with fleet_of(tmp_path_factory, versions) as one:
        yield one


def streamed(fleet: FleetProcess) -> Answer:
    """Return the version and the text of a long answer."""
    text = ""
    asked = body("chat", LONG_TOKENS) | {"stream": True}
    url = f"{fleet.url}/v1/completions"
    with httpx2.stream("POST", url, json=asked, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                assert chunk["model"] == "chat"
                text += "".join(choice["text"] for choice in chunk["choices"])
        return Answer(answer.headers["x-triolet-model-version"], text)


def killed(fleet: FleetProcess, number: int) -> Callable[[], None]:
    """Return a function that kills another process of the fleet in each round."""

    def kill() -> None:
        match number % 3:
            case 0:
                os.kill(control_pid(fleet), signal.SIGKILL)
            case 1:  # of the version that serves
                os.kill(min(fleet.pids("decode")), signal.SIGKILL)
            case 2:
                os.kill(max(fleet.pids("prefill")), signal.SIGKILL)

    return kill


def test_streams_go_on_while_a_name_moves_to_another_version(
    fleet: FleetProcess, request: pytest.FixtureRequest
) -> None:
    is_whole = request.config.getoption("whole")
    num_streams = WHOLE_STREAMS if is_whole else NUM_STREAMS
    num_rounds = WHOLE_ROUNDS if is_whole else NUM_ROUNDS
    is_over = Event()

    def stream_until_over() -> list[Answer]:
        answers = []
        while not is_over.is_set():
            answers.append(streamed(fleet))
        return answers

    expected = dict([streamed(fleet)])
    with ThreadPoolExecutor(num_streams + 1) as threads:
        streams = [threads.submit(stream_until_over) for _ in range(num_streams)]
        try:
            for number in range(num_rounds):
                before = len(fleet.pids("decode"))
                version = f"chat:v{2 - number % 2}"
                switch = threads.submit(order, fleet, "switch", "chat", "--to", version)
                wait_until(
                    lambda before=before: len(fleet.pids("decode")) > before,
                    PATIENCE_S,
                    "the version that comes has workers",
                )
                killed(fleet, number)()
                said = switch.result(PATIENCE_S)
                assert "chat is switched" in said
                expected |= dict([streamed(fleet)])
        finally:
            is_over.set()
        answers = [answer for stream in streams for answer in stream.result(PATIENCE_S)]
    assert len(expected) == 2
    assert len({*expected.values()}) == 2, "tokens tell the versions apart"
    assert len(answers) >= num_streams * num_rounds
    for answer in answers:
        assert answer.text == expected[answer.version]
    assert {one["id"] for one in fleet.client.get("/v1/models").json()["data"]} == {"chat"}
    assert len(fleet.pids("prefill")) == len(fleet.pids("decode")) == 1
    fleet.wait_all_blocks_free()


def test_other_sampling_defaults_need_no_other_workers_and_cost_no_kv_block(
    fleet: FleetProcess,
) -> None:
    """After the switches above, the fleet has version `v1` again."""
    asked = {"model": "chat", "prompt": PROMPT * 8, "max_tokens": 16, "ignore_eos": True}

    def answer(**more: float) -> tuple[str, int]:
        given = fleet.client.post("/v1/completions", json=asked | more).raise_for_status().json()
        details = given["usage"]["prompt_tokens_details"]
        return str(given["choices"][0]["text"]), int(details["cached_tokens"])

    greedy, _ = answer(temperature=0.0)
    _, cached = answer(temperature=0.0)
    pids, digest = fleet.pids("prefill") + fleet.pids("decode"), streamed(fleet).version
    assert len({answer()[0] for _ in range(4)}) > 1, "its default draws tokens"
    assert "chat is switched" in order(fleet, "switch", "chat", "--to", "chat:warm")
    assert streamed(fleet).version != digest
    assert fleet.pids("prefill") + fleet.pids("decode") == pids
    assert cached > 0
    assert [answer() for _ in range(4)] == [(greedy, cached)] * 4
    assert [model["id"] for model in fleet.client.get("/v1/models").json()["data"]] == ["chat"]


def test_a_version_that_cannot_be_had_leaves_the_one_that_answers(fleet: FleetProcess) -> None:
    before = streamed(fleet)
    said = order(fleet, "switch", "chat", "--to", "/nowhere/at/all", code=1)
    assert "model directory /nowhere/at/all does not exist" in said
    assert "has no chat:v9" in order(fleet, "switch", "chat", "--to", "chat:v9", code=1)
    assert "no model is called 'none'" in order(fleet, "switch", "none", "--to", "chat:v1", code=1)
    assert streamed(fleet) == before
    assert "is sleeping" in order(fleet, "sleep", "chat")
    assert streamed(fleet) == before
    assert "is sleeping" in order(fleet, "sleep", "chat")
    order(fleet, "load", "chat")
    assert "chat" in "".join(fleet.run_triolet("model", "ps")[1])
