"""Tests of links over ZeroMQ: safe addresses, keys, zero-copy sending, and clean shutdown."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
import zmq

from transport.frames import Drain
from transport.link import MAX_BAD_FRAMES, PeerGone
from transport.zmq_curve import CONNECTING_ROLES, KeyDirectory, make_keys
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.errors import ConfigError
from triolet.units import MIB

from .ends import ME, PATIENCE_S, chunk, is_gone, make_key_directory, number_of, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transport.link import Connection, LinkMessage

ANY_PORT = "tcp://127.0.0.1:*"
BOUNDS = {"hwm": 10, "max_frame_bytes": MIB}
STRANGER_WAIT_S = 0.4
"""Long enough for the admitted peer to send many frames."""


@pytest.fixture
def shared_keys(tmp_path: Path) -> Path:
    return Path(make_key_directory(tmp_path / "fleet"))


@pytest.fixture
def private_path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def open_network(shared_keys: Path) -> Iterator[Callable[[Path | None], ZmqNetwork]]:
    opened: list[ZmqNetwork] = []

    def make(curve_dir: Path | None = shared_keys) -> ZmqNetwork:
        opened.append(ZmqNetwork(LinkConfig(), None if curve_dir is None else str(curve_dir)))
        return opened[-1]

    yield make
    for network in opened:
        network.close()


LEAVING = """
import sys
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
network = ZmqNetwork(LinkConfig(), sys.argv[1])
listener = network.listen("tcp://127.0.0.1:*", hwm=10, max_frame_bytes=1024)
connection = network.connect(listener.address, b"server:s:1", hwm=10, max_frame_bytes=1024)
network.close()
"""


def test_a_process_with_open_links_can_leave(shared_keys: Path) -> None:
    """Run in its own process, because a context that waits for a monitor waits forever."""
    command = [sys.executable, "-c", LEAVING, str(shared_keys)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("tcp://0.0.0.0:7001", "triolet keys make"),
        ("tcp://*:7001", "triolet keys make"),
        ("tcp://192.0.2.1:7001", "triolet keys make"),
        ("tcp://127.0.0.1:7001", "triolet keys make"),
        ("tcp://localhost:7001", "triolet keys make"),
        ("tcp://[::1]:7001", "triolet keys make"),
        ("ipc:///tmp/x", "chmod 700"),
        ("ipc:///nowhere/x", "mkdir"),
        ("inproc://x", "allowed"),
    ],
)
def test_an_unsafe_address_is_refused_by_both_sides(
    open_network: Callable[[None], ZmqNetwork], address: str, remedy: str
) -> None:
    network = open_network(None)
    with pytest.raises(ConfigError, match=remedy):
        network.listen(address, **BOUNDS)
    with pytest.raises(ConfigError, match=remedy):
        network.connect(address, ME, **BOUNDS)


def test_a_port_that_nobody_can_connect_to_is_refused(
    open_network: Callable[[], ZmqNetwork],
) -> None:
    network = open_network()
    with pytest.raises(ConfigError, match="cannot connect to"):
        network.connect("tcp://127.0.0.1:0", ME, **BOUNDS)
    assert network._links == set()


def test_an_address_of_no_interface_is_refused(
    open_network: Callable[[Path], ZmqNetwork], tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"cannot bind tcp://192\.0\.2\.1:7001"):
        open_network(tmp_path / "keys").listen("tcp://192.0.2.1:7001", **BOUNDS)


async def test_a_port_in_use_can_be_taken_after_its_owner_closed(
    open_network: Callable[[], ZmqNetwork],
) -> None:
    first, second = open_network(), open_network()
    address = first.listen(ANY_PORT, **BOUNDS).address
    with pytest.raises(ConfigError, match=f"{address} is in use"):
        second.listen(address, **BOUNDS)
    first.close()
    assert second.listen(address, **BOUNDS).address == address


async def test_the_last_words_of_a_connection_that_closes_arrive(
    open_network: Callable[[], ZmqNetwork], shared_keys: Path
) -> None:
    bounds = {"hwm": 1000, "max_frame_bytes": 2 * MIB}
    listener = open_network().listen(ANY_PORT, **bounds)
    leaving = ZmqNetwork(LinkConfig(linger_s=PATIENCE_S), str(shared_keys))
    connection = leaving.connect(listener.address, ME, **bounds)
    # More than the kernel holds, so that most of it is still in this process at close.
    words = [chunk(index) for index in range(50)]
    heard: list[object] = []
    with trio.fail_after(PATIENCE_S):
        await connection.send(Drain(0.0))
        await listener.receive_many()
        for word in words:
            connection.send_nowait(word, bytes(MIB))
        leaving.close()
        while len(heard) < len(words):
            heard += [message.frame for message in await listener.receive_many()]
    assert heard == words


async def test_a_payload_is_not_copied_on_its_way_out(private_path: Path) -> None:
    bounds = {"hwm": 1, "max_frame_bytes": 64 * MIB}
    payloads: list[bytearray] = []
    # Behind so much unread data pings go unanswered: a link that relied on them would soon break.
    with (
        closing(ZmqNetwork(LinkConfig())) as theirs,
        closing(ZmqNetwork(LinkConfig())) as ours,
        trio.fail_after(PATIENCE_S),
    ):
        # Over ipc: encryption copies.
        listener = theirs.listen(f"ipc://{private_path}/x", **bounds)
        connection = ours.connect(listener.address, ME, **bounds)
        await connection.send(Drain(1.0))
        # Nothing is read, so the last messages stay in the pipe.
        while await has_room(connection, payload := bytearray(MIB)):
            payloads.append(payload)
        # A buffer that ZeroMQ itself holds cannot be resized; a copy would leave it free.
        assert not all(map(is_resizable, payloads))
        received = 0
        while received < 1 + len(payloads):
            received += len(await listener.receive_many())
        await until(lambda: all(map(is_resizable, payloads)))


async def has_room(connection: Connection, payload: bytearray) -> bool:
    """Send, unless there has been no room for so long that every buffer on the way must be full."""
    for _ in range(3):
        with trio.move_on_after(0.2):
            await connection.send(chunk(0), memoryview(payload))
            return True
    return False


def is_resizable(buffer: bytearray) -> bool:
    try:
        buffer.extend(b"x")
    except BufferError:
        return False
    return True


async def test_an_overlong_message_is_dropped_by_zeromq_before_it_takes_memory(
    open_network: Callable[[], ZmqNetwork],
) -> None:
    listener = open_network().listen(ANY_PORT, **BOUNDS)
    connection = open_network().connect(listener.address, ME, hwm=10, max_frame_bytes=MIB)
    with trio.fail_after(PATIENCE_S):
        await connection.send(chunk(0), bytes(2 * MIB))
        messages: list[LinkMessage] = []
        while not messages:
            # The connection is reset, so frames sent in between may be lost with it.
            with trio.move_on_after(0.05):
                await connection.send(Drain(1.0))
                messages = list(await listener.receive_many())
    assert {number_of(m) for m in messages} == {1.0}
    assert listener.statistics().bad_frames == 0, "it reached our own check"


async def test_a_bound_side_that_sends_no_frames_is_cut_off_until_another_takes_its_place(
    open_network: Callable[[], ZmqNetwork], private_path: Path
) -> None:
    address = f"ipc://{private_path}/x"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as enemy:
        enemy.set(zmq.LINGER, 0)
        enemy.bind(address)
        connection = open_network().connect(address, ME, **BOUNDS)
        with trio.fail_after(PATIENCE_S):
            await connection.send(Drain(1.0))
            await until(lambda: bool(enemy.poll(0)))
            connection_id, _ = enemy.recv_multipart()
            for _ in range(MAX_BAD_FRAMES):
                enemy.send_multipart([connection_id, b"?"])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.receive_many)
                await until(lambda: connection.statistics().bad_frames == MAX_BAD_FRAMES)
                nursery.cancel_scope.cancel()
            with pytest.raises(PeerGone, match="cut off"):
                connection.send_nowait(Drain(1.0))
            with pytest.raises(PeerGone, match="cut off"):
                await connection.send(Drain(1.0))
    listener = open_network().listen(address, **BOUNDS)
    with trio.fail_after(PATIENCE_S):
        await until(lambda: not is_gone(lambda: connection.send_nowait(Drain(2.0))))
        assert number_of((await listener.receive_many())[0]) == 2.0


def test_closing_twice_is_once_and_the_path_can_be_used_again(
    open_network: Callable[[], ZmqNetwork], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/x"
    network = open_network()
    listener = network.listen(address, **BOUNDS)
    connection = network.connect(listener.address, ME, **BOUNDS)
    network.close()
    network.close()
    listener.close()
    connection.close()
    assert open_network().listen(address, **BOUNDS).address == address


def test_links_that_were_closed_are_forgotten(open_network: Callable[[], ZmqNetwork]) -> None:
    network = open_network()
    for _ in range(50):
        network.connect("tcp://127.0.0.1:9", ME, **BOUNDS).close()
    assert network._links == set()


async def exchange(
    bound: ZmqNetwork,
    connecting: ZmqNetwork,
    address: str = ANY_PORT,
    *,
    patience_s: float = STRANGER_WAIT_S,
) -> bool:
    """Return whether a frame arrives in both directions."""
    listener = bound.listen(address, **BOUNDS)
    connection = connecting.connect(listener.address, ME, **BOUNDS)
    with trio.move_on_after(patience_s) as waited:
        await connection.send(Drain(1.0))
        [message] = await listener.receive_many()
        listener.send_nowait(message.sender, Drain(2.0))
        await connection.receive_many()
    is_through = not waited.cancelled_caught
    assert is_through or listener.statistics().received_frames == 0
    listener.close()
    connection.close()
    return is_through


def authorize(directory: Path, name: str, public: bytes) -> None:
    (directory / "authorized" / f"{name}.public").write_bytes(public)


def expect(directory: Path, public: bytes) -> None:
    (directory / "bound" / "127.0.0.1.public").write_bytes(public)


@pytest.mark.slow
async def test_a_strangers_key_gets_nothing_and_an_authorised_one_works(
    open_network: Callable[[Path | None], ZmqNetwork], tmp_path: Path
) -> None:
    worker, server, stranger = tmp_path / "worker", tmp_path / "server", tmp_path / "stranger"
    worker_key, server_key = make_keys(worker), make_keys(server)
    make_keys(stranger)
    authorize(worker, "server", server_key)
    for directory in (server, stranger):
        expect(directory, worker_key)
    bound = open_network(worker)
    assert await exchange(bound, bound, patience_s=PATIENCE_S), "one directory for all"
    assert not await exchange(bound, open_network(stranger)), "a key that is not authorised"
    with closing(ZmqNetwork(LinkConfig(), str(stranger), is_plain=True)) as plain:
        assert not await exchange(bound, plain), "no key at all"
    friend = open_network(server)
    assert await exchange(bound, friend, patience_s=PATIENCE_S)
    (worker / "authorized" / "server.public").unlink()
    assert not await exchange(bound, friend), "revoked without a restart"


@pytest.mark.slow
async def test_a_worker_with_another_key_than_expected_gets_nothing(
    open_network: Callable[[Path], ZmqNetwork], tmp_path: Path
) -> None:
    impostor, server = tmp_path / "impostor", tmp_path / "server"
    make_keys(impostor)
    authorize(impostor, "server", make_keys(server))
    expect(server, zmq.curve_keypair()[0])
    assert not await exchange(open_network(impostor), open_network(server))


async def test_with_keys_any_interface_may_be_bound(
    open_network: Callable[[Path], ZmqNetwork], tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    network = open_network(tmp_path / "keys")
    assert await exchange(network, network, "tcp://0.0.0.0:*", patience_s=PATIENCE_S)


async def test_ipc_needs_no_key(
    open_network: Callable[[Path | None], ZmqNetwork], tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    address = f"ipc://{tmp_path}/keys/socket"
    listener = open_network(tmp_path / "keys").listen(address, **BOUNDS)
    connection = open_network(None).connect(listener.address, ME, **BOUNDS)
    with trio.fail_after(PATIENCE_S):
        await connection.send(Drain(1.0))
        await listener.receive_many()


def test_keys_are_made_once_and_the_secret_is_ours_alone(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "keys"
    public = make_keys(directory)
    keys = KeyDirectory.load(directory)
    assert keys.public == public
    assert (directory / "key.secret").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="already has keys"):
        make_keys(directory)
    assert KeyDirectory.load(directory) == keys


def test_a_key_directory_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="triolet keys make"):
        KeyDirectory.load(tmp_path / "nowhere")
    make_keys(tmp_path / "keys")
    secret = tmp_path / "keys" / "key.secret"
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyDirectory.load(tmp_path / "keys")
    secret.write_bytes(b"short")
    with pytest.raises(ConfigError, match="not a CURVE key"):
        KeyDirectory.load(tmp_path / "keys")
    secret.write_bytes(b"~" * 40)
    with pytest.raises(ConfigError, match="outside Z85"):
        KeyDirectory.load(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot write keys"):
        make_keys(secret)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of root")
def test_a_key_of_root_may_be_read_by_its_group_as_kubernetes_mounts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path)
    secret = tmp_path / "key.secret"
    secret.chmod(0o440)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyDirectory.load(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    assert KeyDirectory.load(tmp_path).public
    for mode in (0o444, 0o460):
        secret.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            KeyDirectory.load(tmp_path)


def test_a_broken_key_file_lets_nobody_in_and_keeps_nobody_out(tmp_path: Path) -> None:
    make_keys(tmp_path)
    friend, stranger = zmq.curve_keypair()[0], zmq.curve_keypair()[0]
    authorize(tmp_path, "broken", b"?")
    authorize(tmp_path, "friend", friend)
    keys = KeyDirectory.load(tmp_path)
    assert keys.roles_of(friend) == keys.roles_of(keys.public) == set(CONNECTING_ROLES)
    assert not keys.roles_of(stranger)
    assert not keys.roles_of(b"?")
