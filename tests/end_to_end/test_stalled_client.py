"""Tests that a client that stops reading loses its stream in time, without affecting others."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from .conftest import STALL_TIMEOUT_S
from .fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

OTHERS = 7
MAX_TOKENS = 300
SMALL_BUFFER = 4096


def request_bytes(fleet: FleetProcess, max_tokens: int) -> bytes:
    message = {"role": "user", "content": "Tell me a story."}
    # With logprobs each token takes a kilobyte: the answer exceeds the kernel's buffers.
    options = {"ignore_eos": True, "logprobs": True, "top_logprobs": 20, "stream": True}
    body = json.dumps({"messages": [message], "max_tokens": max_tokens, **options}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{fleet.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def stream_to_the_end(fleet: FleetProcess) -> str:
    """Read one whole stream and return how it finished."""
    body = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    reason, last = "", ""
    with fleet.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                reason = choices[0]["finish_reason"] or reason
            last = line or last
    assert last == "data: [DONE]"
    return reason


@pytest.mark.promise
def test_a_client_that_stops_reading_is_ended_while_others_stream_on(fleet: FleetProcess) -> None:
    stalled_before = fleet.metric("triolet_requests_total", outcome="stalled")
    with socket.socket() as silent, ThreadPoolExecutor(OTHERS) as threads:
        # A small receive buffer, because data buffered by the kernel counts as read.
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        silent.connect(("127.0.0.1", fleet.port))
        silent.sendall(request_bytes(fleet, max_tokens=900))
        began = time.monotonic()
        others = [threads.submit(stream_to_the_end, fleet) for _ in range(OTHERS)]
        assert [other.result(PATIENCE_S) for other in others] == ["length"] * OTHERS
        wait_until(
            lambda: fleet.metric("triolet_requests_total", outcome="stalled") > stalled_before,
            STALL_TIMEOUT_S + PATIENCE_S,
            "the silent client's stream was ended",
        )
        assert time.monotonic() - began > STALL_TIMEOUT_S
        fleet.wait_all_blocks_free()
