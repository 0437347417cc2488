"""What the benchmark of interference makes of what its clients saw."""

from __future__ import annotations

import random
import socket
from contextlib import closing

from loadtest.bench.interference import (
    ALL,
    CO_LOCATED,
    DISAGGREGATED,
    LOADS,
    NUM_STREAMS,
    VLLM,
    Runners,
    Seen,
    middle,
    ratios_of,
    row_of,
)
from loadtest.harness.streams import Clients


def seen(gap_s: float, late: int = 0, **more: float) -> Seen:
    gaps = [gap_s] * 990 + [10 * gap_s] * late
    return Seen(gaps, 500, [more.get("ttft_s", 0.5)] * 4, 1, 10.0, {"decode": 0.9})


def test_a_row_tells_stalls_by_the_idle_gap() -> None:
    row = row_of("15m", "x", LOADS["15m"], seen(0.01, late=10), seen(0.01))
    assert row["itl_p50"] == 10.0
    assert row["itl_max"] == 100.0
    assert row["stalled_%"] == 1.0
    assert row["late_prompts_%"] == 20.0
    assert (row["cpu_decode"], row["cpu_prefill"]) == (0.9, 0.0)


def test_rounds_are_told_by_their_medians() -> None:
    rounds = [row_of("15m", "x", LOADS["15m"], seen(gap_s), seen(0.01)) for gap_s in (3, 1, 2)]
    row = middle(rounds)
    assert (row["mode"], row["itl_p50"]) == ("x", 2000.0)


def test_a_stream_that_ends_is_followed_by_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = Clients(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with closing(clients):
            runners = Runners(clients, "demo", random.Random(1), 80)
            connections = [listener.accept()[0] for _ in range(NUM_STREAMS)]
            connections[0].sendall(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\ndata: [DONE]\n\n")
            while len(runners.all) == NUM_STREAMS:
                clients.read(1.0)
            follower, _ = listener.accept()
            request = b""
            while b"ignore_eos" not in request:
                request += follower.recv(65536)
            assert b'"max_tokens": 80,' in request
            for connection in (*connections, follower):
                connection.close()


def test_the_goals_compare_with_idle_and_with_the_better_of_the_chunked_modes() -> None:
    small, large = (arrangement.name for arrangement in CO_LOCATED.values())
    rows = [
        row_of("15m", name, LOADS["15m"], of, seen(0.01))
        for name, of in (
            (DISAGGREGATED.name, seen(0.012)),
            (f"{DISAGGREGATED.name}, idle", seen(0.01)),
            (small, seen(0.03, ttft_s=1.0)),
            (large, seen(0.06, ttft_s=0.4)),
        )
    ]
    ratios = ratios_of(rows)
    assert [round(ratio.value, 2) for ratio in ratios.values()] == [1.2, 0.4, 0.5]
    assert all(ratio.is_met for ratio in ratios.values())
    assert not ratios_of(rows[2:])


def test_co_located_is_decode_alone() -> None:
    assert len({arrangement.name for arrangement in ALL}) == len(ALL)
    assert VLLM.is_peer
    for arrangement in CO_LOCATED.values():
        assert arrangement.options[:2] == ("--prefill", "0")
