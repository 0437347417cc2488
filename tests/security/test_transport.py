"""Tests of strangers on the sockets between processes: a pickle is refused as a frame and never
loaded."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import trio
import zmq

from transport.link import MAX_BAD_FRAMES
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOUNDS = {"hwm": 10, "max_frame_bytes": MIB}
PATIENCE_S = 30.0


class Bomb:
    """Creates a file wherever it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return os.open, (str(self._marker), os.O_CREAT)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def network() -> Iterator[ZmqNetwork]:
    network = ZmqNetwork(LinkConfig())
    yield network
    network.close()


def test_the_bomb_is_one(tmp_path: Path) -> None:
    os.close(pickle.loads(pickle.dumps(Bomb(tmp_path / "marker"))))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
async def test_a_pickle_is_no_frame_and_runs_nothing(
    network: ZmqNetwork, private: Path, protocol: int
) -> None:
    listener = network.listen(f"ipc://{private}/socket", **BOUNDS)
    bomb = pickle.dumps(Bomb(private / "marker"), protocol)
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(listener.address)
            for parts in ([bomb], [b"", bomb], [bomb, bomb], [b"\x80"], [b"", b"", bomb]):
                stranger.send_multipart(parts)
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(listener.receive_many)
                    while listener.statistics().bad_frames < MAX_BAD_FRAMES:
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
            statistics = listener.statistics()
    finally:
        context.term()
    assert statistics.bad_frames >= MAX_BAD_FRAMES
    assert statistics.received_frames == 0
    assert not (private / "marker").exists()
