"""Tests of `triolet serve` when it cannot start: one error line, and nothing is left running."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import trio

from ops.models.model_directory import demo_model_path
from ops.supervisor.restart_policy import GiveUp
from ops.supervisor.serve import command_line, run_fleet
from ops.supervisor.supervisor import Supervisor
from triolet.config import SupervisorConfig

from .recording import Recorder, spec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command_line(), "serve", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


def test_a_port_in_use_is_found_out_before_anything_is_started() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        done = serve("--port", str(port))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"triolet: port {port} on 127.0.0.1 is in use")


@pytest.mark.parametrize(
    ("named", "about"), [("{}", ""), ("chat=demo code={}", "model code: ")], ids=["one", "second"]
)
def test_a_model_that_cannot_be_loaded_is_found_out_before_anything_is_started(
    tmp_path: Path, named: str, about: str
) -> None:
    model = tmp_path / "broken"
    shutil.copytree(demo_model_path(), model)
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    done = serve(*named.format(model).split(), "--port", "0", "--kv-pool", "16MiB")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"triolet: {about}{model / weights.name} has ")


def test_what_only_a_worker_finds_out_ends_all_with_one_line() -> None:
    done = serve("--port", "0", "--kv-pool", "4000TiB")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    (last,) = [line for line in lines if not line.startswith("{")]
    assert last == lines[-1]
    assert last.startswith(("triolet: prefill-0: --kv-pool is ", "triolet: decode-0: --kv-pool is"))
    assert "does not have that much" in last
    assert "Traceback" not in done.stderr
    started = [line for line in lines if '"process_started"' in line]
    ended = [line for line in lines if '"process_ended"' in line or '"process_given_up"' in line]
    # The first process may fail before the last one is started.
    assert 1 <= len(started) == len(ended) <= 3


class ServingRecorder(Recorder):
    """A recorder that is also a view, as `serve` needs."""

    def __enter__(self) -> ServingRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def serving(self, url: str) -> None:
        pytest.fail("nothing serves here")

    async def run(self) -> None:
        pass


async def test_a_server_that_never_becomes_ready_is_not_waited_for_for_ever(
    tmp_path: Path,
) -> None:
    config = SupervisorConfig(ready_timeout_s=0.2)
    view = ServingRecorder()
    supervisor = Supervisor([spec("server-0", tmp_path / "journal")], config, 5.0, view)
    with trio.fail_after(TIMEOUT_S):
        outcome = await run_fleet(supervisor, config, "http://127.0.0.1:9", view)
    assert isinstance(outcome, GiveUp)
    assert outcome.exit_code == 1
    assert "http://127.0.0.1:9/health/ready reports not ready after 0 s" in outcome.message


class Loading:
    """A server with two models that can serve the second one only later.

    Args:
      late: number of probes that it answers as not ready.
    """

    def __init__(self, late: int) -> None:
        self.answers: list[str] = []
        self._late = late

    async def answer(self, stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            state = "loading" if len(self.answers) < self._late else "serving"
            self.answers.append(state)
            states = {"a": "serving", "b": state, "asleep": "staged"}
            models = [{"name": name, "state": one} for name, one in states.items()]
            body = json.dumps({"status": "ready", "models": models}).encode()
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
            await stream.send_all(head.encode() + body)


class Ending(ServingRecorder):
    """A view that stops the fleet once it serves, and keeps the server's answers until then."""

    def __init__(self, server: Loading) -> None:
        super().__init__()
        self.server = server
        self.supervisor: Supervisor | None = None
        self.said: list[str] = []

    def serving(self, url: str) -> None:
        assert self.supervisor is not None, url
        self.said = list(self.server.answers)
        self.supervisor.stop()


@pytest.mark.parametrize(
    ("late", "timeout_s", "said"),
    [(2, 60.0, ["loading", "loading", "serving"]), (10**6, 0.0, ["loading"])],
    ids=["waits for each model", "one is enough at last"],
)
async def test_a_fleet_is_ready_when_its_servers_have_each_model_whose_workers_run(
    late: int, timeout_s: float, said: list[str], tmp_path: Path
) -> None:
    server = Loading(late)
    view = Ending(server)
    config = SupervisorConfig(ready_timeout_s=timeout_s, ready_poll_s=0.001)
    names = ("server-0", "a.decode-0", "b.decode-0", "asleep.decode-0")
    specs = [spec(name, tmp_path / "journal") for name in names]
    view.supervisor = Supervisor(specs, config, 5.0, view, stopped=["asleep"])
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, server.answer, 0)
        port = listeners[0].socket.getsockname()[1]
        with trio.fail_after(TIMEOUT_S):
            await run_fleet(view.supervisor, config, f"http://127.0.0.1:{port}", view)
        nursery.cancel_scope.cancel()
    assert view.said == said


def test_the_roles_are_started_by_this_very_python() -> None:
    assert command_line()[0] == sys.executable
    assert "triolet" in command_line()[1] or command_line()[1:3] == ("-P", "-m")
