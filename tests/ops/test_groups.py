"""Tests of starting, stopping and failing models separately, with real processes of fake roles."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ops.exit_codes import EXIT_BAD_INPUT
from ops.supervisor.group import TRANSITIONS, GroupEvent, GroupPhase
from ops.supervisor.model_status import RunState
from ops.supervisor.rolling import ORDER
from ops.supervisor.slot import RestartFailed
from ops.supervisor.supervisor import Supervisor, running_models
from triolet.config import SupervisorConfig
from triolet.ids import Role

from .recording import Recorder, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from ops.supervisor.restart_policy import GiveUp
    from ops.supervisor.rolling import RollingStep

# One or two seconds each: signals and the order of exits need real processes.
PATIENCE_S = 120.0
CONFIG = SupervisorConfig(
    restart_delay_s=0.01, max_restart_delay_s=0.02, ready_poll_s=0.01, worker_exit_s=PATIENCE_S
)
NAMES = ("server-0", "a.prefill-0", "a.decode-0", "b.decode-0")


class Fleet:
    """A supervisor of fake roles with its recorded events."""

    def __init__(
        self,
        journal: Path,
        *names: str,
        stopped: tuple[str, ...] = (),
        config: SupervisorConfig = CONFIG,
    ) -> None:
        self.journal = journal
        self.recorder = Recorder()
        self.steps: list[str] = []
        self.noted: list[list[str]] = []
        self.outcome: GiveUp | None = None
        self.supervisor = Supervisor(
            [spec(name, journal) for name in names],
            config,
            PATIENCE_S,
            self.recorder,
            spares=[spec("a.decode-spare", journal)],
            stopped=stopped,
        )

    async def run(self) -> None:
        self.outcome = await self.supervisor.run()

    async def note(self, step: RollingStep | str) -> None:
        self.steps.append(str(step))

    async def start(self, name: str) -> None:
        await self.supervisor.start_model(name, self.note)

    async def stop(self, name: str) -> None:
        await self.supervisor.stop_model(name, self.note)

    async def scale(self, role: Role, *names: str) -> None:
        await self.supervisor.scale(
            "a",
            role,
            [spec(name, self.journal) for name in names],
            lambda names: self.noted.append(list(names)),
            self.note,
        )

    async def restart(self, *roles: Role, models: tuple[str, ...] = ()) -> None:
        async def is_met(_: str) -> bool:
            return True

        await self.supervisor.restart(roles or ORDER, is_met, self.note, models)

    @property
    def states(self) -> dict[str, RunState]:
        return {model.name: model.state for model in self.supervisor.models()}

    @property
    def words(self) -> list[str]:
        return self.journal.read_text().splitlines()

    def lives(self, name: str) -> int:
        return len(self.recorder.pids.get(name, []))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other processes fulfil."""
    while not condition():  # noqa: ASYNC110 (they set no event)
        await trio.sleep(0.01)


@asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[Fleet]:
    """Run a fleet until the block ends, then stop it."""
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.run)
            await fleet.supervisor.wait_all_ready()
            yield fleet
            if not fleet.recorder.stops:
                fleet.supervisor.stop()


def test_a_group_ends_from_every_phase_and_may_begin_again() -> None:
    assert set(TRANSITIONS) == set(GroupPhase)
    for phase in GroupPhase:
        reached = {phase}
        for _ in GroupPhase:
            reached |= {after for one in reached for after in TRANSITIONS[one].values()}
        assert reached == set(GroupPhase)
    assert {event for row in TRANSITIONS.values() for event in row} == set(GroupEvent)


@pytest.mark.slow
async def test_a_model_is_stopped_and_started_beside_the_others(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", *NAMES)) as fleet:
        assert fleet.states == {"a": RunState.RUNNING, "b": RunState.RUNNING}
        await fleet.stop("a")
        await fleet.stop("a")
        # Prefill workers exit first, because their output is work for decode.
        assert fleet.words[len(NAMES) :] == ["a.prefill-0 ended", "a.decode-0 ended"]
        assert fleet.states == {"a": RunState.STOPPED, "b": RunState.RUNNING}
        assert [worker.pid for worker in fleet.supervisor.models()[0].workers] == [None, None]
        await fleet.start("a")
        await fleet.start("a")
        assert fleet.steps == [
            *("a.prefill-0: draining", "a.decode-0: draining"),
            *("a.prefill-0: starting", "a.decode-0: starting"),
        ]
        assert fleet.states == {"a": RunState.RUNNING, "b": RunState.RUNNING}
        pids = fleet.recorder.pids
        (status, _) = fleet.supervisor.models()
        assert [(worker.name, worker.role, worker.pid) for worker in status.workers] == [
            ("a.prefill-0", Role.PREFILL, pids["a.prefill-0"][-1]),
            ("a.decode-0", Role.DECODE, pids["a.decode-0"][-1]),
        ]
        assert all(worker.is_ready for worker in status.workers)
        assert [fleet.lives(name) for name in NAMES] == [1, 2, 2, 1]
        # Both ends were requested, so none counts as a crash.
        assert {verdict for _, _, verdict in fleet.recorder.endings} == {None}


@pytest.mark.slow
async def test_a_dead_worker_is_restarted_alone(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", *NAMES)) as fleet:
        os.kill(fleet.recorder.pids["a.decode-0"][0], signal.SIGKILL)
        await until(lambda: fleet.lives("a.decode-0") == 2)
        await until(lambda: fleet.states["a"] is RunState.RUNNING)
        assert [fleet.lives(name) for name in NAMES] == [1, 1, 2, 1]


@pytest.mark.slow
async def test_a_model_that_is_asleep_starts_by_command_alone(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", *NAMES, stopped=("b",))) as fleet:
        assert fleet.states == {"a": RunState.RUNNING, "b": RunState.STOPPED}
        await fleet.restart()
        assert "b.decode-0 started" not in fleet.words
        assert [step.partition(":")[0] for step in fleet.steps] == [
            *("a.prefill-0", "a.decode-spare", "a.decode-0", "a.decode-spare"),
            "server-0",
        ]
        await fleet.start("b")
        assert fleet.states["b"] is RunState.RUNNING


@pytest.mark.slow
async def test_two_commands_at_once_are_done_once(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", "a.decode-0", "b.decode-0")) as fleet:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.stop, "b")
            nursery.start_soon(fleet.stop, "b")
            # Polling would miss a process that ends at once.
            await wait_all_tasks_blocked()
            assert fleet.states["b"] is RunState.STOPPING
            nursery.start_soon(fleet.start, "b")
            nursery.start_soon(fleet.start, "b")
        assert fleet.words[2:] == ["b.decode-0 ended", "b.decode-0 started"]
        assert fleet.states["b"] is RunState.RUNNING


@pytest.mark.slow
async def test_a_start_that_is_stopped_says_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "journal", "a.decode-0", "b.decode-0:silent", stopped=("b",))
    async with running(fleet):

        async def start() -> None:
            with pytest.raises(RestartFailed, match="model b was stopped during"):
                await fleet.start("b")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(start)
            await until(lambda: "b.decode-0 started" in fleet.words)
            assert fleet.states["b"] is RunState.STARTING
            nursery.start_soon(fleet.stop, "b")
            await until(lambda: fleet.states["b"] is RunState.STOPPING)
            # It ignores the request; this test does not wait for the deadline.
            os.kill(fleet.recorder.pids["b.decode-0"][0], signal.SIGKILL)
        assert fleet.states["b"] is RunState.STOPPED
        assert fleet.lives("b.decode-0") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "words"),
    [("crash", "b.decode-0 exited with code 1 3 times in a row"), ("broken", "config.json is")],
)
async def test_a_model_that_cannot_be_kept_alive_leaves_the_others_alone(
    tmp_path: Path, behaviour: str, words: str
) -> None:
    names = ("server-0", "a.decode-0", "b.prefill-0", f"b.decode-0:{behaviour}")
    async with running(Fleet(tmp_path / "journal", *names)) as fleet:
        await until(lambda: fleet.states == {"a": RunState.RUNNING, "b": RunState.FAILED})
        # If decode fails at once, prefill is stopped before it can report.
        for pid in fleet.recorder.pids["b.prefill-0"]:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        ((model, reason),) = fleet.recorder.failures
        assert model == "b"
        assert words in reason.message
        assert fleet.supervisor.models()[1].failure == reason.message
        with pytest.raises(RestartFailed, match=words):
            await fleet.start("b")
        assert fleet.lives("a.decode-0") == fleet.lives("server-0") == 1
    assert fleet.outcome is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "num_failures"),
    [
        (("server-0", "a.decode-0:broken", "b.decode-0:broken"), 1),
        (("server-0", "control:broken", "a.decode-0"), 0),
    ],
    ids=["its last model", "control"],
)
async def test_a_fleet_ends_when_its_last_model_or_its_control_cannot_be(
    tmp_path: Path, names: tuple[str, ...], num_failures: int
) -> None:
    fleet = Fleet(tmp_path / "journal", *names)
    with trio.fail_after(PATIENCE_S):
        await fleet.run()
    assert fleet.outcome is not None
    assert fleet.outcome.exit_code == EXIT_BAD_INPUT == 2
    assert len(fleet.recorder.failures) == num_failures


@pytest.mark.slow
async def test_a_model_that_fails_ends_its_restart(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", "a.decode-0", "b.decode-0:once")) as fleet:
        with pytest.raises(RestartFailed, match=r"b\.decode-0 is being stopped"):
            await fleet.restart(Role.DECODE)
        assert fleet.states == {"a": RunState.RUNNING, "b": RunState.FAILED}


@pytest.mark.slow
async def test_commands_that_cannot_be_done_are_refused(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", "a.decode-0", "b.decode-0")) as fleet:
        with pytest.raises(RestartFailed, match="no model is called 'c'; allowed: a, b"):
            await fleet.start("c")
        with pytest.raises(RestartFailed, match="no control or server process runs"):
            await fleet.restart(Role.SERVER, Role.CONTROL)
        done = trio.Event()

        async def tell(_: RollingStep) -> None:
            await done.wait()

        async def is_met(_: str) -> bool:
            return True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.supervisor.restart, {Role.DECODE}, is_met, tell)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RestartFailed, match="a restart or scaling of a is running"):
                await fleet.stop("a")
            done.set()
        fleet.supervisor.stop()
        with pytest.raises(RestartFailed, match="the fleet is being stopped"):
            await fleet.start("a")


@pytest.mark.slow
async def test_the_only_model_without_a_name_runs_as_long_as_the_fleet(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", "decode-0")) as fleet:
        with pytest.raises(RestartFailed, match="has no name and always runs"):
            await fleet.stop("")


@pytest.mark.slow
async def test_workers_are_added_and_removed_one_after_the_other(tmp_path: Path) -> None:
    async with running(
        Fleet(tmp_path / "journal", "server-0", "a.decode-0", "b.decode-0")
    ) as fleet:
        await fleet.scale(Role.DECODE, "a.decode-0", "a.decode-1", "a.decode-2")
        await fleet.scale(Role.DECODE, "a.decode-0", "a.decode-1", "a.decode-2")
        assert [worker.name for worker in fleet.supervisor.models()[0].workers] == [
            *("a.decode-0", "a.decode-1", "a.decode-2")
        ]
        assert fleet.states["a"] is RunState.RUNNING
        # An added worker is kept alive like the others.
        os.kill(fleet.recorder.pids["a.decode-2"][0], signal.SIGKILL)
        await until(lambda: fleet.lives("a.decode-2") == 2)
        await until(lambda: fleet.states["a"] is RunState.RUNNING)
        await fleet.scale(Role.DECODE, "a.decode-0")
        assert fleet.words[-2:] == ["a.decode-2 ended", "a.decode-1 ended"]
        assert fleet.steps == [
            *("a.decode-1: starting", "a.decode-2: starting"),
            *("a.decode-2: draining", "a.decode-1: draining"),
        ]
        first, second, third = "a.decode-0", "a.decode-1", "a.decode-2"
        assert fleet.noted == [[first, second], [first, second, third], [first, second], [first]]
        await fleet.restart(Role.DECODE)
        assert fleet.lives("a.decode-1") == 1


@pytest.mark.slow
async def test_a_worker_that_cannot_be_added_leaves_the_others_alone(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", "a.decode-0", "b.decode-0")) as fleet:
        with pytest.raises(RestartFailed, match=r"config\.json is"):
            await fleet.scale(Role.DECODE, "a.decode-0", "a.decode-1:broken")
        assert fleet.noted[-1] == ["a.decode-0"]
        assert fleet.states == {"a": RunState.RUNNING, "b": RunState.RUNNING}
        await fleet.scale(Role.DECODE, "a.decode-0", "a.decode-2")
        assert fleet.lives("a.decode-2") == 1


@pytest.mark.slow
async def test_a_model_that_sleeps_wakes_with_its_new_number_of_workers(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "journal", "a.decode-0", "b.decode-0", stopped=("a",))
    async with running(fleet):
        await fleet.scale(Role.DECODE, "a.decode-0", "a.decode-1")
        assert fleet.lives("a.decode-1") == 0
        await fleet.start("a")
        assert fleet.lives("a.decode-1") == 1
        await fleet.stop("a")
        await fleet.scale(Role.DECODE, "a.decode-1")
        await fleet.start("a")
        assert fleet.lives("a.decode-0") == 1


@pytest.mark.slow
async def test_only_one_thing_changes_a_model_at_a_time(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", "a.decode-0", "b.decode-0")) as fleet:
        may_go_on = trio.Event()

        async def tell(_: str) -> None:
            await may_go_on.wait()

        async def scale() -> None:
            specs = [spec(name, fleet.journal) for name in ("a.decode-0", "a.decode-1")]
            await fleet.supervisor.scale("a", Role.DECODE, specs, lambda _: None, tell)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(scale)
            await trio.testing.wait_all_tasks_blocked()
            for command in (
                fleet.stop("a"),
                fleet.restart(),
                fleet.scale(Role.DECODE, "a.decode-2"),
            ):
                with pytest.raises(RestartFailed, match="running"):
                    await command
            may_go_on.set()
        assert fleet.lives("a.decode-1") == 1


@pytest.mark.slow
async def test_a_model_starts_without_a_worker_that_is_removed_meanwhile(tmp_path: Path) -> None:
    names = ("a.decode-0", "a.decode-1:silent", "b.decode-0")
    config = replace(CONFIG, worker_exit_s=0.1)
    fleet = Fleet(tmp_path / "journal", *names, stopped=("a",), config=config)
    with trio.fail_after(20.0):
        async with running(fleet):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fleet.start, "a")
                await until(lambda: fleet.supervisor.models()[0].workers[0].is_ready)
                await trio.testing.wait_all_tasks_blocked()
                await fleet.scale(Role.DECODE, "a.decode-0")
            assert fleet.states["a"] is RunState.RUNNING


@pytest.mark.slow
async def test_control_alone_runs_no_model(tmp_path: Path) -> None:
    names = ("server-0", "control", "a.decode-0")
    async with running(Fleet(tmp_path / "journal", *names, stopped=("a",))) as fleet:
        assert not running_models(fleet.supervisor)
        await fleet.start("a")
        assert running_models(fleet.supervisor)


@pytest.mark.slow
async def test_a_worker_that_was_being_added_ends_with_the_fleet(tmp_path: Path) -> None:
    names = ("server-0", "a.decode-0")
    # The new one ignores requests to exit.
    fleet = Fleet(tmp_path / "journal", *names, config=replace(CONFIG, worker_exit_s=0.1))

    async def add() -> None:
        with pytest.raises(RestartFailed, match=r"a\.decode-1 is being stopped"):
            await fleet.scale(Role.DECODE, "a.decode-0", "a.decode-1:silent")

    with trio.fail_after(20.0):
        async with running(fleet), trio.open_nursery() as nursery:
            nursery.start_soon(add)
            await until(lambda: fleet.lives("a.decode-1") == 1)
            fleet.supervisor.stop()
            with pytest.raises(RestartFailed, match="the fleet is being stopped"):
                await fleet.scale(Role.DECODE, "a.decode-0")
    assert "a.decode-1" in {name for name, _, _ in fleet.recorder.endings}


@pytest.mark.slow
async def test_control_is_restarted_before_servers_and_ends_before_all(tmp_path: Path) -> None:
    names = ("server-0", "control", "a.decode-0")
    async with running(Fleet(tmp_path / "journal", *names)) as fleet:
        met = []

        async def is_met(name: str) -> bool:
            met.append(name)
            return True

        await fleet.supervisor.restart((*ORDER,), is_met, fleet.note)
        assert [step.partition(":")[0] for step in fleet.steps][-2:] == ["control", "server-0"]
        assert "control" not in met, "servers know no such worker"
        assert [fleet.lives(name) for name in names] == [2, 2, 2]
        begun = len(fleet.words)
        fleet.supervisor.stop()
    assert fleet.words[begun:] == ["control ended", "server-0 ended", "a.decode-0 ended"]


@pytest.mark.slow
async def test_the_workers_of_one_model_are_restarted_alone_and_in_order(tmp_path: Path) -> None:
    names = ("server-0", "control", "a.prefill-0", "a.decode-0", "b.decode-0", "c.decode-0")
    async with running(Fleet(tmp_path / "journal", *names, stopped=("c",))) as fleet:
        await fleet.restart(models=("a",))
        assert [step.partition(":")[0] for step in fleet.steps] == [
            "a.prefill-0",
            *("a.decode-spare", "a.decode-0", "a.decode-spare"),
        ]
        assert [fleet.lives(name) for name in names] == [1, 1, 2, 2, 1, 0]
        await fleet.restart(Role.DECODE, models=("b", "a", "b"))
        assert [fleet.lives(name) for name in names] == [1, 1, 2, 3, 2, 0]
        for model, words in (
            ("c", "the workers of c do not run; start them with `triolet model load c`"),
            ("d", "no model is called 'd'; allowed: a, b, c"),
        ):
            with pytest.raises(RestartFailed, match=words):
                await fleet.restart(models=("a", model))
        with pytest.raises(RestartFailed, match="no prefill process runs"):
            await fleet.restart(Role.PREFILL, models=("b",))
        assert [fleet.lives(name) for name in names] == [1, 1, 2, 3, 2, 0]


@pytest.mark.slow
async def test_a_control_that_keeps_dying_ends_no_fleet(tmp_path: Path) -> None:
    names = ("server-0", "control:crash", "a.decode-0")
    async with running(Fleet(tmp_path / "journal", *names)) as fleet:
        await until(lambda: bool(fleet.recorder.failures))
        ((name, reason),) = fleet.recorder.failures
        assert (name, "exited with code 1 3 times" in reason.message) == ("control", True)
        assert fleet.states == {"a": RunState.RUNNING}
        await fleet.stop("a")
        await fleet.start("a")
    assert fleet.outcome is None


@pytest.mark.slow
async def test_a_control_that_was_given_up_comes_back(tmp_path: Path) -> None:
    config = replace(CONFIG, control_retry_s=0.01)
    names = ("server-0", "control:late", "a.decode-0")
    async with running(Fleet(tmp_path / "journal", *names, config=config)) as fleet:
        await until(lambda: fleet.lives("control") == 4)
        ((_, reason),) = fleet.recorder.failures
        assert reason.message.endswith("; control is restarted in 0.01 s")
        await fleet.restart(Role.CONTROL)
        assert fleet.lives("control") == 5
    assert fleet.outcome is None


@pytest.mark.slow
async def test_a_restart_of_all_starts_a_control_that_was_given_up(tmp_path: Path) -> None:
    config = replace(CONFIG, control_retry_s=3600.0)
    names = ("server-0", "control:late", "a.decode-0")
    async with running(Fleet(tmp_path / "journal", *names, config=config)) as fleet:
        await until(lambda: bool(fleet.recorder.failures))
        await fleet.restart(Role.SERVER)
        await fleet.restart(models=("a",))
        assert fleet.lives("control") == 3, "it is none of these"
        await fleet.restart()
        assert fleet.lives("control") == 4
        assert fleet.steps[-1] == "control: starting without waiting for the retry delay"
        await fleet.restart(Role.CONTROL)
        assert fleet.lives("control") == 5
    assert fleet.outcome is None


@pytest.mark.slow
async def test_a_restart_says_that_control_keeps_dying(tmp_path: Path) -> None:
    config = replace(CONFIG, control_retry_s=3600.0)
    names = ("server-0", "control:crash", "a.decode-0")
    async with running(Fleet(tmp_path / "journal", *names, config=config)) as fleet:
        await until(lambda: bool(fleet.recorder.failures))
        for again in (4, 5):
            with pytest.raises(RestartFailed, match=r"control did not become ready: .* 3 times"):
                await fleet.restart(Role.CONTROL)
            assert len(fleet.recorder.failures) == again - 2, "each time it is given up once"
        assert fleet.states == {"a": RunState.RUNNING}
    assert fleet.outcome is None


@pytest.mark.slow
async def test_a_control_whose_settings_do_no_more_ends_no_fleet(tmp_path: Path) -> None:
    config = replace(CONFIG, control_retry_s=0.01)
    names = ("server-0", "control:spoiled", "a.decode-0")
    async with running(Fleet(tmp_path / "journal", *names, config=config)) as fleet:
        os.kill(fleet.recorder.pids["control"][0], signal.SIGKILL)
        await until(lambda: fleet.lives("control") == 3)
        ((_, reason),) = fleet.recorder.failures
        assert "the journal is gone" in reason.message
    assert fleet.outcome is None


@pytest.mark.slow
async def test_a_control_that_a_restart_made_ready_ends_no_fleet_either(tmp_path: Path) -> None:
    config = replace(CONFIG, control_retry_s=3600.0)
    names = ("server-0", "control:late and spoiled", "a.decode-0")
    async with running(Fleet(tmp_path / "journal", *names, config=config)) as fleet:
        await until(lambda: bool(fleet.recorder.failures))
        await fleet.restart()
        os.kill(fleet.recorder.pids["control"][-1], signal.SIGKILL)
        await until(lambda: len(fleet.recorder.failures) == 2 or fleet.outcome is not None)
        assert "the journal is gone" in fleet.recorder.failures[1][1].message
    assert fleet.outcome is None


@pytest.mark.slow
async def test_worker_seconds_are_those_of_the_processes(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "journal", "a.decode-0", "b.decode-0")
    spans = fleet.recorder.spans
    async with running(fleet):
        os.kill(fleet.recorder.pids["a.decode-0"][0], signal.SIGKILL)
        await until(lambda: fleet.lives("a.decode-0") == 2)
        await fleet.scale(Role.DECODE, "a.decode-0", "a.decode-1")
        await fleet.scale(Role.DECODE, "a.decode-0")
        await fleet.stop("a")
        await fleet.start("a")
        await fleet.stop("a")
        (counted, _) = fleet.supervisor.models()
    ended = [end - began for name, began, end in spans if name.startswith("a.")]
    assert len(ended) == 4
    # Both see the end within a few turns of the event loop.
    assert counted.worker_seconds == pytest.approx(sum(ended), abs=0.2)
