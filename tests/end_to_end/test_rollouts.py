"""Tests of `triolet rollout` on a running fleet with two servers: users move to a new version
step by step, and a rollback moves them back.

Each takes over a second: they need supervisor, control, servers and workers together.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, running_fleet, wait_until
from .test_model_switch import MEMORY, versions

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["versions"]

pytestmark = pytest.mark.slow

USERS = 12
QUICK = (
    "--steps",
    "40,100",
    "--bake",
    "1s",
    "--no-golden",
    "--min-requests",
    "1",
    "--min-buckets",
    "1",
)


HELD = ("--min-requests", "1000000", "--retention", "1h")
"""No step ends by itself."""


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, versions: dict[str, str]
) -> Iterator[FleetProcess]:
    """A separate fleet, because its model changes."""
    log = tmp_path_factory.mktemp("rollouts") / "fleet.log"
    given = ("chat=chat:v1", "--store", versions["store"], "--servers", "2")
    memory = ("--set", f"control.memory_bytes={MEMORY}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))  # for the audit log
        with running_fleet(log, *given, *memory, *WATCHED, *PATIENT, at_rest=True) as one:
            wait_until(lambda: bool(list(one.log_events("ready"))), PATIENCE_S, "the fleet is up")
            yield one


def rollout(fleet: FleetProcess, *words: str, code: int = 0) -> str:
    """Run `triolet rollout …` and return its output."""
    ended, lines = fleet.run_triolet("rollout", *words)
    assert ended == code, lines
    return "".join(f"{line}\n" for line in lines)


def shown(fleet: FleetProcess) -> dict[str, Any]:
    [found] = json.loads(rollout(fleet, "status", "chat", "--json"))
    return dict(found)


def until(fleet: FleetProcess, phase: str, step: int) -> None:
    wait_until(
        lambda: (shown(fleet)["phase"], shown(fleet)["step"]) == (phase, step),
        PATIENCE_S,
        f"{phase}, step {step}",
    )


def version_of(fleet: FleetProcess, user: str) -> str:
    """Return the version that answers a user."""
    asked = {"model": "chat", "prompt": "Once", "max_tokens": 2, "user": user}
    answer = fleet.client.post("/v1/completions", json=asked).raise_for_status()
    assert answer.json()["model"] == "chat"
    return answer.headers["x-triolet-model-version"]


def answers(fleet: FleetProcess) -> bool:
    """Return whether a server answers a user."""
    with suppress(httpx2.HTTPError):
        return bool(version_of(fleet, "user 0"))
    return False


def by_user(fleet: FleetProcess) -> dict[str, str]:
    return {f"user {number}": version_of(fleet, f"user {number}") for number in range(USERS)}


def test_users_move_in_steps_and_back_without_a_failed_request(fleet: FleetProcess) -> None:
    old = version_of(fleet, "user 0")
    started = rollout(fleet, "start", "chat", "--to", "chat:v2", *QUICK, "--retention", "1h")
    assert started.startswith("chat: preparing")
    until(fleet, "canary", 1)
    rollout(fleet, "pause", "chat")
    until(fleet, "paused", 1)
    first = by_user(fleet)
    assert len({*first.values()}) == 2
    assert by_user(fleet) == first, "each user stays"
    killed = fleet.pids("server")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: answers(fleet), PATIENCE_S, "a server is back")
    assert by_user(fleet) == first, "servers that start wait for the route"
    wait_until(
        lambda: len({*fleet.pids("server")} - {*killed}) == 2, PATIENCE_S, "both servers are back"
    )
    assert "409" not in rollout(fleet, "promote", "chat")
    until(fleet, "canary", 2)
    assert {*by_user(fleet).values()} == {*first.values()} - {old}
    rollout(fleet, "rollback", "chat")
    assert {*by_user(fleet).values()} == {old}
    wait_until(lambda: shown(fleet)["is_over"], PATIENCE_S, "one version is left")
    assert len(fleet.pids("decode")) == 1


def test_a_version_with_other_sampling_defaults_has_the_workers_of_the_stable_one(
    fleet: FleetProcess,
) -> None:
    asked = {"model": "chat", "prompt": "Once upon a time " * 8, "max_tokens": 1}

    def cached() -> int:
        answer = fleet.client.post("/v1/completions", json=asked).raise_for_status().json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    kept = cached()
    assert kept > 0
    pids, old = fleet.pids("prefill") + fleet.pids("decode"), version_of(fleet, "user 0")
    for order, ends in (("rollback", "rolled_back"), ("promote", "promoted")):
        rollout(fleet, "start", "chat", "--to", "chat:warm", *QUICK, *HELD)
        until(fleet, "canary", 1)
        assert len({*by_user(fleet).values()}) == 2
        rollout(fleet, "promote", "chat")
        until(fleet, "canary", 2)
        assert old not in by_user(fleet).values()
        rollout(fleet, order, "chat")
        wait_until(lambda: shown(fleet)["is_over"], PATIENCE_S, "one version is left")
        assert shown(fleet)["phase"] == ends
        assert [*{*by_user(fleet).values()} - {old}] == [shown(fleet)["candidate_digest"]] * (
            ends == "promoted"
        )
        assert fleet.pids("prefill") + fleet.pids("decode") == pids
        assert cached() == kept
    assert [one["id"] for one in fleet.client.get("/v1/models").json()["data"]] == ["chat"]


def test_a_version_that_serves_well_is_promoted_by_its_requests(fleet: FleetProcess) -> None:
    old = version_of(fleet, "user 0")
    rollout(fleet, "start", "chat", "--to", "chat:v2", *QUICK)
    wait_until(
        lambda: bool(by_user(fleet)) and shown(fleet)["is_over"], PATIENCE_S, "one version is left"
    )
    ended = shown(fleet)
    assert ended["phase"] == "promoted", ended
    steps = [(note["phase"], note["step"]) for note in ended["history"]]
    assert steps == [("canary", 1), ("canary", 2), ("promoted", 2)]
    assert old not in by_user(fleet).values()
    assert len(fleet.pids("decode")) == 1
    said = rollout(fleet, "pause", "chat", code=1)
    assert "is promoted" in said
