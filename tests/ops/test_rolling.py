"""Tests of rolling restarts with real processes of fake roles: order, overlap and failures."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from ops.supervisor.restart_policy import Ending, Restart
from ops.supervisor.rolling import ORDER
from ops.supervisor.slot import RestartFailed
from ops.supervisor.supervisor import Supervisor
from triolet.config import SupervisorConfig
from triolet.ids import Role

from .recording import Recorder, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from ops.supervisor.rolling import RollingStep

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
CONFIG = SupervisorConfig(
    restart_delay_s=0.01, max_restart_delay_s=0.02, ready_poll_s=0.01, worker_exit_s=PATIENCE_S
)


class Fleet:
    """A supervisor of fake roles with its recorded events."""

    def __init__(
        self, journal: Path, names: Sequence[str], spares: Sequence[str], config: SupervisorConfig
    ) -> None:
        self.journal = journal
        self.recorder = Recorder()
        self.steps: list[str] = []
        self.unmet: set[str] = set()
        self.supervisor = Supervisor(
            [spec(name, journal) for name in names],
            config,
            PATIENCE_S,
            self.recorder,
            spares=[spec(name, journal) for name in spares],
        )

    async def restart(self, *roles: Role) -> None:
        async def tell(step: RollingStep) -> None:
            self.steps.append(step.name)

        async def is_met(name: str) -> bool:
            return name not in self.unmet

        await self.supervisor.restart(roles or ORDER, is_met, tell)

    @property
    def words(self) -> list[str]:
        return self.journal.read_text().splitlines()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other processes fulfil."""
    while not condition():  # noqa: ASYNC110 (they set no event)
        await trio.sleep(0.01)


@asynccontextmanager
async def running(
    journal: Path, *names: str, spares: Sequence[str] = (), config: SupervisorConfig = CONFIG
) -> AsyncIterator[Fleet]:
    """Run a fleet until the block ends, then stop it."""
    fleet = Fleet(journal, names, spares, config)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.supervisor.run)
            await fleet.supervisor.wait_all_ready()
            yield fleet
            if not fleet.recorder.stops:
                fleet.supervisor.stop()


async def test_a_role_with_one_worker_is_never_without_one(tmp_path: Path) -> None:
    async with running(
        tmp_path / "journal", "server-0", "decode-0", spares=["decode-spare"]
    ) as fleet:
        await fleet.restart()
        assert fleet.words[2:] == [
            "decode-spare started",
            "decode-0 ended",
            "decode-0 started",
            "decode-spare ended",
            "server-0 started",
            "server-0 handed over",
        ]
        assert fleet.steps == ["decode-spare", "decode-0", "decode-spare", "server-0"]
        assert {name: len(pids) for name, pids in fleet.recorder.pids.items()} == {
            "server-0": 2,
            "decode-0": 2,
            "decode-spare": 1,
        }
        # No crash: requested exits are not recorded as one.
        assert {(ending, verdict) for _, ending, verdict in fleet.recorder.endings} == {
            (Ending(0), None)
        }
        os.kill(fleet.recorder.pids["server-0"][-1], signal.SIGKILL)
        await until(lambda: len(fleet.recorder.pids["server-0"]) == 3)
    assert ("server-0", Ending(-9), Restart(0.0, num_deaths=1)) in fleet.recorder.endings


async def test_several_workers_of_a_role_take_turns(tmp_path: Path) -> None:
    async with running(tmp_path / "journal", "decode-0", "decode-1") as fleet:
        await fleet.restart(Role.DECODE)
        assert fleet.words[2:] == [
            "decode-0 ended",
            "decode-0 started",
            "decode-1 ended",
            "decode-1 started",
        ]


async def test_a_stand_in_that_does_not_come_up_leaves_everything_as_it_was(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "journal", "decode-0", spares=["decode-spare:crash"]) as fleet:
        with pytest.raises(RestartFailed, match="a new decode-spare exited with code 1 before it"):
            await fleet.restart()
        assert len(fleet.recorder.pids["decode-0"]) == 1
        assert "decode-0 ended" not in fleet.words


async def test_a_successor_that_does_not_come_up_leaves_the_server_in_place(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "journal", "server-0:once") as fleet:
        with pytest.raises(RestartFailed, match="a new server-0 exited with code 1"):
            await fleet.restart(Role.SERVER)
        assert "server-0 handed over" not in fleet.words
    assert fleet.words[-1] == "server-0 ended"


async def test_a_worker_that_no_server_finds_ends_the_restart_and_the_stand_in(
    tmp_path: Path,
) -> None:
    config = SupervisorConfig(ready_timeout_s=0.2, ready_poll_s=0.01)
    journal = tmp_path / "journal"
    async with running(journal, "decode-0", spares=["decode-spare"], config=config) as fleet:
        fleet.unmet.add("decode-spare")
        with pytest.raises(
            RestartFailed, match="decode-spare is ready, but no server uses it after 0 s"
        ):
            await fleet.restart()
        assert fleet.words[1:] == ["decode-spare started", "decode-spare ended"]


async def test_a_process_that_does_not_leave_is_killed_and_replaced(tmp_path: Path) -> None:
    config = SupervisorConfig(worker_exit_s=0.2, ready_poll_s=0.01)
    async with running(tmp_path / "journal", "decode-0:stubborn", config=config) as fleet:
        await fleet.restart()
        assert ("decode-0", Ending(-9), None) in fleet.recorder.endings
        assert len(fleet.recorder.pids["decode-0"]) == 2


async def test_one_restart_at_a_time(tmp_path: Path) -> None:
    async with running(tmp_path / "journal", "decode-0") as fleet:
        fleet.unmet.add("decode-0")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.restart)
            await until(lambda: bool(fleet.steps))
            with pytest.raises(RestartFailed, match="already running"):
                await fleet.restart()
            fleet.unmet.clear()
        await fleet.restart()


async def test_a_fleet_that_is_stopped_does_not_finish_its_restart(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with running(journal, "decode-0", "decode-1") as fleet:
        fleet.unmet.add("decode-0")

        async def restart() -> None:
            with pytest.raises(RestartFailed, match="stopped during"):
                await fleet.restart()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(restart)
            await until(lambda: fleet.words.count("decode-0 started") == 2)
            fleet.supervisor.stop()
    assert fleet.words.count("decode-1 started") == 1
    assert fleet.words.count("decode-1 ended") == 1


async def test_a_worker_that_was_told_to_leave_by_somebody_else_comes_back(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "journal", "decode-0") as fleet:
        os.kill(fleet.recorder.pids["decode-0"][0], signal.SIGTERM)
        await until(lambda: len(fleet.recorder.pids["decode-0"]) == 2)
        assert fleet.recorder.endings == [
            ("decode-0", Ending(0), Restart(0.01, was_asked_for=True))
        ]
