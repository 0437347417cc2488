"""The death of a worker costs a pause: streams go on, the supervisor starts another life."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from .fleet_process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

STREAMS = 20
MAX_TOKENS = 200


def read_stream(fleet: FleetProcess, number: int) -> tuple[str, list[str]]:
    """Read one stream; return its text and its terminal events."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me a story about {number} dragons."}],
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": number,
    }
    text, terminals = "", []
    with fleet.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                terminals.append(data)
                continue
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                terminals.append(event["error"]["code"])
                continue
            choice = event["choices"][0]
            text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                terminals.append(choice["finish_reason"])
    return text, terminals


def read_all(fleet: FleetProcess, kill: Callable[[], None]) -> list[tuple[str, list[str]]]:
    """Read all streams at once, and call `kill` when all of them run."""
    with ThreadPoolExecutor(STREAMS) as threads:
        began = fleet.metric("triolet_time_to_first_token_seconds_count")
        streams = [threads.submit(read_stream, fleet, number) for number in range(STREAMS)]
        wait_until(
            lambda: (
                fleet.metric("triolet_time_to_first_token_seconds_count") - began >= STREAMS / 2
            ),
            30.0,
            "half of the streams run",
        )
        kill()
        return [stream.result(90) for stream in streams]


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_streams_survive_the_death_of_a_worker(
    role: str, start_fleet: Callable[..., FleetProcess]
) -> None:
    fleet = start_fleet()
    undisturbed = read_all(fleet, kill=lambda: None)
    assert all(terminals == ["length", "[DONE]"] for _, terminals in undisturbed)
    (victim,) = fleet.pids(role)

    disturbed = read_all(fleet, kill=lambda: os.kill(victim, signal.SIGKILL))

    wait_until(lambda: fleet.pids(role) not in ([], [victim]), 30.0, f"a new {role} worker")
    assert disturbed == undisturbed
    fleet.wait_all_blocks_free()


def test_a_death_costs_each_stream_one_attempt(start_fleet: Callable[..., FleetProcess]) -> None:
    fleet = start_fleet("--decode", "2")
    victim = min(fleet.pids("decode"))

    streams = read_all(fleet, kill=lambda: os.kill(victim, signal.SIGKILL))

    assert all(terminals == ["length", "[DONE]"] for _, terminals in streams)
    failed = {s.labels["cause"]: s.value for s in fleet.samples("triolet_attempts_failed_total")}
    # "unknown" is what a worker says of an attempt that a heartbeat names before its RESERVE came.
    assert "unknown" not in failed
    assert failed["decode_lost"] >= 1
