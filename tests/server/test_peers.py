"""Tests that servers on one port query each other over their own sockets, and do not wait for a
silent one."""

from __future__ import annotations

import socket
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from server.app import build_app
from server.edge.listen import Edge, open_own_socket
from server.metrics.metrics import Metrics
from server.peers.peers import Peers
from tests.server.support.fakes import FakeFleet, fake_services
from tests.server.support.surface import CONFIG
from triolet.config import PeerServersConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

NAMES = ("server-0", "server-1")


@asynccontextmanager
async def two_servers(
    folder: Path, ask_timeout_s: float = 30.0, **more: Sequence[Any]
) -> AsyncIterator[list[Peers]]:
    """Run two surfaces that are reachable only by their own sockets.

    Args:
      folder: folder for the sockets.
      ask_timeout_s: timeout of queries, for both.
      more: parts of each one's services.
    """
    paths = tuple((name, str(folder / name)) for name in NAMES)
    asked = []
    async with trio.open_nursery() as nursery:
        edges = []
        with ExitStack() as held:
            for number, (name, path) in enumerate(paths):
                door = held.enter_context(socket.socket(socket.AF_UNIX))
                door.bind(path)
                config = PeerServersConfig(name, door.fileno(), paths, ask_timeout_s)
                fleet = FakeFleet()
                fleet.status().queued = number + 1
                metrics = Metrics("demo", "none")
                peers = Peers(config)
                parts = {part: of_each[number] for part, of_each in more.items()}
                services = fake_services(CONFIG, fleet, metrics, peers=peers)
                services = replace(services, **parts)
                metrics.watch(fleet.status, lambda: 0)
                edge = Edge(build_app(services), CONFIG)
                own = open_own_socket(config)
                door.detach()  # now owned by the edge
                await nursery.start(edge.run, own)
                edges.append(edge)
                asked.append(peers)
        yield asked
        for edge in edges:
            edge.stop(within_s=0.5)


async def test_load_and_metrics_are_those_of_all(tmp_path: Path) -> None:
    async with two_servers(tmp_path) as (first, _):
        load = await first.ask("/load")
        assert load == {"server-1": b'{"server_load":3,"queued":3,"running":0}'}
        own = await first.ask("/load/own")
        assert own == {"server-1": b'{"server_load":2,"queued":2,"running":0}'}
        text = ((await first.ask("/metrics"))["server-1"] or b"").decode()
        assert 'triolet_requests_queued{server="server-0"} 1.0' in text
        assert 'triolet_requests_queued{server="server-1"} 2.0' in text
        assert 'triolet_server_up{server="server-0"} 1.0' in text
        assert await first.ask("/nowhere") == {"server-1": None}


async def test_one_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    paths = (("server-0", str(tmp_path / "a")), ("server-1", str(tmp_path / "b")))
    assert await Peers(PeerServersConfig("server-0", 0, paths)).ask("/load") == {"server-1": None}


async def test_one_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "mute")
    paths = (("server-0", str(tmp_path / "a")), ("server-1", path))
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        peers = Peers(PeerServersConfig("server-0", 0, paths, ask_timeout_s=0.05))
        assert await peers.ask("/load") == {"server-1": None}
