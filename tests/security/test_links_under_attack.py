"""Tests of another local process attacking a server and a separate decode worker."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import trio
import zmq

from server.contract.generation import Delta, Failed
from server.scheduling.links import Links
from tests import forked
from tests.server.scheduling.fakes import make_request, server_config
from tests.server.tiny_text import tiny_text
from transport.codec import decode, encode
from transport.digest import payload_digest
from transport.frames import Audit, Audited, Drain, Goodbye, KvChunk, Tokens, Welcome
from transport.handshake import make_hello
from transport.zmq_curve import KeyDirectory, make_keys
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig, LocalPrefill, RoutingConfig
from triolet.ids import AttemptKey, PeerId, Role
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from server.contract.output_stream import OutputStream
    from transport.frames import AnyFrame

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 60.0
RECOVERY_S: Final = 10.0
"""Time after an attacker has left."""
FORGED: Final = 50
POLL_S: Final = 0.02
QUIET_MS: Final = 200
"""Time in which a worker answers hundreds of times."""


@dataclass
class WorkerProcess:
    """A running worker."""

    popen: subprocess.Popen[bytes]
    control: str
    kv: str
    log: Path

    def wait_ready(self) -> None:
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == b"ready\n", self.log.read_text()

    def events(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line)["event"] for line in lines if line.startswith("{")]


@contextmanager
def worker_process(
    role: Role, directory: Path, control: str, kv: str, keys: str
) -> Iterator[WorkerProcess]:
    log = directory / f"{role}.log"
    command = [sys.executable, "-m", "tests.security.worker_process", forked.PARENT_PID]
    with (
        log.open("wb") as errors,
        forked.Popen(
            [*command, role, control, kv, keys],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        try:
            yield WorkerProcess(process, control, kv, log)
        finally:
            process.kill()


@dataclass
class Workers:
    """A decode and a prefill worker on loopback, each with its own keys; control is encrypted, KV
    is plaintext."""

    decode: WorkerProcess
    prefill: WorkerProcess
    keys: dict[str, KeyDirectory]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Workers that allow the keys of the server and of the prefill worker, in their roles."""
    home = tmp_path_factory.mktemp("links")
    names = ("decode", "prefill", "server", "stranger")
    public = {name: make_keys(home / name) for name in names}
    for worker, guests in (("decode", ("server", "prefill")), ("prefill", ("server",))):
        for guest in guests:
            (home / worker / "authorized" / guest / "its.public").write_bytes(public[guest])
    ports = [free_port() for _ in range(3)]
    for port, worker in zip(ports, ("decode", "decode", "prefill"), strict=True):
        for connecting in ("server", "prefill", "stranger"):
            path = home / connecting / "bound" / f"127.0.0.1_{port}.public"
            path.write_bytes(public[worker])
    control, kv, prefill = (f"tcp://127.0.0.1:{port}" for port in ports)
    with (
        worker_process(Role.DECODE, home, control, kv, str(home / "decode")) as first,
        worker_process(Role.PREFILL, home, prefill, "", str(home / "prefill")) as second,
    ):
        first.wait_ready()
        second.wait_ready()
        yield Workers(first, second, {name: KeyDirectory.load(home / name) for name in names})


class Attacker:
    """A socket with any name and any key; sends and receives frames."""

    def __init__(
        self, address: str, identity: bytes, keys: KeyDirectory | None, server_key: bytes
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IDENTITY, identity)
        if keys is not None:
            self._socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.set(zmq.CURVE_SERVERKEY, server_key)
        self._socket.connect(address)

    def send(self, *frames: AnyFrame) -> None:
        for frame in frames:
            self._socket.send(encode(frame))

    def send_parts(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    async def heard(self, wanted: int = 1000) -> Sequence[AnyFrame]:
        """Return frames until `wanted` have arrived or no more arrive."""
        frames: list[AnyFrame] = []
        while len(frames) < wanted and await trio.to_thread.run_sync(self._socket.poll, QUIET_MS):
            frames.append(decode(self._socket.recv(), MIB))
        return frames

    def leave(self) -> None:
        self._socket.close(0)
        self._context.term()


@contextmanager
def attacker(
    address: str,
    identity: bytes = b"x",
    keys: KeyDirectory | None = None,
    server_key: bytes = b"",
) -> Iterator[Attacker]:
    enemy = Attacker(address, identity, keys, server_key)
    try:
        yield enemy
    finally:
        enemy.leave()


@asynccontextmanager
async def fleet_of(workers: Workers, own: str = "server") -> AsyncIterator[Links]:
    """Run a server with the workers, which allow its keys."""
    link = LinkConfig()
    config = server_config(
        prefill_addresses=(workers.prefill.control,),
        decode_addresses=(workers.decode.control,),
        routing=RoutingConfig(local_prefill=LocalPrefill.OFF),
        link=link,
    )
    network = ZmqNetwork(link, str(workers.keys[own].path))
    try:
        fleet = Links(config, tiny_text(), network)
        async with trio.open_nursery() as nursery:
            await nursery.start(fleet.run)
            with trio.fail_after(PATIENCE_S):
                if own == "server":
                    await fleet.wait_ready()
            yield fleet
            nursery.cancel_scope.cancel()
    finally:
        network.close()


async def read(stream: OutputStream, least: int | None = None) -> list[int]:
    """Read a stream to its end, or until `least` tokens have arrived."""
    token_ids: list[int] = []
    while not stream.is_over and (least is None or len(token_ids) < least):
        for _, event in await anext(stream):
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                token_ids += event.token_ids
    return token_ids


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.PULL) as probe:
        return probe.bind_to_random_port("tcp://127.0.0.1")


async def test_on_loopback_nobody_without_a_servers_key_gets_an_audit_a_token_or_a_drain(
    workers: Workers,
) -> None:
    keys, worker = workers.keys, workers.decode
    async with fleet_of(workers) as fleet:
        stream = fleet.submit(make_request(1, max_tokens=200, seed=1))
        await read(stream, 5)
        me = fleet._me
        operator = PeerId(Role.OPERATOR, "operator", 9)
        orders = (Audit(1), Drain(0.0))
        for own, who in (
            (None, me),
            (keys["stranger"], me),
            (keys["prefill"], me),
            (keys["prefill"], operator),
        ):
            with attacker(worker.control, me.identity(), own, keys["decode"].public) as enemy:
                enemy.send(*orders, make_hello(who), *orders)
                heard = await enemy.heard()
            assert not any(isinstance(frame, Audited | Tokens | Welcome) for frame in heard)
            reasons = [frame.reason for frame in heard if isinstance(frame, Goodbye)]
            assert any("may not act as" in said for said in reasons) is (own is keys["prefill"])
        await read(stream)
        assert {view.state for view in fleet.status().workers} == {"alive"}
    assert worker.popen.poll() is None
    events = worker.events()
    assert {"key_refused", "handshake_refused", "hello_refused"} <= set(events)
    assert events.count("key_refused") == 1, "bounded, however often it tries"


async def test_a_stolen_name_brings_no_token_and_the_fleet_is_whole_soon_after_the_thief_has_left(
    workers: Workers,
) -> None:
    """The worst case: the thief has the server's own key and knows its epoch."""
    own, key = workers.keys["server"], workers.keys["decode"].public
    async with fleet_of(workers) as fleet:
        undisturbed = await read(fleet.submit(make_request(1, max_tokens=200, seed=1)))
        stream = fleet.submit(make_request(2, max_tokens=200, seed=1))
        tokens = await read(stream, 5)
        with attacker(workers.decode.control, fleet._me.identity(), own, key) as thief:
            thief.send(Audit(1), Drain(0.0))
            heard = await thief.heard(2)
            assert [type(frame) for frame in heard] == [Goodbye, Goodbye], "no HELLO yet"
            thief.send(make_hello(fleet._me))
            heard = await thief.heard(2)
            assert not any(isinstance(frame, Tokens) for frame in heard)
        with trio.fail_after(RECOVERY_S):
            tokens += await read(stream)
            again = await read(fleet.submit(make_request(3, max_tokens=200, seed=1)))
        assert tokens == again == undisturbed


async def test_what_is_forged_on_a_plaintext_kv_link_is_counted_and_changes_nothing(
    workers: Workers,
) -> None:
    async with fleet_of(workers) as fleet:
        undisturbed = await read(fleet.submit(make_request(4, max_tokens=200, seed=1)))
        stream = fleet.submit(make_request(5, max_tokens=200, seed=1))
        tokens = await read(stream, 5)
        before = await dropped_by_decode(fleet)
        with attacker(workers.decode.kv) as enemy:
            enemy.send(make_hello(PeerId(Role.PREFILL, "forger", 7), "fake"))
            [welcome] = await enemy.heard(1)
            assert isinstance(welcome, Welcome)
            key, lie = AttemptKey((5).to_bytes(16, "big"), 0), bytes(16)
            for index in range(FORGED):
                chunk = KvChunk(*key, welcome.peer.epoch, index, 0, 1, payload_digest(lie))
                enemy.send_parts(encode(chunk), lie)
            assert await enemy.heard() == [], "no credit and no request for it"
        forged = await dropped_by_decode(fleet) - before
        assert tokens + await read(stream) == undisturbed
        assert forged == FORGED


async def dropped_by_decode(fleet: Links) -> int:
    """Return how many forged frames the decode worker has counted."""
    [view] = [view for view in (await fleet.audit()).workers if view.role is Role.DECODE]
    assert view.audit is not None
    return view.audit.dropped.get("forged", 0)


async def test_a_server_that_is_refused_says_by_whom_and_is_let_in_without_a_restart(
    workers: Workers,
) -> None:
    keys = workers.keys
    async with fleet_of(workers, "stranger") as fleet:
        with trio.fail_after(PATIENCE_S):
            while not all(view.trouble for view in fleet.status().workers):  # noqa: ASYNC110
                await trio.sleep(POLL_S)
        for view, worker in zip(
            fleet.status().workers, (workers.prefill, workers.decode), strict=True
        ):
            assert view.address == worker.control
            assert f"refused our key {keys['stranger'].shown}" in view.trouble
        for role in ("decode", "prefill"):
            path = keys[role].path / "authorized" / "server" / "late.public"
            path.write_bytes(keys["stranger"].public)
        with trio.fail_after(RECOVERY_S):
            await fleet.wait_ready()
        assert [view.trouble for view in fleet.status().workers] == ["", ""]
