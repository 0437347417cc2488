"""Tests of ZeroMQ links with wrong keys or keys on one side only: what both sides report."""

from __future__ import annotations

import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import structlog
import trio
import zmq

from transport.handshake import make_hello
from transport.zmq_curve import REPEAT_S, Repeats, make_keys
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.ids import PeerId, Role

from .ends import ME, PATIENCE_S, SERVER, until

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping
    from pathlib import Path
    from typing import Any

    from transport.link import Connection, Listener

ANY_PORT = "tcp://127.0.0.1:*"
BOUNDS = {"hwm": 10, "max_frame_bytes": 2**20}
CONNECTING, BOUND = ("handshake_failed",), ("key_refused", "handshake_refused")


@pytest.fixture
def log() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


@dataclass
class Sides:
    """Key directories of a worker and a server, and how each appears to the other."""

    worker: Path
    server: Path
    worker_key: bytes
    server_key: bytes

    def befriend(self, *, in_role: str = "") -> None:
        """Give each side the other's key."""
        folder = self.worker / "authorized" / in_role
        (folder / "its.public").write_bytes(self.server_key)
        (self.server / "bound" / "127.0.0.1.public").write_bytes(self.worker_key)


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    worker, server = tmp_path / "worker", tmp_path / "server"
    return Sides(worker, server, make_keys(worker), make_keys(server))


@contextmanager
def linked(
    worker: Path, server: Path, *, is_bound_plain: bool = False, is_plain: bool = False
) -> Iterator[tuple[Listener, Connection]]:
    link = LinkConfig()
    with (
        closing(ZmqNetwork(link, str(worker), is_plain=is_bound_plain)) as bound,
        closing(ZmqNetwork(link, str(server), is_plain=is_plain)) as connecting,
    ):
        listener = bound.listen(ANY_PORT, **BOUNDS)
        yield listener, connecting.connect(listener.address, ME, **BOUNDS)


async def told(
    log: list[MutableMapping[str, Any]], connection: Connection, events: tuple[str, ...]
) -> str:
    """Wait until a side reports why there is no link, and return the reason."""
    await until(lambda: bool(connection.trouble) and any(said(log, events)))
    return next(said(log, events))


def said(log: list[MutableMapping[str, Any]], events: tuple[str, ...]) -> Iterator[str]:
    return (line["reason"] for line in tuple(log) if line["event"] in events)


@pytest.mark.slow
async def test_a_key_that_is_not_authorised_is_named_on_both_sides(
    sides: Sides, log: list[MutableMapping[str, Any]]
) -> None:
    (sides.server / "bound" / "127.0.0.1.public").write_bytes(sides.worker_key)
    with linked(sides.worker, sides.server) as (listener, connection):
        theirs = await told(log, connection, CONNECTING)
        ours = await told(log, connection, BOUND)
        shown = sides.server_key[:8].decode()
        assert f"refused our key {shown}" in connection.trouble == theirs
        assert f"{sides.server}/key.public" in theirs
        assert f"the key {shown}… is not authorised" in ours
        assert f"{sides.worker}/authorized/" in ours
        [refused] = [line for line in log if line["event"] == "key_refused"]
        assert refused["address"] == "127.0.0.1"
        [failed] = [line for line in log if line["event"] == "handshake_failed"]
        assert (failed["peer"], failed["who"]) == (listener.address, "server:web-0")


@pytest.mark.slow
async def test_a_bound_side_with_another_key_than_expected_is_named_on_both_sides(
    sides: Sides, log: list[MutableMapping[str, Any]]
) -> None:
    sides.befriend()
    expected = sides.server / "bound" / "127.0.0.1.public"
    expected.write_bytes(zmq.curve_keypair()[0])
    with linked(sides.worker, sides.server) as (_, connection):
        theirs = await told(log, connection, CONNECTING)
        ours = await told(log, connection, BOUND)
        assert f"a key other than {expected}" in connection.trouble == theirs
        assert f"{sides.worker}/key.public" in ours
        assert sides.worker_key[:8].decode() in ours


@pytest.mark.slow
@pytest.mark.parametrize("is_bound_plain", [True, False])
async def test_keys_on_one_side_only_are_named_on_both_sides(
    sides: Sides, log: list[MutableMapping[str, Any]], is_bound_plain: bool
) -> None:
    sides.befriend()
    plain = {"is_bound_plain": is_bound_plain, "is_plain": not is_bound_plain}
    with linked(sides.worker, sides.server, **plain) as (_, connection):
        # The side that notices first hangs up.
        assert "link.wire.plaintext" in await told(log, connection, BOUND)
        await until(lambda: "link.wire.plaintext" in connection.trouble)
        assert any("link.wire.plaintext" in reason for reason in said(log, CONNECTING))


@pytest.mark.slow
async def test_a_link_that_stands_has_no_trouble_and_no_lines(
    sides: Sides, log: list[MutableMapping[str, Any]]
) -> None:
    sides.befriend(in_role="server")
    with linked(sides.worker, sides.server) as (listener, connection):
        with trio.fail_after(PATIENCE_S):
            await connection.send(make_hello(SERVER))
            assert (await listener.receive_many())[0].sender == ME
        assert connection.trouble == ""
    assert log == []


@pytest.mark.slow
async def test_a_key_may_say_hello_in_its_role_only_and_to_no_name_of_another_key(
    sides: Sides, log: list[MutableMapping[str, Any]], tmp_path: Path
) -> None:
    sides.befriend(in_role="prefill")
    friend = tmp_path / "friend"
    (sides.worker / "authorized" / "friend.public").write_bytes(make_keys(friend))
    (friend / "bound" / "127.0.0.1.public").write_bytes(sides.worker_key)
    prefill = PeerId(Role.PREFILL, "prefill-0", 3)
    with (
        linked(sides.worker, sides.server) as (listener, thief),
        closing(ZmqNetwork(LinkConfig(), str(friend))) as network,
    ):
        connection = network.connect(listener.address, ME, **BOUNDS)
        with trio.fail_after(PATIENCE_S):
            await connection.send(make_hello(SERVER))
            assert (await listener.receive_many())[0].sender == ME
            await thief.send(make_hello(SERVER))
            thief.send_nowait(make_hello(prefill))
            assert (await listener.receive_many())[0].sender == prefill.identity()
            assert "may not act as a server, only as: prefill" in await reason(thief)
            await connection.send(make_hello(prefill))
            thief.send_nowait(make_hello(prefill))
            assert (await listener.receive_many())[0].sender == prefill.identity()
            async with trio.open_nursery() as nursery:
                # Either of the two connections may arrive first.
                nursery.start_soon(listener.receive_many)
                assert "belongs to another key" in await reason(connection)
                nursery.cancel_scope.cancel()
        assert listener.statistics().bad_frames == 2
        assert [line["event"] for line in log] == ["hello_refused"] * 2


async def reason(connection: Connection) -> str:
    """Return the reason of the GOODBYE."""
    [message] = await connection.receive_many()
    return str(getattr(message.frame, "reason", message.frame))


def test_a_trouble_is_told_once_in_a_while_with_how_often_it_was_kept_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    repeats = Repeats()
    assert [repeats.due("a") for _ in range(4)] == [0, None, None, None]
    assert repeats.due("b") == 0
    now += REPEAT_S
    assert repeats.due("a") == 3
    for number in range(1000):
        repeats.due(str(number))
    assert len(repeats._told) <= 256


def test_the_thread_that_answers_for_keys_ends_with_its_network(sides: Sides) -> None:
    before = set(threading.enumerate())
    with linked(sides.worker, sides.server):
        started = set(threading.enumerate()) - before
        assert {thread.name for thread in started} == {"curve"}
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
