"""Tests of sleeping and waking models of a running fleet, also when control is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest

from ops import running_fleets
from tests.ops.control.fleets import admin
from transport.control_protocol import ADMIN_SOCKET

from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, running_fleet, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was"
LONG_TOKENS = 200


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """A separate fleet, because its control is killed; `code` does not start with it."""
    log = tmp_path_factory.mktemp("residency") / "fleet.log"
    models = ("chat=demo", "code=demo", "--set", "models.code.start=false")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))  # for the audit log
        with running_fleet(log, *models, *WATCHED, *PATIENT, at_rest=True) as one:
            wait_until(lambda: bool(list(one.log_events("ready"))), PATIENCE_S, "the fleet is up")
            yield one
            order(one, "load", "code")  # the audit includes existing workers only


def body(model: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def complete(fleet: FleetProcess, model: str, max_tokens: int = 8) -> str:
    answer = fleet.client.post("/v1/completions", json=body(model, max_tokens))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def folder_of(fleet: FleetProcess) -> Path:
    """Return the fleet's private directory."""
    (found,) = [one for one in running_fleets.running_fleets() if one.note.port == fleet.port]
    return found.directory


def models(fleet: FleetProcess) -> dict[str, dict[str, Any]]:
    """Return control's report about each model."""
    with admin(folder_of(fleet)) as client:
        return {one["name"]: one for one in client.get("/admin/models").json()["models"]}


ROUNDED_S: Final = 0.001
"""Tolerance: the admin API rounds worker-seconds to milliseconds, metrics do not."""


def state(fleet: FleetProcess, name: str) -> str:
    return str(models(fleet)[name]["state"])


def worker_seconds(fleet: FleetProcess, name: str) -> float:
    """Return the metric of all versions of a model."""
    begin = f'triolet_worker_seconds_total{{model="{name}",'
    lines = httpx2.get(f"{fleet.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(begin))


def order(fleet: FleetProcess, action: str, name: str, *options: str, code: int = 0) -> str:
    """Run `triolet model …` and return its output."""
    ended, lines = fleet.run_triolet("model", action, name, *options)
    assert ended == code, lines
    return "".join(f"{line}\n" for line in lines)


def test_a_request_wakes_its_model_each_time(fleet: FleetProcess) -> None:
    assert state(fleet, "code") == "staged"
    expected = complete(fleet, "chat")
    assert complete(fleet, "code") == expected
    wait_until(lambda: state(fleet, "code") == "serving", PATIENCE_S, "control knows")
    shown = models(fleet)["code"]
    assert shown["bytes"] > 0
    assert shown["last_used_s_ago"] is not None
    assert sum(shown["worker_seconds"].values()) > 0
    wait_until(lambda: worker_seconds(fleet, "code") > 0, PATIENCE_S, "the server was told")
    told = worker_seconds(fleet, "code")
    assert told <= sum(models(fleet)["code"]["worker_seconds"].values()) + ROUNDED_S
    assert "code is sleeping" in order(fleet, "sleep", "code")
    assert {one["id"]: one["state"] for one in listed(fleet)} == {
        "chat": "serving",
        "code": "sleeping",
    }
    assert complete(fleet, "code") == expected
    assert "code is staged" in order(fleet, "unload", "code")
    assert "code is ready" in order(fleet, "load", "code")
    assert " already" in order(fleet, "wake", "code")
    assert "no model is called 'none'; this fleet has" in order(fleet, "load", "none", code=1)


def listed(fleet: FleetProcess) -> list[dict[str, Any]]:
    return list(fleet.client.get("/v1/models").json()["data"])


def test_clients_do_not_notice_that_control_is_killed_amid_a_load(fleet: FleetProcess) -> None:
    whole = complete(fleet, "chat", LONG_TOKENS)
    order(fleet, "sleep", "code")
    before = {one["name"]: one["pid"] for one in models(fleet)["chat"]["workers"]}
    pid = control_pid(fleet)
    text = ""
    with (
        ThreadPoolExecutor(1) as threads,
        fleet.client.stream(
            "POST", "/v1/completions", json=body("chat", LONG_TOKENS) | {"stream": True}
        ) as stream,
    ):
        # Without a waiting client: a started operation continues.
        with admin(folder_of(fleet)) as client:
            assert client.post("/admin/models/code/load").status_code == 202
        os.kill(pid, signal.SIGKILL)
        asked = threads.submit(complete, fleet, "code")
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
        assert whole.startswith(asked.result(PATIENCE_S))
    assert text == whole
    wait_until(
        lambda: is_back(fleet) and state(fleet, "code") == "serving", PATIENCE_S, "code serves"
    )
    assert {one["name"]: one["pid"] for one in models(fleet)["chat"]["workers"]} == before


def is_back(fleet: FleetProcess) -> bool:
    """Return whether control answers."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(folder_of(fleet) / ADMIN_SOCKET)) == 0


def control_pid(fleet: FleetProcess) -> int:
    """Return the pid of the current control process."""
    begun = [one for one in fleet.log_events("process_started") if one["name"] == "control"]
    return int(begun[-1]["pid"])
