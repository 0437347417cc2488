"""Tests of the supervisor with real processes of fake roles that behave well or badly."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from ops.supervisor.process_spec import ProcessSpec
from ops.supervisor.restart_policy import Ending, GiveUp, Restart
from ops.supervisor.supervisor import Supervisor
from triolet.config import SupervisorConfig
from triolet.ids import Role
from triolet.status import ProcessFailed, Progress, ServerReady

from .recording import ROOT, Recorder, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.slow

EXIT_S = 60.0
"""Time until processes that were asked to exit are killed; none that can exit takes so long."""
CONFIG = SupervisorConfig(restart_delay_s=0.01, max_restart_delay_s=0.02, worker_exit_s=EXIT_S)
PATIENCE_S = 120.0


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@asynccontextmanager
async def running(
    journal: Path, *names: str, config: SupervisorConfig = CONFIG, wants_logs: bool = False
) -> AsyncIterator[tuple[Supervisor, Recorder]]:
    """Run fake roles until the block ends; then stop them and check that none is left."""
    recorder = Recorder()
    on_log = recorder.logged if wants_logs else None
    specs = [spec(name, journal) for name in names]
    supervisor = Supervisor(specs, config, EXIT_S, recorder, on_log)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            yield supervisor, recorder
            supervisor.stop()
    assert all(is_gone(pid) for pids in recorder.pids.values() for pid in pids)


async def test_the_server_ends_before_the_workers_are_told_to(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with running(journal, "server-0", "prefill-0", "decode-0") as (supervisor, recorder):
        await supervisor.wait_all_ready()
    words = journal.read_text().splitlines()
    assert words[3] == "server-0 ended"
    assert sorted(words[4:]) == ["decode-0 ended", "prefill-0 ended"]
    assert [(ending, verdict) for _, ending, verdict in recorder.endings] == [(Ending(0), None)] * 3


async def test_a_killed_process_comes_back_by_itself(tmp_path: Path) -> None:
    async with running(tmp_path / "journal", "decode-0", "decode-1") as (supervisor, recorder):
        await supervisor.wait_all_ready()
        for life in (1, 2):
            os.kill(recorder.pids["decode-0"][-1], signal.SIGKILL)
            while len([name for name, _ in recorder.reports if name == "decode-0"]) <= life:
                await recorder.news.wait()
    assert len(set(recorder.pids["decode-0"])) == 3
    assert len(recorder.pids["decode-1"]) == 1
    assert recorder.endings[0] == ("decode-0", Ending(-9), Restart(0.0, num_deaths=1))


async def test_a_process_has_the_cores_that_it_was_given(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    recorder = Recorder()
    pinned = replace(spec("decode-0", tmp_path / "journal"), cores=(core,))
    supervisor = Supervisor([pinned], CONFIG, EXIT_S, recorder)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            await supervisor.wait_all_ready()
            assert os.sched_getaffinity(recorder.pids["decode-0"][0]) == {core}
            supervisor.stop()


async def outcome_of(
    journal: Path, *names: str, config: SupervisorConfig = CONFIG
) -> tuple[GiveUp | None, Recorder]:
    """Run fake roles until the supervisor ends by itself."""
    recorder = Recorder()
    supervisor = Supervisor([spec(name, journal) for name in names], config, EXIT_S, recorder)
    with trio.fail_after(PATIENCE_S):
        outcome = await supervisor.run()
    assert all(is_gone(pid) for pids in recorder.pids.values() for pid in pids)
    return outcome, recorder


async def test_a_process_that_cannot_work_ends_all_with_its_own_words(tmp_path: Path) -> None:
    outcome, recorder = await outcome_of(tmp_path / "journal", "server-0", "decode-0:broken")
    assert outcome == GiveUp("decode-0: config.json is missing; download it", 2)
    assert ("decode-0", ProcessFailed("config.json is missing; download it")) in recorder.reports


async def test_a_process_that_dies_while_starting_is_tried_three_times(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    outcome, recorder = await outcome_of(journal, "decode-0:crash")
    assert journal.read_text() == "decode-0 started\n" * 3
    assert outcome is not None
    assert outcome.exit_code == 1
    assert "exited with code 1 3 times in a row" in outcome.message
    assert recorder.endings[-1][2] == outcome


async def test_a_process_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    config = SupervisorConfig(start_silence_s=0.5, max_failed_starts=1)
    outcome, _ = await outcome_of(tmp_path / "journal", "decode-0:silent", config=config)
    assert outcome is not None
    assert "reported nothing while starting" in outcome.message


async def test_a_program_that_does_not_exist_is_named() -> None:
    missing = ProcessSpec("decode-0", Role.DECODE, ("/nowhere/triolet",))
    outcome = await Supervisor([missing], CONFIG, 1.0, Recorder()).run()
    assert outcome is not None
    assert outcome.message.startswith("cannot start /nowhere/triolet")


async def test_a_worker_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    config = SupervisorConfig(worker_exit_s=0.2)
    names = ("server-0", "decode-0:stubborn")
    async with running(tmp_path / "journal", *names, config=config) as (supervisor, recorder):
        await supervisor.wait_all_ready()
    assert ("decode-0", Ending(-9), None) in recorder.endings


async def test_the_second_request_to_stop_kills_at_once(tmp_path: Path) -> None:
    config = SupervisorConfig(worker_exit_s=3600.0)
    async with running(tmp_path / "journal", "decode-0:stubborn", config=config) as (
        supervisor,
        recorder,
    ):
        await supervisor.wait_all_ready()
        supervisor.stop()
        await trio.testing.wait_all_tasks_blocked()
    assert recorder.endings == [("decode-0", Ending(-9), None)]
    assert recorder.stops == 1


async def test_output_is_parted_into_reports_and_logs(tmp_path: Path) -> None:
    async with running(tmp_path / "journal", "server-0:chatty", wants_logs=True) as (
        supervisor,
        recorder,
    ):
        await supervisor.wait_all_ready()
    assert recorder.reports == [
        ("server-0", Progress("weights", 1, 2)),
        ("server-0", ServerReady("http://server-0")),
    ]
    assert set(recorder.logs) == {
        b"a library prints",
        b"x" * CONFIG.max_line_bytes,
        b'{"event":"loaded"}',
        b"unfinished",
    }


def wait_gone(pid: int) -> None:
    """Wait for the end of a process that is not a child."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([watch], [], [], PATIENCE_S)[0], f"{pid} lives on"
    finally:
        os.close(watch)


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd")
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGTERM, 0),
        (signal.SIGINT, 0),
        (signal.SIGHUP, 0),
    ],
)
def test_no_process_outlives_its_supervisor(
    tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    names = ("server-0", "prefill-0", "decode-0")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ops.fake_supervisor", str(tmp_path / "journal"), *names],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2 * len(names))]
        assert lines.count("ready") == len(names)
        process.send_signal(number)
        for pid in (line for line in lines if line != "ready"):
            wait_gone(int(pid))
        assert process.wait(PATIENCE_S) == exit_code
