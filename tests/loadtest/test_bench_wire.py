"""Tests of the benchmark of KV transfer: it moves real bytes between real processes, and computes
shares and ratios correctly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadtest.bench.model import SHAPES
from loadtest.bench.wire import (
    FRAMES,
    KINDS,
    PATHS,
    ZMQ_PATHS,
    Moved,
    SocketPair,
    Throughput,
    WorkerPair,
    measure_costs,
)
from loadtest.bench.wire_sockets import SOURCE_BYTES, ZMQ, frames
from loadtest.bench.wire_worker import stored_engine
from loadtest.harness.report import Ratio
from tests import forked
from triolet.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path


def test_a_ratio_is_met_within_its_bounds() -> None:
    assert Ratio(0.8, 0.8).is_met
    assert not Ratio(0.79, 0.8).is_met
    assert Ratio(0.1, ceiling=0.1).is_met
    assert not Ratio(0.11, ceiling=0.1).is_met
    assert Ratio(5.0).is_met
    assert Ratio(0.1234, ceiling=0.1).fields() == {"value": 0.123, "ceiling": 0.1}
    assert Ratio(1.0, 0.5, 2.0).goal == "at least 0.5 and at most 2.0"


def test_our_share_is_of_the_bare_socket_that_fills_as_much_memory(tmp_path: Path) -> None:
    throughput = Throughput(tmp_path, repetitions=1)
    for frame_bytes in FRAMES:
        for name in ZMQ_PATHS:
            throughput.moved[name, frame_bytes] = [Moved(10**9, 1.6, 1.0)] * 3
        for kind in KINDS:
            throughput.moved[f"raw {kind}", frame_bytes] = [Moved(10**9, 1.0, 1.0)] * 3
            throughput.moved[f"raw {kind}, spread", frame_bytes] = [Moved(10**9, 2.0, 1.0)] * 3
        for kind in PATHS:
            throughput.moved[f"kv path {kind}", frame_bytes] = [Moved(10**9, 2.5, 1.0)] * 3
    ratios = dict(throughput.ratios())
    assert ratios["1 MiB: kv path over shared memory vs raw tcp"] == Ratio(0.8, 0.8)
    assert ratios["1 MiB: kv path over tcp, CURVE vs raw tcp"] == Ratio(0.8)
    assert ratios["4 MiB: kv path over ipc vs raw tcp"] == Ratio(0.8)
    assert ratios["2 MiB: zmq tcp, spread vs raw tcp"] == Ratio(1.25)
    assert {row["gb_per_s"] for row in throughput.rows()} == {1.0, 0.62, 0.5, 0.4}


def test_frames_go_round_the_memory() -> None:
    places = frames(SOURCE_BYTES + 3 * MIB, MIB)
    assert len(places) == SOURCE_BYTES // MIB + 3
    assert places[:2] == [0, MIB] == places[-3:-1]
    assert max(places) + MIB <= SOURCE_BYTES


@pytest.mark.slow
def test_prompts_really_arrive_and_bare_sockets_really_carry(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    num_tokens, num_bytes = 96, 3 * 96 * SHAPES["15m"].kv_bytes_per_token
    with (
        WorkerPair(
            f"ipc://{tmp_path}/kv", 64 * KIB, 3 * num_tokens, size="15m", popen=forked.Popen
        ) as pair,
        SocketPair("ipc", str(tmp_path / "raw"), forked.Popen) as raw,
        SocketPair(ZMQ, popen=forked.Popen) as bare,
    ):
        for works in (False, True):
            assert bare.move(20 * 64 * KIB, 64 * KIB, work=works).seconds > 0
        for _ in range(2):
            assert pair.ship(3, num_tokens, num_bytes).num_bytes == num_bytes
            assert raw.move(4 * 64 * KIB, 64 * KIB, spread=True).seconds > 0
        seconds, first_token_s = pair.compute(num_tokens, is_held=True)
        assert 0 < first_token_s <= seconds


@pytest.mark.slow
def test_every_part_of_the_path_has_its_cost() -> None:
    rows = measure_costs("15m", 256 * KIB)
    parts = ["memcpy", "export", "digest", "import", "frame"]
    assert [row["path"] for row in rows] == [f"cost of {part}" for part in parts]
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_a_stored_pool_holds_noise_and_no_shared_page_of_zeros() -> None:
    pool = stored_engine("15m", 64, "noise").pool
    assert pool.blocks.view(-1).count_nonzero() > 0.9 * pool.blocks.numel()
    assert pool.bytes_per_block == 16 * SHAPES["15m"].kv_bytes_per_token
