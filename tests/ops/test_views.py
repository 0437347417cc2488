"""What `triolet serve` shows: one JSON line for programs, a table for people."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from ops.models.several import each_model
from ops.settings.form import Settings
from ops.supervisor.json_view import JsonView
from ops.supervisor.plan import FleetPlan, ModelPlan
from ops.supervisor.restart_policy import Ending, GiveUp, Restart
from ops.supervisor.terminal_view import TerminalView, log_line, pools_line, room_for
from triolet.config import ModelConfig, ServerConfig
from triolet.status import Progress, ServerReady, WorkerReady

if TYPE_CHECKING:
    from ops.supervisor.view import View

URL = "http://127.0.0.1:8000"
SETTINGS = Settings(server=ServerConfig(model_name="tiny"))
PLAN = FleetPlan(SETTINGS, (ModelPlan(Path("/models/tiny"), SETTINGS),))


def worker(name: str, num_blocks: int = 640, max_model_len: int = 1024) -> WorkerReady:
    return WorkerReady(
        name=name,
        parameters=4_877_568,
        dtype="float32",
        device="cpu",
        num_blocks=num_blocks,
        block_size=16,
        pool_bytes=64 << 20,
        max_model_len=max_model_len,
    )


def live_through_a_day(view: View) -> None:
    """Start, serve, lose a worker, get it back, stop."""
    with view:
        for pid, name in enumerate(["decode-0", "prefill-0", "server"], 101):
            view.started(name, pid)
        view.reported("decode-0", Progress("weights", 1, 2))
        view.reported("decode-0", Progress("weights", 2, 2))
        for name in ("decode-0", "prefill-0"):
            view.reported(name, worker(name))
        view.reported("server", ServerReady(URL))
        view.serving(URL)
        view.ended("decode-0", Ending(-9), Restart(0.1))
        view.started("decode-0", 104)
        view.reported("decode-0", worker("decode-0"))
        view.started("decode-spare", 105)
        view.reported("decode-spare", Progress("weights", 1, 2))
        view.reported("decode-spare", worker("decode-spare"))
        view.ended("decode-0", Ending(0), Restart(0.1, was_asked_for=True))
        view.ended("decode-spare", Ending(0), None)
        view.stopping()
        view.ended("server", Ending(0), None)


async def test_a_program_gets_one_line_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    live_through_a_day(JsonView(PLAN))
    out = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    (ready,) = map(json.loads, out)
    assert ready["event"] == "ready"
    assert ready["url"] == URL
    assert ready["api"] == f"{URL}/v1"
    pids = {"supervisor": os.getpid(), "server": 103, "prefill-0": 102, "decode-0": 101}
    assert ready["pids"] == pids
    assert list(ready["pids"]) == list(pids)


async def shown(terminal: bool = True) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=110, force_terminal=terminal, color_system=None)
    live_through_a_day(TerminalView(PLAN, console))
    return screen.getvalue()


async def test_a_person_gets_a_table_with_all_that_is_needed() -> None:
    screen = await shown()
    for words in (
        "tiny",
        "/models/tiny",
        "4.9M parameters, float32, context of 1,024 tokens",
        "KV: 2 workers × 64 MiB: 10 sequences of 1,024 tokens each; change with --kv-pool",
        "640 × 16",
        "10,240",
        "64 MiB",
        "10 sequences of 1,024 tokens",
        f"{URL}/v1",
        f"{URL}/metrics",
        "decode-0 was killed by SIGKILL; starting it again in 0.1 s",
        "decode-0 is back (pid 104)",
        "decode-spare is there (pid 105)",
        "decode-0 was drained and left; starting it afresh",
        "decode-spare left, as it was asked to",
        "Stopping: answers under way may finish within 30 s",
        "Stopped.",
    ):
        assert words in screen, words
    rows = [line.split()[:2] for line in screen.splitlines()]
    assert rows.index(["server", "103"]) < rows.index(["prefill-0", "102"])
    assert rows.index(["prefill-0", "102"]) < rows.index(["decode-0", "101"])


MODELS = Settings(models={"chat": ModelConfig("/models/chat"), "code": ModelConfig("/models/code")})
TWO = FleetPlan(
    MODELS, tuple(ModelPlan(Path(one.fleet.model or ""), one) for one in each_model(MODELS))
)
CHAT = ("chat.prefill-0", "chat.decode-0")
FAILURE = "code.decode-0 exited with code 1 3 times in a row"


def live_with_two_models(view: View) -> None:
    """Start, lose one of two models before it was ready, serve."""
    with view:
        for pid, name in enumerate(["server", "control", *CHAT, "code.decode-0"], 101):
            view.started(name, pid)
        for name in CHAT:
            view.reported(name, worker(name))
        failure = GiveUp(FAILURE, 1)
        view.ended("code.decode-0", Ending(1), failure)
        view.failed("code", failure)
        view.serving(URL)
        view.stopping()


async def test_the_ready_line_names_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    live_with_two_models(JsonView(TWO))
    (ready,) = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if '"ready"' in line
    ]
    assert ready["models"] == {"chat": "/models/chat", "code": "/models/code"}
    assert "model" not in ready
    assert ready["pids"]["chat.decode-0"] == 104
    assert "code.decode-0" not in ready["pids"], "it is gone"


async def test_a_person_sees_which_model_has_failed() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=110, force_terminal=True, color_system=None)
    live_with_two_models(TerminalView(TWO, console))
    shown = screen.getvalue()
    assert f"Model code has failed, others go on: {FAILURE}" in shown
    table = shown.partition("others go on")[2]
    rows = [line.split() for line in table.splitlines()]
    for last in (["Model", "chat"], ["Model", "code"], ["not", "running"], ["code.decode-0", "-"]):
        assert last in [row[-2:] for row in rows]
    assert ["chat.decode-0", "104"] in [row[:2] for row in rows]


async def test_giving_up_takes_the_bars_away() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=110, force_terminal=True, color_system=None)
    with TerminalView(PLAN, console) as view:
        view.started("decode-0", 7)
        view.ended("decode-0", Ending(2, "no weights"), GiveUp("decode-0: no weights", 2))
        view.stopping()
        console.print("next line")
    assert screen.getvalue().rstrip().splitlines()[-1].endswith("next line")
    assert "Stopped" not in screen.getvalue()


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "text"),
    [
        (640, 1024, "10 sequences of 1,024 tokens"),
        (64, 1024, "1 sequence of 1,024 tokens"),
        (63, 1024, "1 sequence of 1,008 tokens"),
        (65, 1025, "1 sequence of 1,025 tokens"),
        (129, 1025, "1 sequence of 1,025 tokens"),
    ],
)
def test_room_is_counted_in_whole_blocks(num_blocks: int, max_model_len: int, text: str) -> None:
    assert room_for(worker("decode-0", num_blocks, max_model_len)) == text


def test_pools_of_unequal_workers_are_named_one_by_one() -> None:
    assert pools_line([worker("prefill-0", 64), worker("decode-0"), worker("decode-1")]) == (
        "KV: 1 worker × 64 MiB: 1 sequence of 1,024 tokens each; "
        "2 workers × 64 MiB: 10 sequences of 1,024 tokens each; change with --kv-pool"
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            b'{"event":"lost","level":"warning","timestamp":"t","process":"p","peer":"a","n":2}',
            'server     lost peer="a" n=2',
        ),
        (b'{"event":"x","exception":"Trace\\nEnd"}', "server     x \nTrace\nEnd"),
        (b'{"event":"\\u001b[2Jred"}', "server     �[2Jred "),
        (b"plain \x1b[31mwords\xff", "server     plain �[31mwords�"),
        (b"[1]", "server     [1]"),
    ],
)
def test_log_lines_are_shown_without_control_characters(line: bytes, text: str) -> None:
    assert log_line("server", line).plain == text
