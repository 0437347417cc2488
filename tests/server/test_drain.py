"""Tests of SIGTERM to a server process, step by step, as clients see it."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import httpx2
import pytest
import websocket

from .test_handover import PATIENCE_S, server

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

DRAIN_S = 5.0
"""Time for all steps of a drain, on a busy machine."""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
GOING_AWAY = 1001


def events_of(client: websocket.WebSocket) -> Iterator[dict[str, object]]:
    """Yield the events of a socket until it is closed; the last one contains the close code."""
    while True:
        opcode, data = client.recv_data()
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            yield {"type": "closed", "code": int.from_bytes(data[:2], "big")}
            return
        yield json.loads(data)


@pytest.mark.long
def test_a_server_that_is_told_to_end_keeps_every_promise(
    tmp_path: Path, port: socket.socket
) -> None:
    address = f"127.0.0.1:{port.getsockname()[1]}"
    with (
        server(tmp_path, port, "demo", drain_s=DRAIN_S, handover_s=0.0) as process,
        httpx2.Client(base_url=f"http://{address}", timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT) as stream,
    ):
        lines = stream.iter_lines()
        assert "assistant" in next(lines)
        idle, busy = (
            websocket.create_connection(f"ws://{address}/v1/responses", timeout=PATIENCE_S)
            for _ in range(2)
        )
        busy.send(json.dumps({"type": "response.create", "input": "hi", "store": False}))
        of_busy = events_of(busy)
        assert next(of_busy)["type"] == "response.created"

        process.send_signal(signal.SIGTERM)

        # WebSockets are notified at once; idle ones are closed.
        said = list(events_of(idle))
        assert [event["type"] for event in said] == ["notice", "closed"]
        assert (said[0]["code"], said[1]["code"]) == ("draining", GOING_AWAY)
        assert said[0]["finish_within_s"] == DRAIN_S
        # New connections and requests get a refusal that says where to go.
        assert client.get("/health/live").status_code == 200
        for answer in (
            client.get("/health/ready"),
            client.post("/v1/chat/completions", json=CHAT),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["connection"] == "close"
        # Running requests may continue until the deadline, then end with one terminal event.
        rest = [line for line in lines if line.startswith("data: ")]
        assert '"code":"draining"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        events = list(of_busy)
        kinds = [event["type"] for event in events]
        assert kinds.count("notice") == 1
        assert kinds[-2:] == ["response.failed", "closed"]
        assert events[-1]["code"] == GOING_AWAY
        # Then it exits, and no process listens any longer: this process only holds the port.
        assert process.wait(PATIENCE_S) == 0
    for finished in (idle, busy):
        finished.shutdown()
