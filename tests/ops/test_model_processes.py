"""Tests of `triolet model ps`."""

from __future__ import annotations

import json
import os
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import trio

from ops import running_fleets
from ops.cli import main
from ops.cli.model_processes import Served, memory_bytes, rows, served_models
from ops.running_fleets import Note, RunningFleet
from ops.supervisor.model_status import ModelStatus, RunningWorker, RunState
from ops.supervisor.supervisor_socket import (
    ModelsAnswer,
    ModelsRequest,
    OrderRefused,
    answer_commands,
)
from tests.threaded import running_server
from triolet.config.routes import Route
from triolet.ids import Role

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from ops.supervisor.supervisor_socket import Answer, Request, Tell

PATIENCE_S = 60.0
WORKER = RunningWorker("chat.decode-0", Role.DECODE, os.getpid(), is_ready=True)
FAILED = ModelStatus("code", RunState.FAILED, [], "code.decode-0 exited with code 1")
MODELS = ModelsAnswer([ModelStatus("chat", RunState.RUNNING, [WORKER]), FAILED])


async def shown(
    place: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> tuple[int, list[Request]]:
    """Run `triolet model ps` against a supervisor with this answer; return the exit code and the
    requests."""
    fleet = RunningFleet(place, Note(8000, "http://127.0.0.1:1", {}))
    monkeypatch.setattr(running_fleets, "running_fleets", lambda: [fleet])
    asked: list[Request] = []

    async def obey(request: Request, tell: Tell) -> None:
        asked.append(request)
        await tell(answer)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(answer_commands, fleet.supervisor_socket, obey)
            code = await trio.to_thread.run_sync(partial(main, ["model", "ps"]))
            nursery.cancel_scope.cancel()
    return code, asked


async def test_models_are_shown_although_the_server_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, asked = await shown(tmp_path, monkeypatch, MODELS)
    assert (code, asked) == (0, [ModelsRequest()])
    out, err = capsys.readouterr()
    assert "http://127.0.0.1:1 did not report all its models: " in err
    chat, worker, code_line, failure = out.splitlines()
    assert chat == "chat  -  workers running"
    assert worker.split()[:4] == ["chat.decode-0", "pid", str(os.getpid()), "ready"]
    assert code_line == "code  -  workers failed"
    assert failure.strip() == FAILED.failure


async def test_a_supervisor_that_refuses_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = await shown(
        tmp_path, monkeypatch, OrderRefused("the request is invalid for this supervisor")
    )
    assert (code, capsys.readouterr()) == (
        1,
        ("", "triolet: the request is invalid for this supervisor\n"),
    )


def test_what_server_and_supervisor_say_is_one_row(tmp_path: Path) -> None:
    (tmp_path / str(os.getpid())).mkdir()
    rollup = "00400000-7fff r--p [rollup]\nRss:  9 kB\nPss:    7 kB\nPss_Dirty: 3 kB\n"
    (tmp_path / str(os.getpid()) / "smaps_rollup").write_text(rollup)
    served = [Served("chat", "sha256:1", "serving"), Served("other")]
    chat, code = rows(MODELS.models, served, proc=tmp_path)
    assert (chat.digest, chat.state, chat.workers_state) == ("sha256:1", "serving", "running")
    assert chat.workers[0].memory_bytes == 7 * 1024
    assert (code.digest, code.state, code.failure) == (None, None, FAILED.failure)
    route = {"chat": Route({"chat": 1, "chat-2": 0}, "chat", 1)}
    both = [ModelStatus(name, RunState.RUNNING, []) for name in ("chat", "chat-2")]
    assert [(one.name, one.state) for one in rows(both, served, routes=route)] == [
        ("chat", served[0].state),
        ("chat-2", None),
    ]
    (only,) = rows([ModelStatus("", RunState.RUNNING, [])], served)
    assert only.name == "chat"
    (silent,) = rows([ModelStatus("", RunState.RUNNING, [])], [], ("chat",))
    assert (silent.name, silent.state) == ("chat", None)


class Closed(BaseHTTPRequestHandler):
    """A server with tenants, which lists its models only to requests with a key."""

    def do_GET(self) -> None:
        ready = {"status": "ready", "model": "chat", "workers": {}}
        is_open = self.path == "/health/ready"
        self.send_response(200 if is_open else 401)
        self.end_headers()
        self.wfile.write(json.dumps(ready if is_open else {"error": {}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def test_a_model_is_shown_as_it_is_where_the_list_of_models_needs_a_key() -> None:
    with running_server(HTTPServer(("127.0.0.1", 0), Closed)) as server:
        served, objection = served_models(f"http://127.0.0.1:{server.server_port}")
    assert served == [Served("chat", None, "serving")]
    assert "TRIOLET_API_KEY" in objection


def test_a_process_that_is_gone_has_no_memory(tmp_path: Path) -> None:
    assert memory_bytes(1, tmp_path) is None
    assert (memory_bytes(os.getpid()) or 0) > 0
