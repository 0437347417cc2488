"""`triolet model ps|start|stop`: what they ask a fleet, print and record."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from ops import running_fleets
from ops.cli import main
from ops.cli.model_processes import Served, memory_bytes, rows
from ops.running_fleets import Note, RunningFleet
from ops.supervisor.model_status import ModelState, ModelStatus, WorkerStatus
from ops.supervisor.supervisor_socket import (
    Finished,
    Models,
    ModelsRequest,
    Refused,
    StartModelRequest,
    StepBegan,
    StopModelRequest,
    answer_commands,
)
from triolet.ids import Role

if TYPE_CHECKING:
    from pathlib import Path

    from ops.supervisor.supervisor_socket import Answer, Request, Tell

PATIENCE_S = 60.0
WORKER = WorkerStatus("chat.decode-0", Role.DECODE, os.getpid(), is_ready=True)
FAILED = ModelStatus("code", ModelState.FAILED, [], "code.decode-0 exited with code 1")
MODELS = Models([ModelStatus("chat", ModelState.RUNNING, [WORKER]), FAILED])


async def obeyed(
    place: Path, monkeypatch: pytest.MonkeyPatch, answers: list[Answer], *words: str
) -> tuple[int, list[Request]]:
    """Run `triolet model …` against a supervisor that gives these answers; return its exit code
    and what it asked."""
    fleet = RunningFleet(place, Note(8000, "http://127.0.0.1:1", {}))
    monkeypatch.setattr(running_fleets, "running_fleets", lambda: [fleet])
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    asked: list[Request] = []

    async def obey(request: Request, tell: Tell) -> None:
        asked.append(request)
        for answer in answers:
            await tell(answer)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(answer_commands, fleet.supervisor_socket, obey)
            code = await trio.to_thread.run_sync(partial(main, ["model", *words]))
            nursery.cancel_scope.cancel()
    return code, asked


@pytest.mark.parametrize(
    ("word", "request_", "action"),
    [
        ("start", StartModelRequest("chat"), "model.start"),
        ("stop", StopModelRequest("chat"), "model.stop"),
    ],
)
@pytest.mark.parametrize("is_done", [True, False])
async def test_a_model_is_started_and_stopped_by_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    word: str,
    request_: Request,
    action: str,
    is_done: bool,
) -> None:
    last = Finished() if is_done else Refused("no model is called 'chat'")
    answers: list[Answer] = [StepBegan("chat.decode-0: at it"), last]
    code, asked = await obeyed(tmp_path, monkeypatch, answers, word, "chat")
    assert asked == [request_]
    out, err = capsys.readouterr()
    assert "s  chat.decode-0: at it\n" in out
    assert code == (0 if is_done else 1)
    assert ("done: its workers are" in out, "no model is called" in err) == (is_done, not is_done)
    assert main(["audit", "export"]) == 0
    *_, begun, ended = map(json.loads, capsys.readouterr().out.splitlines())
    assert {(one["action"], one["subject"]) for one in (begun, ended)} == {
        (action, "port 8000: chat")
    }
    assert ended["outcome"] == ("done" if is_done else "failed")


async def test_models_are_shown_although_the_server_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, asked = await obeyed(tmp_path, monkeypatch, [MODELS], "ps")
    assert (code, asked) == (0, [ModelsRequest()])
    out, err = capsys.readouterr()
    assert "http://127.0.0.1:1 does not say what it serves: " in err
    chat, worker, code_line, failure = out.splitlines()
    assert chat == "chat  -  workers running"
    assert worker.split()[:4] == ["chat.decode-0", "pid", str(os.getpid()), "ready"]
    assert code_line == "code  -  workers failed"
    assert failure.strip() == FAILED.failure


def test_what_server_and_supervisor_say_is_one_row(tmp_path: Path) -> None:
    (tmp_path / str(os.getpid())).mkdir()
    rollup = "00400000-7fff r--p [rollup]\nRss:  9 kB\nPss:    7 kB\nPss_Dirty: 3 kB\n"
    (tmp_path / str(os.getpid()) / "smaps_rollup").write_text(rollup)
    served = [Served("chat", "sha256:1", "serving"), Served("other")]
    chat, code = rows(MODELS.models, served, tmp_path)
    assert (chat.digest, chat.state, chat.workers_state) == ("sha256:1", "serving", "running")
    assert chat.workers[0].memory_bytes == 7 * 1024
    assert (code.digest, code.state, code.failure) == (None, None, FAILED.failure)
    (only,) = rows([ModelStatus("", ModelState.RUNNING, [])], served)
    assert only.name == "chat"


def test_a_process_that_is_gone_has_no_memory(tmp_path: Path) -> None:
    assert memory_bytes(1, tmp_path) is None
    assert (memory_bytes(os.getpid()) or 0) > 0
