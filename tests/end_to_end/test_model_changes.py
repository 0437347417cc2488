"""Tests of adding and dropping models of a running fleet: other streams continue, and nothing
leaks.

Each takes over a second: they need supervisor, control, servers and workers together.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.ops.control.fleets import admin

from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, running_fleet, wait_until
from .test_residency import body, complete, control_pid, folder_of, listed, order

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

LONG_TOKENS = 200


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """A separate fleet, because its models change, and control and server are killed."""
    log = tmp_path_factory.mktemp("changes") / "fleet.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))  # for the audit log
        with running_fleet(log, "chat=demo", *WATCHED, *PATIENT, at_rest=True) as one:
            wait_until(lambda: bool(list(one.log_events("ready"))), PATIENCE_S, "the fleet is up")
            yield one


def asked(fleet: FleetProcess, method: str, path: str, **given: Any) -> httpx2.Response:  # noqa: ANN401
    """Send one request to the admin API."""
    with admin(folder_of(fleet)) as client:
        return client.request(method, path, **given)


def names(fleet: FleetProcess) -> set[str]:
    return {one["id"] for one in listed(fleet)}


def streamed(fleet: FleetProcess, model: str, begun: Event) -> str:
    """Stream a long answer and return its text; set `begun` at the first piece."""
    text = ""
    with httpx2.stream(
        "POST",
        f"{fleet.url}/v1/completions",
        json=body(model, LONG_TOKENS) | {"stream": True},
        timeout=PATIENCE_S,
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                [choice] = httpx2.Response(200, text=line[6:]).json()["choices"]
                text += choice["text"]
                begun.set()
    return text


def test_a_model_is_added_beside_streams_though_control_is_killed(fleet: FleetProcess) -> None:
    whole = complete(fleet, "chat", LONG_TOKENS)
    before = set(fleet.pids("prefill") + fleet.pids("decode"))
    begun = Event()
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(streamed, fleet, "chat", begun)
        assert begun.wait(PATIENCE_S)
        given = {"name": "code", "ref": "demo", "aliases": ["coder"]}
        answer = asked(fleet, "POST", "/admin/models", json=given)
        assert answer.status_code == 202, answer.text
        os.kill(control_pid(fleet), signal.SIGKILL)
        wait_until(lambda: "code" in names(fleet), PATIENCE_S, "the model is there")
        assert stream.result() == whole
    assert before < set(fleet.pids("prefill") + fleet.pids("decode"))
    assert names(fleet) == {"chat", "code", "coder"}
    assert complete(fleet, "coder", LONG_TOKENS) == whole
    assert fleet.metric("triolet_requests_total", model="code", outcome="length") == 1
    ended = f"/admin/operations/{answer.json()['id']}"
    wait_until(
        lambda: asked(fleet, "GET", ended).json()["status"] == "done",
        PATIENCE_S,
        "control has ended the operation that it took up again",
    )
    assert "model code exists already" in order(fleet, "add", "code=demo", code=1)


def test_a_server_that_is_killed_has_every_model_again(fleet: FleetProcess) -> None:
    [pid] = fleet.pids("server")
    os.kill(pid, signal.SIGKILL)
    fleet.hang_up()
    wait_until(lambda: fleet.pids("server") not in ([], [pid]), PATIENCE_S, "another server runs")
    fleet.wait_ready()
    assert names(fleet) == {"chat", "code", "coder"}
    assert complete(fleet, "code") == complete(fleet, "chat")


def test_a_model_is_dropped_once_its_stream_has_ended(fleet: FleetProcess) -> None:
    whole = complete(fleet, "chat", LONG_TOKENS)
    begun = Event()
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(streamed, fleet, "code", begun)
        assert begun.wait(PATIENCE_S)
        said = order(fleet, "drop", "code")
        assert stream.result(PATIENCE_S) == whole
    assert "code is dropped" in said
    assert names(fleet) == {"chat"}
    answer = fleet.client.post("/v1/completions", json=body("code", 4))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "there is chat" in answer.json()["error"]["message"]
    assert [one.labels for one in fleet.metrics() if "code" in one.labels.values()] == []
    assert len(fleet.pids("prefill")) == len(fleet.pids("decode")) == 1
    fleet.wait_all_blocks_free()
    assert "chat is the only model" in order(fleet, "drop", "chat", code=1)
    assert names(fleet) == {"chat"}


def test_a_model_that_cannot_be_is_not_there_and_an_added_one_may_sleep(
    fleet: FleetProcess,
) -> None:
    said = order(fleet, "add", "bad=/nowhere/at/all", code=1)
    assert "model directory /nowhere/at/all does not exist" in said
    order(fleet, "add", "code=demo", "--asleep")
    states = {one["id"]: one["state"] for one in listed(fleet)}
    assert states == {"chat": "serving", "code": "staged"}
    assert complete(fleet, "code") == complete(fleet, "chat")
    order(fleet, "drop", "chat")
    assert names(fleet) == {"code"}
    assert fleet.client.get("/health/ready").json()["model"] == "code"
