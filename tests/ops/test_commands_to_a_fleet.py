"""Tests of finding a running fleet and of the supervisor's socket."""

from __future__ import annotations

import json
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from ops import running_fleets
from ops.control import process
from ops.exit_codes import CommandFailed
from ops.private_directory import private_directory
from ops.running_fleets import NOTE, Note, find_fleet, write_note
from ops.supervisor import supervisor_socket
from ops.supervisor.model_status import ModelStatus, RunningWorker, RunState
from ops.supervisor.supervisor_socket import (
    MAX_LINE_BYTES,
    ModelsAnswer,
    ModelsRequest,
    OrderFinished,
    OrderRefused,
    RestartRequest,
    StartModelRequest,
    StepBegan,
    StopModelRequest,
    answer_commands,
    ask,
)
from triolet.config import ControlConfig
from triolet.errors import ConfigError
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ops.supervisor.supervisor_socket import Answer, Request, Tell

PATIENCE_S = 60.0
REQUEST = RestartRequest((Role.DECODE, Role.SERVER))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only directory that is searched for fleets; its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="fleets-") as name:
        monkeypatch.setattr(running_fleets, "parent_directory", lambda: Path(name))
        monkeypatch.setattr("tempfile.gettempdir", lambda: name)
        yield Path(name)


def test_a_fleet_is_found_while_it_runs(place: Path) -> None:
    with pytest.raises(CommandFailed, match="no `triolet serve` of this user runs here; start one"):
        find_fleet(None)
    with private_directory(place) as one:
        write_note(one, Note(8000, "http://127.0.0.1", {"decode-0": "ipc:///x"}))
        assert find_fleet(None).directory == one
        assert find_fleet(8000).supervisor_socket.parent == one
        with pytest.raises(CommandFailed, match="on port 8001"):
            find_fleet(8001)
        with private_directory(place) as other:
            write_note(other, Note(7000, "http://127.0.0.1", {"decode-0": "ipc:///x"}))
            assert find_fleet(7000).directory == other
            with pytest.raises(ConfigError, match="2 fleets run here, on ports 7000, 8000"):
                find_fleet(None)
        assert find_fleet(None).directory == one


def test_a_fleet_of_the_release_before_is_found(place: Path) -> None:
    with private_directory(place) as one:
        (one / NOTE).write_text('{"port": 8000, "processes": ["server", "decode-0"]}')
        assert find_fleet(8000).note == Note(8000)


def test_a_control_without_a_fleet_is_for_model_orders_only(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(config: ControlConfig) -> None:
        for port in (None, 7100):
            with pytest.raises(CommandFailed, match="no `triolet serve` of this user runs here"):
                find_fleet(port)
            found = find_fleet(port, with_control=True)
            assert str(found.directory) == config.directory
        with private_directory(place) as fleet:
            write_note(fleet, Note(8000))
            assert find_fleet(None).directory == fleet
            with pytest.raises(ConfigError, match="2 fleets run here, on ports 7100, 8000"):
                find_fleet(None, with_control=True)

    monkeypatch.setattr(process, "parent_directory", lambda: place)
    monkeypatch.setattr(process, "main", main)
    process.run_alone(ControlConfig(address="tcp://127.0.0.1:7100"))


def test_what_a_dead_supervisor_left_is_no_fleet(place: Path) -> None:
    with private_directory(place) as dead:
        write_note(dead, Note(8000, "http://127.0.0.1", {}))
        saved = {path.name: path.read_bytes() for path in dead.iterdir()}
    dead.mkdir()
    for name, content in saved.items():
        (dead / name).write_bytes(content)
    broken = place / "triolet-broken"
    broken.mkdir()
    (broken / NOTE).write_text("no note")
    with pytest.raises(CommandFailed):
        find_fleet(None)


class Obedient:
    """A command that reports the request as text."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers
        self.requests: list[Request] = []
        self.done = trio.Event()

    async def obey(self, request: Request, tell: Tell) -> None:
        self.requests.append(request)
        for answer in self.answers:
            await tell(answer)
        self.done.set()


@asynccontextmanager
async def answering(path: Path, supervisor: Obedient) -> AsyncIterator[None]:
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(answer_commands, path, supervisor.obey)
            yield
            nursery.cancel_scope.cancel()


async def heard(path: Path, request: Request = REQUEST) -> list[Answer]:
    steps: list[Answer] = []
    end = await ask(path, request, lambda text: steps.append(StepBegan(text)))
    return [*steps, end]


async def test_a_command_hears_each_step_and_the_end(tmp_path: Path) -> None:
    said = [StepBegan("decode-0: draining"), StepBegan("server: …"), OrderFinished()]
    supervisor = Obedient(*said)
    async with answering(tmp_path / "s", supervisor):
        assert await heard(tmp_path / "s") == said
    assert supervisor.requests == [REQUEST]


async def test_a_command_that_is_refused_hears_each_step_and_fails(tmp_path: Path) -> None:
    steps: list[str] = []
    supervisor = Obedient(StepBegan("decode-0: draining"), OrderRefused("not now"))
    async with answering(tmp_path / "s", supervisor):
        with pytest.raises(CommandFailed, match=r"^not now$"):
            await ask(tmp_path / "s", REQUEST, steps.append)
    assert steps == ["decode-0: draining"]


@pytest.mark.parametrize("request_", [StartModelRequest("a"), StopModelRequest("a")])
async def test_a_model_is_named_in_requests(tmp_path: Path, request_: Request) -> None:
    supervisor = Obedient(StepBegan("a.decode-0: starting"), OrderFinished())
    async with answering(tmp_path / "s", supervisor):
        assert await heard(tmp_path / "s", request_) == [*supervisor.answers]
    assert supervisor.requests == [request_]


async def test_models_are_one_line_of_json(tmp_path: Path) -> None:
    worker = RunningWorker("a.decode-0", Role.DECODE, 7, is_ready=True)
    models = ModelsAnswer([ModelStatus("a", RunState.RUNNING, [worker])])
    async with answering(tmp_path / "s", Obedient(models)):
        assert await heard(tmp_path / "s", ModelsRequest()) == [models]
        async with await trio.open_unix_socket(str(tmp_path / "s")) as stream:
            await stream.send_all(b'{"request":"models"}\n')
            said = b"".join([piece async for piece in stream])
    shown = {"name": "a.decode-0", "role": "decode", "pid": 7, "is_ready": True, "gpu_memory": None}
    assert json.loads(said) == {
        "event": "models",
        "models": [
            {
                "name": "a",
                "state": "running",
                "workers": [shown],
                "failure": None,
                "worker_seconds": 0.0,
            }
        ],
        "run": "",
        "configs": [],
        "served": [],
        "routes": {},
    }


async def test_what_a_command_began_goes_on_without_it(tmp_path: Path) -> None:
    supervisor = Obedient(*[StepBegan("x" * 10_000)] * 100, OrderFinished())
    async with answering(tmp_path / "s", supervisor):
        async with await trio.open_unix_socket(str(tmp_path / "s")) as stream:
            await stream.send_all(msgspec.json.encode(REQUEST) + b"\n")
            await stream.receive_some(10)
        await supervisor.done.wait()


@pytest.mark.parametrize(
    "line",
    [
        b'{"request": "stop"}\n',
        b"\n",
        b'{"request": "restart"}\n',
        b'{"request": "start_model"}\n',
        b'{"request": "\xff"}\n',
        b"x" * (MAX_LINE_BYTES + 1),
        b"",
    ],
)
async def test_a_request_that_makes_no_sense_is_refused(tmp_path: Path, line: bytes) -> None:
    supervisor = Obedient(OrderFinished())
    async with (
        answering(tmp_path / "s", supervisor),
        await trio.open_unix_socket(str(tmp_path / "s")) as stream,
    ):
        await stream.send_all(line)
        await stream.send_eof()
        said = b"".join([piece async for piece in stream])
    assert b"is invalid for this supervisor" in said
    assert not supervisor.requests


async def test_a_command_that_says_nothing_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_socket, "REQUEST_TIMEOUT_S", 0.01)
    async with (
        answering(tmp_path / "s", Obedient()),
        await trio.open_unix_socket(str(tmp_path / "s")) as stream,
    ):
        assert b"refused" in b"".join([piece async for piece in stream])


async def test_a_supervisor_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="is gone; its log says why"):
        await heard(tmp_path / "nobody")
    async with answering(tmp_path / "s", Obedient(StepBegan("and then it died"))):
        with pytest.raises(CommandFailed, match="is gone; its log says why"):
            await heard(tmp_path / "s")
