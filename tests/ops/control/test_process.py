"""Tests of the whole control process over real sockets, with a supervisor of real processes."""

from __future__ import annotations

import os
import random
import signal
import stat
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from ops.audit.events import AuditOutcome
from ops.audit.recording import default_folder
from ops.control.auditing import audit
from ops.control.operations import WantedState
from ops.control.process import run_control
from ops.control.server_channel import ServerChannel
from tests.ops.control.fleets import (
    ControlProcess,
    FakeSupervisor,
    ServerEnd,
    address_in,
    admin,
    ask_soon,
    config_of,
    ended,
    fleet_folder,
    recorded,
    server_end,
    states,
    supervised,
    version_of,
)
from transport.control_protocol import (
    ADMIN_SOCKET,
    Activity,
    ModelActivity,
    ModelNews,
    Models,
    ModelState,
    Wake,
)
from transport.frames import Goodbye, ServerReport
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.errors import AuditLogError, ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@asynccontextmanager
async def controlled(*models: str, **fields: float) -> AsyncIterator[tuple[Path, FakeSupervisor]]:
    """Run control in this process."""
    with fleet_folder() as folder:
        async with supervised(folder, *models) as supervisor, trio.open_nursery() as nursery:
            await nursery.start(run_control, config_of(folder, *models, **fields))
            yield folder, supervisor
            nursery.cancel_scope.cancel()


async def test_an_order_is_done_shown_and_recorded() -> None:
    async with controlled("chat", "code") as (folder, supervisor):
        status, operation = await ask_soon(folder, "POST", "/admin/models/chat/load")
        assert status in (200, 202)
        done = await ended(folder, operation["id"])
        assert (done["status"], done["wanted"]) == ("done", "load")
        assert len(supervisor.pids("chat")) == 2
        again = await ask_soon(folder, "POST", "/admin/models/chat/wake")
        assert (again[0], again[1]["progress"]) == (200, "chat is already warm")
        _, listed = await ask_soon(folder, "GET", "/admin/models")
        chat, code = listed["models"]
        assert (chat["state"], code["state"]) == ("warm", "staged")
        assert [worker["pid"] for worker in chat["workers"]] == supervisor.pids("chat")
        assert chat["last_used_s_ago"] is None
        for action, state in (("sleep", "sleeping"), ("unload", "staged")):
            _, operation = await ask_soon(folder, "POST", f"/admin/models/chat/{action}")
            await ended(folder, operation["id"])
            assert (await states(folder))["chat"] == state
        assert supervisor.pids("chat") == []
        path = f"/admin/operations/{operation['id']}"
        assert (await ask_soon(folder, "GET", path))[1]["progress"] == "chat is staged"
        assert await recorded(done["id"]) == [("model.load", "begun"), ("model.load", "done")]


async def test_what_cannot_be_recorded_is_not_done_and_ends_nothing() -> None:
    async with controlled("chat") as (folder, supervisor):
        default_folder().mkdir(parents=True, mode=0o755)
        (default_folder() / "of another program").touch()
        status, answer = await ask_soon(folder, "POST", "/admin/models/chat/load")
        assert (status, "holds other files too" in answer["error"]["message"]) == (503, True)
        with pytest.raises(AuditLogError, match="holds other files too"):
            # Recording the end of an order fails if the directory is no longer private.
            await audit(WantedState.LOAD, "chat", "port:1", "id", AuditOutcome.DONE)
        assert not supervisor.requests


async def test_what_cannot_be_is_refused_with_the_reason() -> None:
    async with controlled("chat", memory_bytes=1000) as (folder, supervisor):
        for method, path, status, message in (
            ("POST", "/admin/models/chat/load", 409, "does not fit: the budget is 1000 B"),
            ("POST", "/admin/models/none/load", 404, "this fleet has chat"),
            ("POST", "/admin/models/chat/eat", 404, "allowed: load, wake, sleep, unload"),
            ("GET", "/admin/operations/none", 404, "operation 'none' does not exist"),
            ("GET", "/v1/models", 404, "the routes are below /admin"),
            ("DELETE", "/admin/models", 405, "the routes are below /admin"),
            ("POST", "/models/load", 400, "the body is not a JSON object"),
            ("POST", "/models/eat", 404, "allowed: load, unload"),
        ):
            answer = await ask_soon(folder, method, path)
            assert (answer[0], message in answer[1]["error"]["message"]) == (status, True), answer
        answer = await ask_soon(folder, "POST", "/models/load", content=b'{"model":"\xff"}')
        assert answer[0] == 400
        supervisor.failures["chat"] = "never"
        for headers in (
            {"origin": "https://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"host": "evil.example"},
        ):
            answer = await ask_soon(folder, "GET", "/admin/models", headers=headers)
            assert answer[0] == 403


async def test_a_model_whose_file_system_gives_errors_is_absent() -> None:
    with fleet_folder() as folder:
        async with supervised(folder, "chat") as supervisor, trio.open_nursery() as nursery:
            supervisor.added["chat"] = "/" + 300 * "x"
            await nursery.start(run_control, config_of(folder, "chat"))
            assert await states(folder) == {"chat": "absent"}
            nursery.cancel_scope.cancel()


async def test_a_load_that_fails_says_why() -> None:
    async with controlled("chat") as (folder, supervisor):
        supervisor.failures["chat"] = "chat.decode-0: config.json is missing; download it"
        _, operation = await ask_soon(folder, "POST", "/admin/models/chat/load")
        done = await ended(folder, operation["id"])
        assert (done["status"], done["progress"]) == ("failed", supervisor.failures["chat"])


async def test_llama_cpps_routes_mean_the_same() -> None:
    async with controlled("chat") as (folder, supervisor):
        assert await ask_soon(folder, "POST", "/models/load", json={"model": "chat"}) == (
            200,
            {"success": True},
        )
        with admin(folder) as client:
            while True:
                listed = await trio.to_thread.run_sync(client.get, "/models")
                (model,) = listed.json()["data"]
                if model["status"]["value"] == "loaded":
                    break
        assert model["id"] == "chat"
        assert supervisor.requests == [("start_model", "chat")]


async def test_sockets_are_this_users_alone() -> None:
    async with controlled("chat") as (folder, _):
        assert stat.S_IMODE((folder / ADMIN_SOCKET).stat().st_mode) == 0o600
    with fleet_folder() as folder:
        folder.chmod(0o755)
        with pytest.raises(ConfigError, match="has mode 0755"):
            await run_control(config_of(folder, "chat"))


async def use(server: ServerEnd, in_flight: int, *, is_ready: bool = True) -> None:
    """Report requests for the only model."""
    last_used = 0.0 if in_flight else None
    model = ModelActivity("chat", in_flight, 0, last_used, is_ready)
    await server.say(Activity("server", (model,)))


async def test_a_server_wakes_a_model_hears_of_it_and_keeps_it_while_it_is_busy() -> None:
    async with (
        controlled("chat", silence_s=0.2) as (folder, supervisor),
        server_end(address_in(folder)) as server,
    ):
        assert (await server.hear("staged")).digest == version_of("chat")
        await server.say(Wake("chat"))
        assert (await server.hear("warm")).predicted_ready_s == 0.0
        await use(server, 1, is_ready=False)
        await use(server, 1)
        await server.hear("serving")
        assert supervisor.requests == [("start_model", "chat")]


async def test_servers_are_told_the_worker_seconds_of_each_version() -> None:
    async with (
        controlled("chat") as (folder, supervisor),
        server_end(address_in(folder)) as server,
    ):
        supervisor.worker_seconds["chat"] = 12.25
        while (told := (await server.hear("staged")).worker_seconds) != {version_of("chat"): 12.25}:
            assert told in ({version_of("chat"): 0.0}, {})


async def test_what_changes_while_servers_are_told_is_told_at_once() -> None:
    states = [ModelState.WARM, ModelState.LOADING]

    def news() -> Models:
        """Return the state and simulate a change right after the read."""
        state = states[-1]
        if len(states) > 1:
            states.pop()
            channel.publish()
        return Models((ModelNews("chat", "", state, 0.0, 0),))

    with fleet_folder() as folder:
        seldom = LinkConfig(heartbeat_interval_s=3600.0, peer_timeout_s=9e3, lease_ttl_s=1e4)
        config = replace(config_of(folder, "chat"), link=seldom)
        channel = ServerChannel(config, lambda said: None, lambda zone: news(), lambda: True)
        async with trio.open_nursery() as nursery:
            with closing(ZmqNetwork(config.link)) as network, trio.fail_after(PATIENCE_S):
                await nursery.start(channel.run, network)
                async with server_end(config.address) as server:
                    await server.hear("warm")
                nursery.cancel_scope.cancel()


async def test_what_runs_in_a_server_that_hands_over_counts_beside_its_successor() -> None:
    async with controlled("chat") as (folder, _):
        address = address_in(folder)
        async with server_end(address) as old, server_end(address) as new:
            await use(old, 2)
            await use(new, 1)
            num_requests = 0
            with trio.fail_after(PATIENCE_S):
                while num_requests != 3:
                    _, listed = await ask_soon(folder, "GET", "/admin/models")
                    num_requests = listed["models"][0]["requests"]


@pytest.mark.parametrize("nonsense", [b'{"say":"rm"}', b'{"say":"\xff"}'])
async def test_a_server_that_speaks_nonsense_is_cut_off_and_others_are_not(
    nonsense: bytes,
) -> None:
    async with controlled("chat") as (folder, _):
        address = address_in(folder)
        async with server_end(address) as bad, server_end(address) as good:
            await bad.connection.send(ServerReport(nonsense))
            while not isinstance(await bad.next_frame(), Goodbye):
                pass
            await good.hear("staged")


PATIENCE_S = 10.0
MOMENTS = ("accepted", "asked", "started")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["load", "sleep"])
async def test_killed_at_any_moment_nothing_is_half_done(
    action: str, request: pytest.FixtureRequest
) -> None:
    """Takes over a second: kills and restarts real control processes."""
    moments: list[str | float] = list(MOMENTS)
    if request.config.getoption("whole"):
        draw = random.Random(1)
        moments += [draw.uniform(0.0, 0.05) for _ in range(20)]
    with fleet_folder() as folder:
        config = msgspec.to_builtins(config_of(folder, "chat", "code"))
        control = ControlProcess(folder, config)
        async with supervised(folder, "chat", "code") as supervisor:
            supervisor.start("code")
            others = supervisor.pids("code")
            await trio.to_thread.run_sync(control.start)
            for moment in moments:
                await _kill_in_the_middle(folder, supervisor, control, action, moment)
                assert supervisor.pids("code") == others
            assert (await states(folder))["code"] == "warm"
            assert control.end(signal.SIGTERM) == 0
            for pid in others:
                os.kill(pid, 0)


async def _kill_in_the_middle(
    folder: Path,
    supervisor: FakeSupervisor,
    control: ControlProcess,
    action: str,
    moment: str | float,
) -> None:
    """Kill and restart control at a moment of an operation, and check the operation's result."""
    supervisor.gate = None
    before = {"load": "unload", "sleep": "load"}[action]
    _, operation = await ask_soon(folder, "POST", f"/admin/models/chat/{before}")
    assert (await ended(folder, operation["id"]))["status"] == "done"
    reached, going_on = trio.Event(), trio.Event()

    async def gate(kind: str, name: str) -> None:
        assert name == "chat"
        if (kind == "done") == (moment == "started"):
            reached.set()
            await going_on.wait()

    if moment in ("asked", "started"):
        supervisor.gate = gate
    status, operation = await ask_soon(folder, "POST", f"/admin/models/chat/{action}")
    assert status in (200, 202)
    if supervisor.gate is not None:
        await reached.wait()
    elif isinstance(moment, float):
        await trio.sleep(moment)
    await trio.to_thread.run_sync(control.end)
    supervisor.gate = None
    going_on.set()
    await trio.to_thread.run_sync(control.start)
    done = await ended(folder, operation["id"])
    assert done["status"] == "done", done
    assert (await states(folder))["chat"] == {"load": "warm", "sleep": "sleeping"}[action]
    assert len(supervisor.pids("chat")) == {"load": 2, "sleep": 0}[action]
