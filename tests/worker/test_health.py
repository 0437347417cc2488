"""Tests of a worker's health probes: their answers and limits, and a worker with a hung device."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests import forked
from tests.engine.checkpoints import write_checkpoint
from transport.frames import Reserve
from transport.tokens import pack_tokens
from transport.zmq_network import ZmqNetwork
from triolet.config import HealthConfig, LinkConfig
from triolet.ids import AttemptKey, Role
from triolet.sampling import SamplingParams
from triolet.status import WorkerReady, parse_report
from worker.health import answer_probes, bind_health

from .client import Answer, Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
READY = b"GET /health/ready HTTP/1.1\r\nHost: w\r\n\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: w\r\n\r\n"
PROGRAM = """
import sys
from dataclasses import replace
from decode.worker import main
from tests.worker.patience import unhurried
from triolet.config import EngineConfig, LinkConfig, WorkerConfig
from worker.local_engine import LocalEngine

compute = LocalEngine.step

def step(self, rows):
    sys.stdin.read(1)  # the device hangs until the test writes
    return compute(self, rows)

LocalEngine.step = step
main(WorkerConfig(
    name="decode-0",
    model_dir=sys.argv[1],
    control_address="ipc://" + sys.argv[2] + "/control",
    kv_address="ipc://" + sys.argv[2] + "/kv",
    health_address="ipc://" + sys.argv[2] + "/health",
    engine=EngineConfig(kv_pool_bytes=4 << 20, threads=1),
    link=replace(unhurried(LinkConfig()), progress_timeout_s=0.1),
))
"""


@dataclass
class Loop:
    """A worker as seen by its probes."""

    is_draining: bool = False
    hangs_for_s: float | None = None

    def overdue_s(self, now: float) -> float | None:
        return self.hangs_for_s


@asynccontextmanager
async def probed(folder: Path, loop: Loop, **bounds: Any) -> AsyncIterator[str]:  # noqa: ANN401
    """Answer probes on a socket in this folder."""
    config = HealthConfig(**bounds)
    path = folder / "health"
    async with trio.open_nursery() as nursery:
        listener = bind_health(f"ipc://{path}", config.max_connections)
        nursery.start_soon(answer_probes, listener, loop, config)
        with trio.fail_after(PATIENCE_S):
            yield str(path)
        nursery.cancel_scope.cancel()


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def ask(path: str, request: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and document of an answer."""
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(request)
        head, _, body = (await read_all(stream)).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head.split(b" ")[1]), json.loads(body)


async def said_with(path: str, status: int) -> dict[str, str]:
    """Return the readiness answer as soon as it has a given status."""
    while (answer := await ask(path, READY))[0] != status:  # noqa: ASYNC110 (of another process)
        await trio.sleep(0.05)
    return answer[1]


async def test_ready_follows_device_and_drain_and_live_follows_neither(tmp_path: Path) -> None:
    loop = Loop()
    async with probed(tmp_path, loop) as path:
        assert await ask(path, READY) == (200, {"status": "ready"})
        loop.is_draining = True
        assert (await ask(path, READY))[0] == 503
        loop.hangs_for_s = 7.5
        status, said = await ask(path, READY)
        assert (status, said["status"]) == (503, "hung")
        assert said["reason"] == "the device has been in one step for 7.5 s"
        assert await ask(path, LIVE) == (200, {"status": "live"})


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health/other HTTP/1.1\r\n\r\n", 404),
        (b"POST /health/live HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01 no HTTP\r\n\r\n", 400),
        (b"GET /health/live HTTP/1.1\r\nX: " + b"x" * 35, 431),
    ],
)
async def test_other_requests_are_refused(
    request_bytes: bytes, status: int, tmp_path: Path
) -> None:
    async with probed(tmp_path, Loop(), max_head_bytes=64) as path:
        assert (await ask(path, request_bytes))[0] == status
        assert (await ask(path, LIVE))[0] == 200


async def test_a_silent_client_holds_a_place_until_the_deadline(tmp_path: Path) -> None:
    async with (
        probed(tmp_path, Loop(), max_connections=1, deadline_s=0.1) as path,
        await trio.open_unix_socket(path) as silent,
    ):
        assert (await ask(path, LIVE))[0] == 200
        assert await silent.receive_some(1) == b""


async def test_probes_are_answered_on_a_port() -> None:
    listener = bind_health("tcp://127.0.0.1:*", 1)
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_probes, listener, Loop(), HealthConfig())
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(READY)
                assert (await read_all(stream)).startswith(b"HTTP/1.1 200 OK\r\n")
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_worker_whose_device_hangs_is_live_sends_heartbeats_and_is_not_ready(
    tmp_path: Path,
) -> None:
    model = write_checkpoint(tmp_path / "model", "llama").path
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)
    command = [sys.executable, "-c", PROGRAM, str(model), str(sockets)]
    path = str(sockets / "health")
    with (
        forked.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        closing(ZmqNetwork(LinkConfig())) as network,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        reports = (parse_report(line) for line in process.stdout)
        assert any(isinstance(report, WorkerReady) for report in reports)
        client = Client(network, {Role.DECODE: f"ipc://{sockets}/control"})
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            with trio.fail_after(PATIENCE_S):
                assert await ask(path, READY) == (200, {"status": "ready"})
                key = AttemptKey(bytes(16), 0)
                client.answers[key] = Answer(key)
                client.live.add(key)
                client.send(
                    Role.DECODE,
                    Reserve(
                        *key,
                        prompt=pack_tokens([5] * 20),
                        replay=b"",
                        sampling=SamplingParams(max_tokens=1),
                        priority=0,
                        allowed=1,
                        remaining_s=600.0,
                        local_tokens=20,
                    ),
                )
                said = await said_with(path, 503)
                assert said["status"] == "hung"
                beats = client.links[Role.DECODE].beats
                num_beats = len(beats)
                await client.wait_until(lambda: len(beats) >= num_beats + 2)
                assert beats[-1].has_work
                assert (await ask(path, LIVE))[0] == 200
                process.stdin.write(b"x" * 100)
                process.stdin.flush()
                await said_with(path, 200)
            nursery.cancel_scope.cancel()
        process.kill()
