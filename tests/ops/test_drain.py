"""Tests of `triolet drain` against fake workers on the in-memory network, in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from ops.cli import main
from ops.cli.fleet_commands import LEAVE_MARGIN_S, address_of, drain_worker, what_is_left
from ops.exit_codes import CommandFailed
from ops.running_fleets import Note, RunningFleet
from tests.worker.fleet import open_fleet
from tests.worker.scripts import completion
from transport.frames import (
    PROTOCOL_VERSION,
    Capacity,
    Drain,
    Goodbye,
    Hello,
    Load,
    Peer,
    Welcome,
    WorkerHeartbeat,
)
from transport.memory_network import MemoryNetwork
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.errors import ConfigError
from triolet.ids import PeerId, Role
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from transport.frames import AnyFrame
    from transport.link import Network

PROMPT = tuple(range(1, 40))
ADDRESSES = {Role.PREFILL: "memory:prefill", Role.DECODE: "memory:decode"}
LINK = LinkConfig()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_drained_worker_is_waited_for_until_its_streams_have_ended(
    role: Role, autojump_clock: MockClock
) -> None:
    said: list[str] = []
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, SamplingParams(max_tokens=150, seed=5))
        name = await drain_worker(fleet.network, ADDRESSES[role], 60.0, said.append)
        assert name == f"{role}-0"
        await fleet.client.finish(answer)
        assert answer.token_ids == completion(PROMPT, 5, 150)
        await fleet.client.wait_until(lambda: fleet.client.links[role].goodbyes)
    assert all(line.startswith(f"{name}: ") for line in said)
    assert said[0].endswith("left; the rest moves to other workers in 60 s")


async def test_what_does_not_end_in_time_moves(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        stuck = await fleet.client.start(PROMPT, SamplingParams(max_tokens=9, seed=5), allowed=2)
        await fleet.client.wait_until(lambda: len(stuck.tokens) == 2)
        began = trio.current_time()
        said: list[str] = []
        await drain_worker(fleet.network, ADDRESSES[Role.DECODE], 4.0, said.append)
        assert 4.0 <= trio.current_time() - began < 4.0 + LINK.farewell_s
        assert said == ["decode-0: 1 sequence left; the rest moves to other workers in 4 s"]


async def test_an_operator_takes_no_share_of_the_credit(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        stuck = await fleet.client.start(PROMPT, SamplingParams(max_tokens=9, seed=5), allowed=2)
        await trio.sleep(2.0)
        before = fleet.client.links[Role.DECODE].beats[-1].row_credit
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain_worker, fleet.network, "memory:decode", 5.0, str)
            await trio.sleep(2.0)
            beat = fleet.client.links[Role.DECODE].beats[-1]
            assert (beat.is_draining, beat.row_credit) == (True, before)
        await fleet.client.finish(stuck)


class OddWorker:
    """A scripted worker."""

    def __init__(self, *script: AnyFrame, then_silent: bool = True) -> None:
        self.script = list(script)
        self.heard: list[AnyFrame] = []
        self.news = trio.Event()
        self.then_silent = then_silent

    async def run(self, network: Network, address: str = "memory:odd") -> None:
        listener = network.listen(address, hwm=100, max_frame_bytes=1 << 20)
        while True:
            for message in await listener.receive_many():
                self.heard.append(message.frame)
                self.news.set()
                self.news = trio.Event()
                await trio.sleep(LINK.heartbeat_interval_s)
                if self.script:
                    listener.send_nowait(message.sender, self.script.pop(0))
                elif not self.then_silent:
                    listener.close()
                    return


ME = Peer.of(PeerId(Role.DECODE, "odd", 1))
WELCOME = Welcome(ME, PROTOCOL_VERSION, "", Capacity(1, 16, 1, 1, 16))
BEAT = WorkerHeartbeat(1, 0, has_work=False, is_draining=True, load=Load())


@asynccontextmanager
async def odd_worker(worker: OddWorker) -> AsyncIterator[MemoryNetwork]:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, network)
        yield network
        nursery.cancel_scope.cancel()


async def failure_of(worker: OddWorker, deadline_s: float = 5.0) -> str:
    async with odd_worker(worker) as network:
        with pytest.raises(CommandFailed) as caught:
            await drain_worker(network, "memory:odd", deadline_s, str)
    return str(caught.value)


async def test_every_way_to_fail_says_what_happened(autojump_clock: MockClock) -> None:
    no_answer = await failure_of(OddWorker())
    assert no_answer.startswith("no worker answers at memory:odd within 5 s")
    refused = await failure_of(OddWorker(Goodbye("no room")))
    assert refused == "the worker at memory:odd refuses: no room"
    other = Welcome(ME, PROTOCOL_VERSION + 1, "", WELCOME.capacity)
    assert "speaks protocol version" in await failure_of(OddWorker(other))
    silent = await failure_of(OddWorker(WELCOME))
    assert silent.startswith("odd stopped answering before it was drained")
    gone = await failure_of(OddWorker(WELCOME, BEAT, then_silent=False))
    assert gone.startswith(("odd exited before", "odd stopped answering before"))


async def test_a_worker_that_does_not_leave_is_given_up_in_time(autojump_clock: MockClock) -> None:
    worker = OddWorker(WELCOME, *[BEAT] * 10_000)
    began = trio.current_time()
    async with odd_worker(worker) as network:
        with pytest.raises(CommandFailed, match="has not exited 10 s after the deadline"):
            await drain_worker(network, "memory:odd", 1.0, str)
    assert trio.current_time() - began == pytest.approx(1.0 + LEAVE_MARGIN_S, abs=1.0)


@pytest.mark.slow
async def test_the_worker_is_told_that_it_was_heard(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/worker"
    worker = OddWorker(WELCOME, BEAT, Goodbye("this worker has shut down"))
    with closing(ZmqNetwork(LINK)) as network:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run, network, address)
            assert await drain_worker(network, address, 60.0, str) == "odd"
            with trio.fail_after(60.0):
                while len(worker.heard) < 4:
                    await worker.news.wait()
            nursery.cancel_scope.cancel()
    assert [type(frame) for frame in worker.heard] == [Hello, Drain, Drain, Goodbye]


def test_work_is_counted_in_words() -> None:
    assert what_is_left(Load()) == "0 sequences left"
    assert what_is_left(Load(running=1)) == "1 sequence left"
    assert what_is_left(Load(running=1, paused=2, waiting=3)) == "6 sequences left"


def running(directory: str, port: int, *workers: str) -> RunningFleet:
    addresses = {name: f"ipc://{directory}/{name}.control" for name in workers}
    return RunningFleet(Path(directory), Note(port, "http://127.0.0.1", addresses))


FLEETS = [
    running("/run/a", 8000, "prefill-0", "decode-0"),
    running("/run/b", 8001, "prefill-0", "decode-0", "decode-1"),
]


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch) -> list[RunningFleet]:
    running = list(FLEETS)
    monkeypatch.setattr("ops.running_fleets.running_fleets", lambda: running)
    return running


def test_a_name_is_found_in_the_fleet_that_is_meant(fleets: list[RunningFleet]) -> None:
    assert address_of("decode-1", 8001) == "ipc:///run/b/decode-1.control"
    with pytest.raises(ConfigError, match="ports 8000, 8001; select one with --port"):
        address_of("decode-1", None)
    assert address_of("decode-0", 8000) == "ipc:///run/a/decode-0.control"
    with pytest.raises(ConfigError, match="ports 8000, 8001; select one with --port"):
        address_of("decode-0", None)
    with pytest.raises(ConfigError, match="no worker 'decode-1'; allowed: prefill-0, decode-0"):
        address_of("decode-1", 8000)
    with pytest.raises(ConfigError, match="restart --role server"):
        address_of("server", 8001)
    with pytest.raises(CommandFailed, match="on port 9"):
        address_of("decode-0", 9)
    fleets.clear()
    with pytest.raises(CommandFailed, match="no `triolet serve` of this user runs here"):
        address_of("decode-0", None)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["drain", "nobody"], 1, "no `triolet serve`"),
        (["drain", "ipc:///nowhere/x"], 2, "no directory /nowhere"),
        (["drain", "tcp://192.0.2.1:1"], 2, "CURVE"),
        (["restart"], 1, "no `triolet serve`"),
        (["restart", "--role", "cook"], 2, "allowed: control, decode, prefill, server"),
        (
            ["restart", "chat", "--role", "server"],
            2,
            "together with a model; allowed: prefill, decode",
        ),
    ],
)
def test_a_command_that_cannot_work_says_so_in_one_line(
    arguments: list[str],
    code: int,
    words: str,
    fleets: list[RunningFleet],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleets.clear()
    assert main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("triolet: ")
    assert words in line
