"""Tests that a paused server only delays its streams, and that no prompt is quarantined for it."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import paced
from .fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from .fleet_process import FleetProcess

pytestmark = [pytest.mark.slow, pytest.mark.long]

STREAMS = 6
NUM_TOKENS = 48
"""Enough tokens that streams last until the server is stopped."""
WINDOW = ("--set", "server.token_window=16")
"""Small window, so that workers cannot send most of an answer before they miss the server."""
LEASES = (
    "--set",
    "link.peer_timeout_s=5.5",
    "--set",
    "link.progress_timeout_s=8",
    "--set",
    "link.lease_ttl_s=6",
)
"""Longer than a busy machine may pause a worker."""
STOPPED_S = 7.0
"""Longer than leases last."""


def state_of(pid: int) -> str:
    """Return the kernel's state letter of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def read_stream(fleet: FleetProcess, number: int) -> tuple[str, list[int], list[str]]:
    """Return the text, tokens and finish reasons of one stream."""
    body = {
        "prompt": f"Tell me a story about {number} dragons.",
        "stream": True,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "seed": number,
        "return_token_ids": True,
    }
    text, ends = "", []
    token_ids: list[int] = []
    with fleet.client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            event: dict[str, Any] = json.loads(data)
            assert "error" not in event, event
            choice = event["choices"][0]
            text += choice["text"]
            token_ids += choice.get("token_ids") or []
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, token_ids, ends


def test_streams_survive_a_server_that_is_stopped_for_longer_than_its_leases(
    start_fleet: Callable[..., FleetProcess],
) -> None:
    fleet = start_fleet(*LEASES, *WINDOW, "--decode", "2", command=paced.COMMAND)
    (server,) = fleet.pids("server")
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(read_stream, fleet, number) for number in range(STREAMS)]
        first_tokens = "triolet_time_to_first_token_seconds_count"
        wait_until(
            lambda: fleet.metric(first_tokens) >= STREAMS / 2, PATIENCE_S, "half of them run"
        )
        os.kill(server, signal.SIGSTOP)
        try:
            wait_until(lambda: state_of(server) == "T", PATIENCE_S, "the server stands still")
            # A real pause: the passing of this time is what is tested.
            time.sleep(STOPPED_S)
        finally:
            os.kill(server, signal.SIGCONT)
        disturbed = [stream.result(2 * PATIENCE_S) for stream in streams]
        again = [threads.submit(read_stream, fleet, number) for number in range(STREAMS)]
        undisturbed = [stream.result(2 * PATIENCE_S) for stream in again]

    assert disturbed == undisturbed
    assert [ends for _, _, ends in disturbed] == [["length"]] * STREAMS
    assert fleet.metric("triolet_server_paused_seconds_total") >= STOPPED_S - 0.5
    failed = {s.labels["cause"] for s in fleet.samples("triolet_attempts_failed_total") if s.value}
    assert failed == {"server_paused"}
    # A client may read the end before the server has recorded it.
    wait_until(
        lambda: fleet.metric("triolet_requests_total", outcome="length") == 2 * STREAMS,
        PATIENCE_S,
        "each stream has ended once",
    )
