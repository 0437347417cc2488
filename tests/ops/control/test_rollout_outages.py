"""Tests of rollouts whose control or store was away: real control, sockets and store, a fake
supervisor and servers that report made-up requests."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from ops.audit.recording import default_folder
from ops.audit.verification import read_entries, take_snapshot
from ops.control import model_steps, rollouts
from ops.control.controller import Controller
from ops.control.journal import FILE_NAME
from ops.control.rollout_stores import KeptRollout, RolloutStoreAway, SqliteRollouts
from tests.ops.control.fleets import ask_soon
from tests.ops.control.rollout_fleet import (
    HELD,
    control_of,
    fleet_without_control,
    rollout_scene,
    scene_of_hosts,
)
from transport.rollout_protocol import RolloutPhase

if TYPE_CHECKING:
    from pathlib import Path

    from ops.control.live_rollout import LiveRollout
    from ops.rollouts.rollout import Rollout
    from tests.ops.control.rollout_fleet import RolloutScene
    from transport.control_protocol import Activity

NEWS_S = 0.2
"""Time in which a server would get news, if control sent any."""
OUTAGE_S = 700.0
KEPT_S = 600.0
"""Retention of the last step, shorter than the outage."""


@pytest.fixture(autouse=True)
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an own audit log, do not wait for servers, and renew and write often."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(model_steps, "MEET_S", 0.0)
    monkeypatch.setattr(rollouts, "FOLLOW_POLLS", 0)
    monkeypatch.setattr(rollouts, "RENEW_S", 0.05)
    monkeypatch.setattr(rollouts, "WRITE_S", 0.05)


def make_older(folder: Path, *, is_renewed: bool = False) -> None:
    """Let the step in the journal have begun longer ago and, unless it is renewed, control have
    been away since."""
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection, connection:
        [(body, renewed_at)] = connection.execute("SELECT body, renewed_at FROM rollouts")
        kept = msgspec.json.decode(body)
        kept["evidence"]["began_at"] -= OUTAGE_S
        row = msgspec.json.encode(kept).decode(), renewed_at - OUTAGE_S * (not is_renewed)
        connection.execute("UPDATE rollouts SET body = ?, renewed_at = ?", row)


async def bring_to_the_last_step(one: RolloutScene) -> None:
    """Start a rollout that has all its evidence and only waits for the end of its retention."""
    await one.start(shares=[1.0], retention_s=KEPT_S)
    shown = await one.reaches(lambda shown: "stays loaded" in shown["said"])
    count = sum(shown["counts"]["errors"])
    # By then the evidence of that look was written.
    await one.reaches(lambda shown: sum(shown["counts"]["errors"]) > 3 * count)


async def test_the_stable_version_is_removed_only_after_the_promotion_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, refused = SqliteRollouts.write, 0

    async def fail(store: SqliteRollouts, one: Rollout, number: int, now: float) -> int:
        nonlocal refused
        if one.phase is not RolloutPhase.PROMOTED:
            return await write(store, one, number, now)
        refused += 1
        raise RolloutStoreAway("disk full")

    async with rollout_scene() as one:
        monkeypatch.setattr(SqliteRollouts, "write", fail)
        await one.start()
        while refused < 50:
            await trio.lowlevel.checkpoint()
        assert one.supervisor.routes["chat"]["stable"] == "chat"
        monkeypatch.setattr(SqliteRollouts, "write", write)
        assert (await one.ends())["phase"] == "promoted"
        assert [*one.supervisor.added] == ["chat-2"]


async def test_the_only_version_of_a_public_name_is_not_removed() -> None:
    async with rollout_scene() as one:
        await one.start(min_requests=HELD)
        await one.phase("canary", 1)
        moved = {"shares": {"chat-2": 1.0}, "stable": "chat-2", "revision": 9}
        one.supervisor.routes["chat"] = moved
        await one.order("rollback")
        await one.ends()
        assert "chat-2" in one.supervisor.added


async def test_the_time_without_control_does_not_count() -> None:
    async with fleet_without_control() as one:
        async with control_of(one):
            await bring_to_the_last_step(one)
        one.server.sends = False
        make_older(one.folder)
        back_at = time.time()
        async with control_of(one):
            shown = await one.reaches(lambda shown: shown["began_at"] >= back_at)
            assert (shown["phase"], shown["step"]) == ("canary", 1)


@pytest.mark.parametrize("zones", [(), ("a",)])
async def test_a_control_that_starts_tells_servers_nothing_before_it_has_looked(
    monkeypatch: pytest.MonkeyPatch, zones: tuple[str, ...]
) -> None:
    """News without the route would send users of the candidate back."""
    keep, note = rollouts.Rollouts._keep, Controller.note_activity
    heard, may_look = trio.Event(), trio.Event()

    async def late(self: rollouts.Rollouts, live: LiveRollout) -> None:
        await may_look.wait()
        await keep(self, live)

    def hear(self: Controller, said: Activity, now: float) -> None:
        heard.set()
        note(self, said, now)

    async with fleet_without_control() as one:
        one.server.zone = "".join(zones)
        async with control_of(one):
            while one.server.told is None:
                await trio.lowlevel.checkpoint()
            await one.start(min_requests=HELD, zones=zones)
            await one.phase("canary", 1)
            await one.server.until_routed()
        one.server.told, one.server.lacking = None, 0
        monkeypatch.setattr(rollouts.Rollouts, "_keep", late)
        monkeypatch.setattr(Controller, "note_activity", hear)
        async with control_of(one):
            await heard.wait()
            await trio.sleep(NEWS_S)
            assert one.server.lacking == 0
            assert one.server.told is None
            may_look.set()
            await one.server.until_routed()
            assert one.server.lacking == 0


async def test_a_fleet_that_was_stopped_at_the_end_of_the_last_step_does_not_promote() -> None:
    async with fleet_without_control() as one:
        async with control_of(one):
            await bring_to_the_last_step(one)
        make_older(one.folder, is_renewed=True)
        one.supervisor.run_id = "the next run"
        async with control_of(one):
            ended = await one.ends()
        assert (ended["phase"], ended["said"]) == (
            "rolled_back",
            "the fleet ended, and its candidate with it",
        )
        entries = read_entries(take_snapshot(default_folder()))
        assert "rollout.promote" not in {entry.action for _, entry in entries}


async def test_a_server_that_is_not_ready_after_a_restart_of_control_rolls_nothing_back() -> None:
    async with fleet_without_control() as one:
        async with control_of(one):
            await one.start(min_requests=HELD)
            await one.phase("canary", 1)
        one.server.unready = {"chat-2"}
        with capture_logs() as lines:
            async with control_of(one, servers_s=0.1):
                while "candidate_not_ready" not in [line["event"] for line in lines]:
                    await trio.lowlevel.checkpoint()
                assert (await one.shown())["phase"] == "canary"
                one.server.unready = set()
                await one.order("promote_fully")
                await one.phase("canary", 3)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_rollback_that_was_not_written_is_not_undone_by_the_next_control(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    change = SqliteRollouts._change

    def fail(*_: object) -> None:
        raise RolloutStoreAway("disk full")

    async with fleet_without_control() as one:
        async with control_of(one):
            await one.start(min_requests=HELD)
            await one.phase("canary", 1)
            monkeypatch.setattr(SqliteRollouts, "_change", fail)
            assert (await one.order("rollback"))[0] == 200
            while "chat-2" in one.supervisor.added:
                await trio.lowlevel.checkpoint()
        monkeypatch.setattr(SqliteRollouts, "_change", change)
        if is_late:
            make_older(one.folder)
        async with control_of(one):
            ended = await one.ends()
        assert (ended["phase"], ended["said"]) == (
            "rolled_back",
            "chat-2 was removed before control was restarted: it was rolled back",
        )
        assert one.supervisor.requests.count(("add_version", "chat-2")) == 1


async def test_no_rollout_begins_before_those_of_the_control_before_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, is_there = SqliteRollouts.read, False

    async def try_to_read(store: SqliteRollouts) -> list[KeptRollout]:
        if not is_there:
            raise RolloutStoreAway("disk full")
        return await read(store)

    async with fleet_without_control() as one:
        async with control_of(one):
            _, begun = await one.start(min_requests=HELD)
            await one.phase("canary", 1)
        monkeypatch.setattr(SqliteRollouts, "read", try_to_read)
        async with control_of(one):
            status, refused = await one.start()
            assert (status, "have not been read yet" in str(refused)) == (409, True)
            is_there = True
            while (await ask_soon(one.folder, "GET", "/admin/rollouts/chat"))[0] != 200:
                await trio.lowlevel.checkpoint()
            assert (await one.shown())["id"] == begun["id"]


async def test_on_several_hosts_a_promotion_waits_for_the_permanent_route_of_all_servers() -> None:
    with capture_logs() as lines:
        async with scene_of_hosts(servers_s=0.5) as one:
            one.server.follows = False
            await one.start()
            await one.phase("promoted")
            while "rollout_not_finished" not in [line["event"] for line in lines]:
                await trio.lowlevel.checkpoint()
            assert not (await one.shown())["is_over"]
            one.server.follows = True
            await one.ends()
            assert one.server.permanent is not None
            assert one.server.permanent.stable == "chat-v2"


async def test_a_change_that_was_not_recorded_before_a_crash_is_recorded_by_the_next_control(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang(*_: object) -> None:
        await trio.sleep_forever()

    async with fleet_without_control() as one:
        with monkeypatch.context() as patched:
            patched.setattr(rollouts, "audit", hang)
            async with control_of(one):
                _, begun = await one.start(min_requests=HELD)
                await one.server.until_routed()
        async with control_of(one):
            await one.order("rollback")
            await one.ends()
    entries = [entry for _, entry in read_entries(take_snapshot(default_folder()))]
    found = [(one.action, one.outcome) for one in entries if one.request_id == begun["id"]]
    # The order may be obeyed before the change of the earlier control is recorded.
    assert [one for one in found if one[1] == "done"] == [
        ("rollout.start", "done"),
        ("rollout.step", "done"),
        ("rollout.rollback", "done"),
    ]
