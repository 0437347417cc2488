"""Tests of switching a model to another version; crashes and failures leave the old one serving."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
import trio

from ops.audit.recording import default_folder
from ops.audit.verification import read_entries, take_snapshot
from ops.control import model_steps
from ops.ports import bind_port
from tests.ops.control.fleets import (
    ControlProcess,
    address_in,
    ask_soon,
    config_of,
    fleet_folder,
    server_end,
    states,
    supervised,
    version_of,
)
from tests.ops.control.test_changes import MODELS, Scene, killed_at, scene
from transport.control_protocol import Wake

if TYPE_CHECKING:
    from pathlib import Path

STEPS = ("add_version", "start_model", "route", "drop_model")


@pytest.fixture(autouse=True)
def own_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def no_wait_for_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_steps, "MEET_S", 0.0)


async def switch(one: Scene, name: str = "chat", ref: str | None = None) -> tuple[int, Any]:
    given = {"ref": one.model_dir if ref is None else ref}
    return await ask_soon(one.folder, "POST", f"{MODELS}/{name}/switch", json=given)


async def ask(one: Scene, method: str, path: str) -> tuple[int, Any]:
    return await ask_soon(one.folder, method, f"{MODELS}/{path}")


async def test_a_version_is_loaded_gets_the_name_and_then_the_other_one_goes() -> None:
    async with scene() as one:
        answer = await switch(one)
        assert await one.end_of(answer) == ("done", "chat is switched")
        kinds = [(kind, name) for kind, name in one.supervisor.requests]
        assert kinds == [
            ("add_version", "chat-2"),
            ("start_model", "chat-2"),
            ("route", "chat-2"),
            ("route", "chat-2"),
            ("drop_model", "chat"),
        ]
        assert await states(one.folder) == {"chat-2": "serving"}
        assert one.supervisor.routes["chat"]["shares"] == {"chat-2": 1.0}
        entries = read_entries(take_snapshot(default_folder()))
        told = [(e.action, e.subject, e.after) for _, e in entries]
        assert told[-2:] == [
            ("model.switch", "chat", None),
            ("model.switch", "chat", version_of("chat-2")),
        ]
        assert await one.end_of(await switch(one)) == ("done", "chat is switched")
        assert await states(one.folder) == {"chat-3": "serving"}


async def test_orders_name_a_version_by_its_public_name() -> None:
    async with scene() as one:
        await one.end_of(await switch(one))
        status, asked = await ask(one, "POST", "chat/sleep")
        assert (status, asked["model"]) == (202, "chat-2")
        assert (await one.end_of(await ask(one, "DELETE", "chat")))[0] == "done"
        assert await states(one.folder) == {}


async def test_a_name_is_free_at_once_after_its_version_was_dropped() -> None:
    async with scene(poll_s=3600.0) as one:  # control does not look at routes again
        await one.end_of(await switch(one))
        await one.end_of(await ask(one, "DELETE", "chat"))
        assert await one.end_of(await one.add("chat")) == ("done", "chat is added")
        assert [*one.supervisor.added] == ["chat"]


async def test_no_version_is_called_as_another_models_public_name() -> None:
    async with scene() as one:
        await one.end_of(await one.add("chat-2"))
        await one.end_of(await switch(one, "chat-2"))
        assert await one.end_of(await switch(one)) == ("done", "chat is switched")
        assert [*one.supervisor.added] == ["chat-2-2", "chat-3"]


@pytest.mark.parametrize("fault", ["files", "load", "memory", "server", "unready"])
async def test_what_cannot_serve_leaves_the_version_that_answers(fault: str) -> None:
    words = {
        "files": "model chat-2: there is no such directory",
        "load": "chat-2.decode-0 has died three times",
        "memory": r"budget is 100 MiB, of which chat (pinned, or replaced only once it is ready)",
        "server": "server: its tokenizer is broken",
        "unready": "the servers took longer than 0.3 s; their log says why",
    }
    config: dict[str, dict[str, float]] = {
        "memory": {"memory_bytes": 100 << 20},
        "unready": {"servers_s": 0.3},
    }
    async with scene(**config.get(fault, {})) as one:
        await one.end_of(await ask(one, "POST", "chat/load"))
        pids = one.supervisor.pids("chat")
        match fault:
            case "files":
                one.supervisor.failures["chat-2"] = words[fault]
            case "load":
                one.supervisor.fail_start["chat-2"] = words[fault]
            case "server":
                one.server.refused["chat-2"] = "its tokenizer is broken"
            case "unready":
                one.server.unready.add("chat-2")
        status, why = await one.end_of(await switch(one))
        assert (status, words[fault] in why) == ("failed", True), why
        assert [*await states(one.folder)] == [*one.supervisor.added] == ["chat"]
        assert one.supervisor.pids("chat") == pids
        assert not one.supervisor.withdrawn & one.supervisor.added.keys()


async def test_a_version_that_computes_alike_keeps_the_workers() -> None:
    async with scene() as one:
        await one.end_of(await ask(one, "POST", "chat/load"))
        pids = one.supervisor.pids("chat")
        one.supervisor.alike.add("chat:warm")
        assert await one.end_of(await switch(one, ref="chat:warm")) == ("done", "chat is switched")
        assert one.supervisor.pids("chat") == pids
        _, listed = await ask_soon(one.folder, "GET", MODELS)
        [shown] = listed["models"]
        assert (shown["name"], shown["digest"]) == ("chat", version_of("chat:warm"))
        await one.end_of(await switch(one))
        _, listed = await ask_soon(one.folder, "GET", MODELS)
        names = [(shown["name"], shown["public_name"]) for shown in listed["models"]]
        assert names == [("chat-2", "chat")]


async def test_a_version_that_computes_alike_and_cannot_be_read_is_taken_back() -> None:
    async with scene() as one:
        one.supervisor.alike |= {"chat:warm", "chat:broken"}
        await one.end_of(await switch(one, ref="chat:warm"))
        one.server.refused["chat"] = "its template is broken"
        ended = await one.end_of(await switch(one, ref="chat:broken"))
        assert ended == ("failed", "server: its template is broken")
        assert one.supervisor.version("chat") == version_of("chat:warm")
        assert one.supervisor.before == {}
        while (await ask_soon(one.folder, "GET", MODELS))[1]["models"][0]["digest"] != (
            version_of("chat:warm")
        ):
            await trio.lowlevel.checkpoint()


async def test_a_name_moves_once_every_server_may_have_been_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another server may dial control that has just started, and refuse the version."""
    monkeypatch.setattr(model_steps, "MEET_S", 3600.0)
    async with scene(servers_s=0.2, server_drain_s=0.05) as one:
        status, why = await one.end_of(await switch(one))
        assert (status, why.startswith("the servers took longer than 0.2 s")) == ("failed", True)
        assert [*one.supervisor.added] == ["chat"]


async def test_nothing_else_changes_during_a_switch_but_requests_wake_the_old_version() -> None:
    async with scene() as one:
        reached, going_on = trio.Event(), trio.Event()

        async def gate(kind: str, name: str) -> None:
            if (kind, name) == ("start_model", "chat-2"):
                reached.set()
                await going_on.wait()

        one.supervisor.gate = gate
        answer = await switch(one)
        await reached.wait()
        for method, path in (("DELETE", "chat"), ("DELETE", "chat-2"), ("POST", "chat/load")):
            status, refused = await ask(one, method, path)
            assert status == 409
            assert f"switch of chat is running (operation {answer[1]['id']})" in str(refused)
        assert (await switch(one))[0] == 409
        async with server_end(address_in(one.folder)) as end:
            for name in ("chat", "chat-2"):
                await end.say(Wake(name))
            while ("start_model", "chat") not in one.supervisor.requests:
                await trio.lowlevel.checkpoint()
        going_on.set()
        assert await one.end_of(answer) == ("done", "chat is switched")


async def test_the_port_switches_to_versions_of_the_store_and_to_no_path() -> None:
    with bind_port("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
    async with scene(admin_port=port) as one:

        def ask_port(ref: str) -> tuple[int, Any]:
            url = f"http://127.0.0.1:{port}{MODELS}/chat/switch"
            answer = httpx2.post(url, json={"ref": ref})
            return answer.status_code, answer.json()

        status, answer = await trio.to_thread.run_sync(ask_port, one.model_dir)
        assert status == 403
        assert "use the Unix socket to give a path" in answer["error"]["message"]
        assert one.supervisor.requests == []
        answer = await trio.to_thread.run_sync(ask_port, "chat@stable")
        assert await one.end_of(answer) == ("done", "chat is switched")
        assert one.supervisor.reference_only == {"chat-2": True}


async def test_a_move_whose_answer_is_late_is_not_taken_back() -> None:
    async with scene(operation_timeout_s=1.0) as one:

        async def gate(kind: str, name: str) -> None:
            route = one.supervisor.routes.get("chat")
            if (kind, name) == ("done", "chat-2") and route and route["stable"] == "chat-2":
                one.supervisor.gate = None
                await trio.sleep_forever()

        one.supervisor.gate = gate
        assert await one.end_of(await switch(one)) == ("done", "chat is switched")
        assert await states(one.folder) == {"chat-2": "serving"}


async def test_what_is_no_switch_is_refused() -> None:
    async with scene() as one:
        status, answer = await switch(one, "none")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, answer = await switch(one, ref="")
        assert (status, answer["error"]["code"]) == (400, "bad_request")


@pytest.mark.slow
async def test_killed_at_any_step_a_switch_goes_on(request: pytest.FixtureRequest) -> None:
    """Takes over a second: kills and restarts real control processes."""
    steps = STEPS if request.config.getoption("whole") else STEPS[2:]
    with fleet_folder() as folder:
        control = ControlProcess(folder, msgspec.to_builtins(config_of(folder, "chat")))
        async with supervised(folder, "chat") as supervisor, trio.open_nursery() as nursery:
            one = Scene(folder, supervisor)
            nursery.start_soon(one.server.run)
            await trio.to_thread.run_sync(control.start)
            for number, step in enumerate(steps, 2):
                ended = await killed_at(step, lambda: switch(one), one, control)
                assert ended == ("done", "chat is switched")
                assert await states(folder) == {f"chat-{number}": "serving"}
                assert not supervisor.withdrawn & supervisor.added.keys()
            assert control.end(signal.SIGTERM) == 0
            nursery.cancel_scope.cancel()
