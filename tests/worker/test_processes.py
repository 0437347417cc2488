"""Tests of worker roles as separate processes: each reports when it is ready, serves, and exits on
SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from tests import forked
from tests.engine.checkpoints import write_checkpoint
from tests.engine.driver import generate, ids, open_engine
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.ids import Role
from triolet.invariants import check_at_rest
from triolet.sampling import SamplingParams
from triolet.status import WorkerReady, parse_report

from .audits import ask, fleet_of
from .client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 12
PROMPT = [3 + 7 * i % 250 for i in range(70)]
PROGRAM = """
import sys
from triolet.config import EngineConfig, LinkConfig, WorkerConfig
from {role}.worker import main
from tests.worker.patience import unhurried
main(WorkerConfig(
    name="{role}-0",
    model_dir=sys.argv[1],
    control_address="ipc://" + sys.argv[2] + "/{role}",
    kv_address="ipc://" + sys.argv[2] + "/kv" if "{role}" == "decode" else None,
    engine=EngineConfig(kv_pool_bytes=4 << 20, threads=1),
    link=unhurried(LinkConfig()),
))
"""


class Process:
    """A running process of one role."""

    def __init__(self, role: Role, model: Path, sockets: Path) -> None:
        command = [sys.executable, "-c", PROGRAM.format(role=role), str(model), str(sockets)]
        self.log: list[str] = []
        self.popen = forked.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def wait_ready(self) -> WorkerReady:
        """Return its report once it serves; `log` holds what it has logged so far."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            report = parse_report(line)
            if isinstance(report, WorkerReady):
                return report
            self.log.append(line.decode())
        _, errors = self.popen.communicate()
        raise AssertionError(errors.decode()[-2000:])

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        self.popen.communicate(timeout=60)
        return self.popen.returncode


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def processes(tmp_path: Path, sockets: Path) -> Iterator[dict[Role, Process]]:
    model = write_checkpoint(tmp_path / "model", "llama").path
    started = {role: Process(role, model, sockets) for role in (Role.PREFILL, Role.DECODE)}
    yield started
    for process in started.values():
        process.popen.kill()
        process.popen.communicate()


async def test_two_processes_answer_as_one_engine_and_leave_at_sigterm(
    processes: dict[Role, Process], tmp_path: Path, sockets: Path
) -> None:
    [expected] = generate(open_engine(tmp_path / "model"), [PROMPT], NUM_TOKENS)
    ready = processes[Role.PREFILL].wait_ready()
    assert (ready.name, ready.block_size) == ("prefill-0", 16)
    processes[Role.DECODE].wait_ready()
    for process in processes.values():
        [line] = [line for line in process.log if "kernels_ready" in line]
        assert all(word in line for word in ("build", "threads", "cores", "lacks"))
    link = LinkConfig()
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with closing(ZmqNetwork(link)) as network:
        addresses = {role: f"ipc://{sockets}/{role}" for role in processes}
        client = Client(network, addresses)
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            answer = await client.finish(await client.start(PROMPT, greedy))
            accounts = [await ask(network, address) for address in addresses.values()]
            nursery.cancel_scope.cancel()
    assert answer.token_ids == ids(expected)
    prefill, decode = (account for account in accounts if account is not None)
    assert check_at_rest(fleet_of(prefill, decode)) == []
    assert (prefill.ended, decode.ended) == ({"handed_over": 1}, {"length": 1})
    assert prefill.process.pid == processes[Role.PREFILL].popen.pid
    assert [process.stop() for process in processes.values()] == [0, 0]
