"""Tests of the output of `triolet serve`: JSON for programs, a table for terminals."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from rich.console import Console

from ops.models.several import each_model
from ops.settings.form import Settings
from ops.supervisor.json_view import JsonView
from ops.supervisor.plan import FleetPlan, ModelPlan
from ops.supervisor.restart_policy import Ending, GiveUp, Restart
from ops.supervisor.terminal_view import TerminalView, log_line, pools_line, room_for
from triolet.config import FleetModelConfig, ProcessConfig, ServerConfig
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


WORKER = "decode-0@d1435dae48ca8ee6"
REFUSED = {
    "event": "worker_refused",
    "level": "error",
    "worker": WORKER,
    "reason": "this worker stood still for longer than its leases: send HELLO again",
}
EPISODE: list[tuple[str, dict[str, object]]] = [
    ("server", {"event": "worker_lost", "level": "warning", "worker": WORKER, "cause": "silent"}),
    ("decode-0", {"event": "process_paused", "level": "warning", "seconds": 1.8}),
    ("decode-0", {"event": "fenced", "level": "warning", "epoch": 5}),
    ("decode-0", {"event": "server_gone", "level": "warning", "server": "server@4a65"}),
    *[("server", dict(REFUSED)) for _ in range(6)],
    ("server", {"event": "worker_joined", "level": "warning", "worker": WORKER, "away_s": 1.8}),
]


def line_of(entry: dict[str, object]) -> bytes:
    return json.dumps(entry | {"timestamp": "2026-01-02T11:03:07Z"}).encode()


def noon() -> datetime:
    return datetime(2026, 1, 2, 12, 3, 7)


def live_through_a_day(view: View) -> None:
    """Start, serve, lose a worker, restart it, stop."""
    with view:
        for pid, name in enumerate(["decode-0", "prefill-0", "server"], 101):
            view.started(name, pid)
        view.reported("decode-0", Progress("weights", 1, 2))
        view.reported("decode-0", Progress("weights", 2, 2))
        for name in ("decode-0", "prefill-0"):
            view.reported(name, worker(name))
        view.reported("server", ServerReady(URL))
        view.serving(URL)
        view.ended("decode-0", Ending(-9), Restart(0.0, num_deaths=1))
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
    live_through_a_day(TerminalView(PLAN, console, noon))
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
        "12:03:07 decode-0 was killed by SIGKILL; restarting it at once",
        "12:03:07 decode-0 has restarted (pid 104)",
        "decode-spare has started (pid 105)",
        "decode-0 was drained and has exited; restarting it",
        "decode-spare has exited as requested",
        "Stopping: running requests may finish within 30 s",
        "12:03:07 Stopped.",
    ):
        assert words in screen, words
    rows = [line.split()[:2] for line in screen.splitlines()]
    assert rows.index(["server", "103"]) < rows.index(["prefill-0", "102"])
    assert rows.index(["prefill-0", "102"]) < rows.index(["decode-0", "101"])


MODELS = Settings(
    models={"chat": FleetModelConfig("/models/chat"), "code": FleetModelConfig("/models/code")}
)
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
    assert f"Model code has failed, the others keep running: {FAILURE}" in shown
    table = shown.partition("the others keep running")[2]
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
            '12:03:07 server     lost peer="a" n=2',
        ),
        (b'{"event":"x","exception":"Trace\\nEnd"}', "12:03:07 server     x \nTrace\nEnd"),
        (b'{"event":"\\u001b[2Jred"}', "12:03:07 server     �[2Jred "),
        (b"plain \x1b[31mwords\xff", "12:03:07 server     plain �[31mwords�"),
        (b'{"event":"x","\\u001b[2J":1}', "12:03:07 server     x �[2J=1"),
        (b'{"event":"x","timestamp":"0001-01-01T00:00:00+14:00"}', "12:03:07 server     x "),
        (b"[1]", "12:03:07 server     [1]"),
    ],
)
def test_log_lines_are_shown_without_control_characters(line: bytes, text: str) -> None:
    assert log_line("server", line, "12:03:07").plain == text


async def test_a_worker_that_was_silent_and_is_back_is_one_line_with_its_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=110)
    with TerminalView(PLAN, console, noon) as view:
        for process, entry in EPISODE:
            view.logged(process, line_of(entry))
        view.logged("decode-0", line_of({"event": "fenced", "level": "warning", "epoch": 7}))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(view.run)
            await trio.sleep(3600)
            nursery.cancel_scope.cancel()
    [line] = [one for one in screen.getvalue().splitlines() if "decode-0" in one]
    at = datetime(2026, 1, 2, 11, 3, 7, tzinfo=UTC).astimezone()
    words = "decode-0 was silent for 1.8 s and is back; 0 requests were affected"
    assert line == f"{at:%H:%M:%S} {words}"


ESCAPE = "\x1b]0;title\x07"


@pytest.mark.parametrize(
    "entry",
    [
        {"event": "worker_lost", "level": "warning", "worker": f"decode-0{ESCAPE}"},
        {"event": "worker_refused", "worker": WORKER, "reason": f"no{ESCAPE}\nserver is well"},
        {"event": "worker_joined", "worker": f"decode-0{ESCAPE}", "away_s": 1.0},
    ],
)
async def test_what_is_told_of_a_worker_moves_no_cursor_and_forges_no_line(
    entry: dict[str, object],
) -> None:
    screen = io.StringIO()
    with TerminalView(PLAN, Console(file=screen, width=110), noon) as view:
        for _ in range(2):
            view.logged("server", line_of(entry))
    assert screen.getvalue()
    assert "\x1b" not in screen.getvalue()
    assert not any(line.startswith("server is") for line in screen.getvalue().splitlines())


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"worker_joined","away_s":null}',
        b'{"event":"worker_lost","level":"warning","requests":"many"}',
        b'{"event":"process_paused","seconds":[]}',
        b'{"event":"process_paused","seconds":1e999}',
        b'{"event":"x","timestamp":"0001-01-01T00:00:00+14:00"}',
        b"[" * 50_000,
        b'{"\\ud800":1}',
    ],
    ids=lambda line: line[:40].decode(),
)
async def test_no_line_of_a_process_ends_the_view(line: bytes) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with TerminalView(PLAN, Console(file=screen, width=110), noon) as view:
        view.logged("server", line)
    assert screen.tell()


async def test_debug_shows_every_line_of_an_episode() -> None:
    screen = io.StringIO()
    settings = replace(SETTINGS, process=ProcessConfig(log_level="debug"))
    plan = replace(PLAN, settings=settings)
    with TerminalView(plan, Console(file=screen, width=110), noon) as view:
        for process, entry in EPISODE:
            view.logged(process, line_of(entry))
    lines = [one for one in screen.getvalue().splitlines() if "decode-0" in one]
    assert len(lines) == len(EPISODE)


async def test_further_deaths_say_how_many_there_were_and_when_the_next_start_is() -> None:
    screen = io.StringIO()
    with TerminalView(PLAN, Console(file=screen, width=300), noon) as view:
        view.ended("decode-0", Ending(-9), Restart(3.2, num_deaths=5, within_s=12.0))
    assert (
        "12:03:07 decode-0 was killed by SIGKILL; crash 5 in 12.0 s: restarting it at "
        "12:03:10, in 3.2 s (the delay doubles until it runs for 30 s)"
    ) in screen.getvalue()
