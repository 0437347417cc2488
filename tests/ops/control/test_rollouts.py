"""Tests of rollouts through control: real control, sockets and store, a fake supervisor and servers
that report made-up requests."""

from __future__ import annotations

import signal
import time
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING

import httpx2
import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from ops.audit.events import os_user
from ops.audit.recording import default_folder
from ops.audit.verification import read_entries, take_snapshot
from ops.control import model_steps, rollouts
from ops.control.rollout_stores import RolloutStolen, RolloutStoreAway, SqliteRollouts
from ops.ports import bind_port
from ops.rollouts import rollout
from tests.ops.control import fleets
from tests.ops.control.fleets import (
    ControlProcess,
    ask_soon,
    config_of,
    fleet_folder,
    states,
    supervised,
)
from tests.ops.control.rollout_fleet import (
    HELD,
    RolloutScene,
    RolloutServer,
    rollout_scene,
    scene_of_hosts,
)
from tests.server.tenants.redis_server import PROGRAM, RedisServer
from triolet.config.membership import RedisMembersConfig
from triolet.usage_database import UsageRecord, open_usage_database, write_records

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.ops.control.fleets import FakeSupervisor


@pytest.fixture(autouse=True)
def own_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def no_wait_for_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_steps, "MEET_S", 0.0)
    monkeypatch.setattr(rollouts, "FOLLOW_POLLS", 0)


async def test_a_good_candidate_gets_all_requests_step_by_step_and_then_the_name() -> None:
    async with rollout_scene() as one:
        status, shown = await one.start()
        assert (status, shown["phase"], shown["candidate"]) == (202, "preparing", "chat-2")
        ended = await one.ends()
        assert (ended["phase"], ended["share"]) == ("promoted", 1.0)
        steps = [note["step"] for note in ended["history"] if note["phase"] == "canary"]
        assert steps == [1, 2, 3]
        assert one.supervisor.routes["chat"]["shares"] == {"chat-2": 1.0}
        assert await states(one.folder) == {"chat-2": "serving"}
        assert one.server.route is None, "the permanent route is enough"
        assert [name for kind, name in one.supervisor.requests if kind == "drop_model"] == ["chat"]


@pytest.mark.parametrize("is_asleep", [False, True])
async def test_a_candidate_that_computes_alike_has_the_workers_of_the_stable_version(
    is_asleep: bool,
) -> None:
    async with rollout_scene() as one:
        if not is_asleep:
            one.supervisor.start("chat")
        ref = str(one.folder / "model")
        one.supervisor.alike.add(ref)
        await one.start(min_requests=HELD, shadow_share=0.5, shares=[0.5, 1.0])
        begun = await one.phase("canary", 1)
        assert await states(one.folder) == {"chat": "serving", "chat-2": "serving"}
        assert begun["shadow"]["pairs"] == 0, "copies would compute the same"
        pids = one.supervisor.pids("chat")
        await one.order("promote_fully")
        await one.phase("canary", 2)
        await one.order("promote")
        assert (await one.ends())["phase"] == "promoted"
        assert one.supervisor.refs == {"chat": ref}
        assert await states(one.folder) == {"chat": "serving"}
        assert one.supervisor.pids("chat") == pids
        started = [name for kind, name in one.supervisor.requests if kind == "start_model"]
        assert started == ["chat"] * is_asleep
        status, models = await ask_soon(one.folder, "GET", "/admin/models")
        assert (status, models["models"][0]["digest"]) == (200, begun["candidate_digest"])


async def test_a_bad_candidate_is_rolled_back_and_removed() -> None:
    async with rollout_scene() as one:
        one.server.bad = lambda version: version == "chat-2"
        await one.start()
        ended = await one.ends()
        assert (ended["phase"], ended["share"]) == ("rolled_back", 0.0)
        assert "missed errors" in ended["said"]
        assert one.server.route is None
        assert await states(one.folder) == {"chat": "staged"}
        assert one.supervisor.routes["chat"]["shares"] != {"chat-2": 1.0}
        assert [*one.supervisor.added] == ["chat"]


async def test_a_candidate_that_cannot_serve_is_rolled_back_and_blocks_no_later_one() -> None:
    async with rollout_scene() as one:
        one.supervisor.fail_start["chat-2"] = "chat-2.decode-0 has died three times"
        _, first = await one.start()
        ended = await one.ends()
        assert (ended["phase"], ended["step"]) == ("rolled_back", 0)
        assert ended["said"] == "chat-2 cannot serve: chat-2.decode-0 has died three times"
        assert [*one.supervisor.added] == ["chat"]
        one.supervisor.fail_start.clear()
        status, second = await one.start()
        assert (status, second["id"] != first["id"]) == (202, True)
        ended = await one.ends()
        assert (ended["id"], ended["phase"]) == (second["id"], "promoted")
        assert ended["revision"] > first["revision"], "servers take only a higher one"


async def test_golden_prompts_that_fail_or_differ_roll_back() -> None:
    async with rollout_scene() as one:
        answers, one.server.golden = one.server.golden, ()
        one.server.golden_error = "503"
        await one.start()
        ended = await one.ends()
        assert (ended["phase"], ended["said"]) == (
            "rolled_back",
            "golden prompts to chat-2 failed: 503",
        )
        one.server.golden = answers  # what fails later is ignored: the candidate may be busy
        await one.start(bake_s=60)
        await one.reaches(lambda shown: "of 60 s" in shown["said"])
        one.server.golden = ("another answer",)
        ended = await one.ends()
        assert ended["phase"] == "rolled_back"
        await one.start(golden=False)
        assert (await one.ends())["phase"] == "promoted"


async def test_operators_pause_promote_and_roll_back_and_all_of_it_is_recorded() -> None:
    async with rollout_scene() as one:
        _, begun = await one.start(bake_s=600, max_step_s=3600)
        assert (await one.order("promote"))[0] == 409, "it is being prepared"
        await one.reaches(lambda shown: "of 600 s" in shown["said"])
        assert (await one.order("rollback"))[0] == 200
        assert (await one.ends())["phase"] == "rolled_back"
        _, again = await one.start(min_requests=HELD)
        await one.phase("canary", 1)
        assert (await one.order("pause"))[0] == 200
        paused = await one.phase("paused")
        assert one.server.route is not None
        status, refused = await one.order("pause")
        assert (status, "is paused" in refused["error"]["message"]) == (409, True)
        assert (await one.order("promote_fully", revision=paused["revision"]))[0] == 200
        await one.phase("canary", 3)
        status, refused = await one.order("promote", revision=paused["revision"])
        assert (status, "has changed since you looked" in refused["error"]["message"]) == (
            409,
            True,
        )
        assert (await one.order("promote"))[0] == 200
        assert (await one.ends())["phase"] == "promoted"
        assert (await one.order("rollback"))[0] == 409
        entries = [e for _, e in read_entries(take_snapshot(default_folder()))]
        kinds = [(e.action, e.outcome) for e in entries if e.request_id == begun["id"]]
        assert kinds == [
            ("rollout.start", "begun"),
            ("rollout.start", "done"),
            ("rollout.rollback", "begun"),
            ("rollout.rollback", "done"),
        ]
        mine = [e for e in entries if e.request_id == again["id"]]
        judged = [(e.action, e.counts) for e in mine if e.actor == "judge"]
        assert judged == [("rollout.step", {"step": 1})]
        ordered = [e.action for e in mine if e.outcome == "begun"]
        assert ordered == ["rollout.start", "rollout.pause", "rollout.promote", "rollout.promote"]
        done = [e.action for e in mine if e.outcome == "done" and e.actor != "judge"]
        assert done == ordered


async def test_the_traffic_of_the_last_day_decides_whether_a_rollout_may_begin(
    tmp_path: Path,
) -> None:
    usage = tmp_path / "usage"
    record = UsageRecord(time.time(), "1", "", "chat", "", "default", "ok", 1, 0, 1, None, None)
    async with rollout_scene(usage_dir=str(usage)) as one:
        with closing(open_usage_database(str(usage), 1.0, time.sleep)) as ledger:
            write_records(ledger, [record] * 200, 0.0)
        status, refused = await one.start(max_step_s=60)
        assert status == 409
        assert "chat has too few requests for this rollout: a step of 20%" in str(refused)
        status, shown = await one.start(max_step_s=86_400)
        assert (status, "from the traffic of a day" in shown["said"]) == (202, True)


async def test_a_fleet_that_was_stopped_ends_its_rollout(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    async with rollout_scene(state_dir=state) as one:
        await one.start(min_requests=HELD)
        await one.phase("canary", 1)
    async with rollout_scene("the next run", state_dir=state) as one:
        ended = await one.ends()
        assert ended["phase"] == "rolled_back"
        assert ended["said"] == "the fleet ended, and its candidate with it"
        await one.start()
        assert (await one.ends())["phase"] == "promoted"


async def test_while_a_rollout_runs_nothing_else_changes_its_versions() -> None:
    async with rollout_scene() as one:
        _, begun = await one.start(bake_s=600, max_step_s=3600)
        for method, path, body in (
            ("POST", "/admin/models/chat/switch", {"ref": "chat:v3"}),
            ("POST", "/admin/models/chat/sleep", None),
            ("DELETE", "/admin/models/chat", None),
            ("POST", "/admin/rollouts", {"model": "chat", "ref": "chat:v3"}),
        ):
            status, refused = await ask_soon(one.folder, method, path, json=body)
            assert status == 409
            expected = f"rollout of chat is running (operation {begun['id']})"
            assert expected in refused["error"]["message"]
        await one.order("rollback")
        await one.ends()
        status, switched = await ask_soon(
            one.folder, "POST", "/admin/models/chat/switch", json={"ref": "chat:v3"}
        )
        assert (await fleets.ended(one.folder, switched["id"]))["status"] == "done"


async def test_of_two_starts_and_two_orders_at_once_one_is_obeyed() -> None:
    async with rollout_scene() as one:
        answers: list[int] = []

        async def note(order: Callable[[], Awaitable[tuple[int, object]]]) -> None:
            answers.append((await order())[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(note, partial(one.start, min_requests=HELD))
            nursery.start_soon(note, partial(one.start, min_requests=HELD))
        assert sorted(answers) == [202, 409]
        revision = (await one.phase("canary", 1))["revision"]
        answers.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(note, partial(one.order, "promote", revision=revision))
            nursery.start_soon(note, partial(one.order, "pause", revision=revision))
        assert sorted(answers) == [200, 409]


async def test_freezes_of_servers_refuse_a_start_and_hold_a_rollout() -> None:
    async with rollout_scene() as one:
        await one.start(min_requests=HELD)
        await one.phase("canary", 1)
        one.server.freezes = ("zone b is lost",)
        await one.reaches(lambda shown: shown["said"] == "frozen: zone b is lost")
        one.server.freezes = ()
        await one.reaches(lambda shown: f"it needs {HELD}" in shown["said"])
        await one.order("rollback")
        await one.ends()
        one.server.freezes = ("the budget of availability is spent",)
        while (status := (await one.start()))[0] != 409:
            await one.order("rollback")
            await one.ends()
        message = status[1]["error"]["message"]
        assert "no rollout may begin now: the budget of availability is spent" in message
        assert "--despite-freeze" in message
        assert (await one.start(despite_freeze=True))[0] == 202
        assert (await one.ends())["phase"] == "promoted"
        entries = read_entries(take_snapshot(default_folder()))
        assert {e.reason for _, e in entries if e.action == "rollout.start"} >= {"despite a freeze"}


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": "code"}, 404, "no model is called 'code'"),
        ({"shares": [0.5, 0.1, 1]}, 400, "rising numbers that end with 1"),
        ({"shares": [0.1, 0.5]}, 400, "rising numbers that end with 1"),
        ({"shares": [10]}, 400, "the body is not valid: Expected `float` <= 1.0"),
        ({"shares": []}, 400, "the body is not valid"),
        ({"bake_s": 0}, 400, "the body is not valid"),
        ({"bake_s": 60, "max_step_s": 60}, 400, "at least 2 times bake_s, 120 s"),
        ({"step": 1}, 400, "unknown field `step`"),
        ({"accept_cost": 0.5}, 400, "the body is not valid"),
    ],
)
async def test_what_is_no_rollout_is_refused(
    fields: dict[str, object], status: int, words: str
) -> None:
    async with rollout_scene() as one:
        answer = await one.start(**fields)
        assert (answer[0], words in str(answer[1])) == (status, True), answer
        for method, path in (("GET", "/chat"), ("POST", "/chat/pause"), ("POST", "/chat/stop")):
            refused = await ask_soon(one.folder, method, f"/admin/rollouts{path}", json={})
            assert refused[0] in (404, 409), refused


async def test_the_port_rolls_out_versions_of_the_store_and_no_path() -> None:
    with bind_port("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
    async with rollout_scene(admin_port=port) as one:

        def ask_port(ref: str) -> int:
            url = f"http://127.0.0.1:{port}/admin/rollouts"
            return httpx2.post(url, json={"model": "chat", "ref": ref}).status_code

        assert await trio.to_thread.run_sync(ask_port, one.supervisor.added["chat"]) == 403
        assert await trio.to_thread.run_sync(ask_port, "chat@stable") == 202
        await one.reaches(lambda shown: one.supervisor.reference_only == {"chat-2": True})


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew often, for a short time."""
    monkeypatch.setattr(rollouts, "RENEW_S", 0.05)
    monkeypatch.setattr(rollouts, "VALID_S", 1.0)
    monkeypatch.setattr(rollout, "VALID_S", 1.0)


@pytest.mark.usefixtures("hasty")
async def test_without_its_store_servers_fall_back_and_the_step_begins_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rollout_scene() as one:
        await one.start(min_requests=HELD)
        before = await one.phase("canary", 1)
        change = SqliteRollouts._change

        def fail(*_: object) -> None:
            raise RolloutStoreAway("the journal cannot be written: disk full")

        with capture_logs() as lines:
            monkeypatch.setattr(SqliteRollouts, "_change", fail)
            await one.server.until_routed(wanted=False)
            shown = await one.reaches(lambda shown: shown["trouble"])
            assert shown["trouble"] == "the journal cannot be written: disk full"
            frozen = f"frozen: the rollout cannot be written: {shown['trouble']}"
            await one.reaches(lambda shown: shown["said"] == frozen)
            status, refused = await one.order("promote")
            assert (status, "disk full" in str(refused)) == (409, True)
            assert len([one for one in lines if one["event"] == "rollout_not_kept"]) == 1
        monkeypatch.setattr(SqliteRollouts, "_change", change)
        await one.server.until_routed()
        after = await one.shown()
        assert (after["phase"], after["step"]) == ("canary", 1)
        assert after["began_at"] > before["began_at"] + 1.0


@pytest.mark.usefixtures("hasty")
async def test_a_rollout_that_another_control_has_written_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rollout_scene() as one:
        await one.start(min_requests=HELD)
        await one.phase("canary", 1)
        await one.server.until_routed()

        def refuse(*_: object) -> None:
            raise RolloutStolen("chat")

        with capture_logs() as lines:
            monkeypatch.setattr(SqliteRollouts, "_change", refuse)
            while "rollout_left" not in [line["event"] for line in lines]:
                await trio.lowlevel.checkpoint()
            await one.server.until_routed(wanted=False)
        assert [*one.supervisor.added] == ["chat", "chat-2"], "the other one has it"
        left = await one.shown()
        assert "another control has changed" in left["trouble"]
        assert (left["is_over"], left["is_left"]) == (False, True)
        for order in ("promote", "rollback"):
            status, refused = await one.order(order)
            assert (status, "orders to that control" in str(refused)) == (409, True)


async def test_a_control_of_several_hosts_only_moves_routes() -> None:
    async with scene_of_hosts() as one:
        await one.start()
        assert (await one.ends())["phase"] == "promoted"
        while one.server.permanent is None or one.server.permanent.stable != "chat-v2":
            await trio.lowlevel.checkpoint()
        assert one.server.permanent.shares == {"chat": 0.0, "chat-v2": 1.0}
        assert {"chat", "chat-v2"} == {*one.server.served}
        one.supervisor.added.pop("chat-v2")
        one.supervisor.added["chat-v2"] = ""
        status, refused = await one.start(ref="chat-v2")
        assert status == 400, refused


async def test_zones_get_the_candidate_one_after_another() -> None:
    async with rollout_scene() as one, trio.open_nursery() as nursery:
        servers = {zone: RolloutServer(one.folder, one.supervisor, zone) for zone in "abc"}
        one.server.sends = False
        for server in servers.values():
            nursery.start_soon(server.run)
        while (await one.start(zones=["b", "a"], min_requests=HELD))[0] != 202:
            await trio.lowlevel.checkpoint()  # control has not heard every server
        await one.phase("canary", 1)

        async def routed(*zones: str) -> None:
            """Wait until servers of these zones, and no other one, have a route."""
            while {name for name, server in servers.items() if server.route} != {*zones}:
                await trio.lowlevel.checkpoint()

        await routed("b")
        assert one.server.route is None, "it has no zone"
        await one.order("promote_fully")
        await one.phase("canary", 3)
        await one.order("promote")
        begins = f"zone a begins: ordered by {os_user()}"
        shown = await one.reaches(lambda shown: shown["history"][-1]["said"] == begins)
        assert (shown["phase"], shown["step"]) == ("canary", 3)
        await routed("a", "b")
        servers["c"].bad = lambda version: True
        await one.order("promote")
        assert (await one.ends())["phase"] == "promoted"
        assert one.supervisor.routes["chat"]["shares"] == {"chat-2": 1.0}
        status, refused = await one.start(zones=["b", "x"])
        assert (status, "allowed: each of the servers' zones once" in str(refused)) == (400, True)
        nursery.cancel_scope.cancel()


async def test_only_requests_of_the_current_zone_are_evidence() -> None:
    async with rollout_scene() as one, trio.open_nursery() as nursery:
        other = RolloutServer(one.folder, one.supervisor, "b")
        one.server.sends = False
        other.sends = True
        nursery.start_soon(other.run)
        first = RolloutServer(one.folder, one.supervisor, "a")
        first.sends = False
        nursery.start_soon(first.run)
        while (await one.start(zones=["a", "b"], min_requests=HELD))[0] != 202:
            await trio.lowlevel.checkpoint()
        await one.phase("canary", 1)
        while len(other.served) < 1000:
            await trio.lowlevel.checkpoint()
        assert (await one.shown())["counts"]["errors"] == [0, 0, 0, 0]
        first.sends = True
        await one.reaches(lambda shown: sum(shown["counts"]["errors"]) > 0)
        nursery.cancel_scope.cancel()


async def test_a_bad_candidate_on_several_hosts_is_rolled_back() -> None:
    async with scene_of_hosts() as one:
        one.server.bad = lambda version: version == "chat-v2"
        await one.start()
        assert (await one.ends())["phase"] == "rolled_back"
        assert (one.server.route, one.server.permanent) == (None, None)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
async def test_rollouts_in_redis_survive_its_death_and_go_to_the_next_control(
    tmp_path: Path,
) -> None:
    """Takes seconds: starts a Redis twice."""
    if PROGRAM is None:
        pytest.skip("there is no redis-server here")
    server = RedisServer(tmp_path)
    server.start()
    try:
        config = RedisMembersConfig(server.url)
        async with scene_of_hosts(redis=config) as one:
            _, begun = await one.start(bake_s=60)
            await one.reaches(lambda shown: "of 60 s" in shown["said"])
            assert (await one.order("promote"))[0] == 409
        async with scene_of_hosts(redis=config) as one:
            shown = await one.reaches(lambda shown: "of 60 s" in shown["said"])
            assert shown["id"] == begun["id"], "another state folder"
            server.stop()
            await one.reaches(lambda shown: "Redis does not answer" in shown["trouble"])
            server.start()
            await one.reaches(lambda shown: not shown["trouble"])
            await one.order("rollback")
            assert (await one.ends())["phase"] == "rolled_back"
    finally:
        server.stop()


class KilledControl:
    """A fleet whose control is a process that tests kill.

    Args:
      folder: directory of the fleet.
      supervisor: fake supervisor of the fleet.
    """

    def __init__(self, folder: Path, supervisor: FakeSupervisor) -> None:
        self.scene = RolloutScene(folder, supervisor)
        self.process = ControlProcess(folder, msgspec.to_builtins(config_of(folder, "chat")))

    async def restart(self) -> None:
        """Kill control and start it again."""
        await trio.to_thread.run_sync(self.process.end)
        self.scene.supervisor.gate = None
        await trio.to_thread.run_sync(self.process.start)

    async def restart_at(
        self, kind: str, order: Callable[[], Awaitable[tuple[int, object]]]
    ) -> None:
        """Give an order, and restart control while the supervisor carries out a request."""
        reached, never = trio.Event(), trio.Event()

        async def gate(asked: str, name: str) -> None:
            if asked == kind:
                reached.set()
                await never.wait()

        self.scene.supervisor.gate = gate
        assert (await order())[0] in (200, 202)
        await reached.wait()
        await self.restart()
        never.set()


@asynccontextmanager
async def killed_control() -> AsyncIterator[KilledControl]:
    with fleet_folder() as folder:
        async with supervised(folder, "chat") as supervisor, trio.open_nursery() as nursery:
            killed = KilledControl(folder, supervisor)
            nursery.start_soon(killed.scene.server.run)
            await trio.to_thread.run_sync(killed.process.start)
            yield killed
            assert killed.process.end(signal.SIGTERM) == 0
            nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_killed_before_the_end_control_goes_on_in_the_same_phase() -> None:
    """Takes seconds: kills and restarts a real control process."""
    async with killed_control() as killed:
        one = killed.scene
        await killed.restart_at("start_model", partial(one.start, min_requests=HELD))
        begun = await one.phase("canary", 1)
        await one.order("pause")
        paused = await one.phase("paused", 1)
        one.server.sends = False
        await killed.restart()
        again = await one.phase("paused", 1)
        assert (again["id"], again["began_at"]) == (begun["id"], paused["began_at"])
        assert sum(again["counts"]["errors"]) > 0, "its evidence was written"
        await one.server.until_routed()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "phase", "left", "kind", "is_alike"),
    [
        ("promote", "promoted", "chat-2", "drop_model", False),
        ("rollback", "rolled_back", "chat", "drop_model", False),
        ("promote", "promoted", "chat", "route", True),
        ("promote", "promoted", "chat", "drop_model", True),
        ("rollback", "rolled_back", "chat", "drop_model", True),
    ],
)
async def test_killed_while_a_version_is_removed_control_removes_it(
    order: str, phase: str, left: str, kind: str, is_alike: bool
) -> None:
    """Takes seconds: kills and restarts a real control process."""
    async with killed_control() as killed:
        one = killed.scene
        if is_alike:
            one.supervisor.start("chat")
            one.supervisor.alike.add(str(one.folder / "model"))
        await one.start(min_requests=HELD, shares=[1.0])
        await one.phase("canary", 1)
        await killed.restart_at(kind, partial(one.order, order))
        assert (await one.ends())["phase"] == phase
        assert [*await states(one.folder)] == [left]
