"""Tests of loading and unloading adapters through control; failures are rolled back."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from ops.audit.recording import default_folder
from ops.audit.verification import read_entries, take_snapshot
from ops.control import model_steps
from ops.control.process import run_control
from ops.ports import bind_port
from tests.ops.control.fleets import (
    ControlProcess,
    ask_soon,
    config_of,
    fleet_folder,
    recorded,
    supervised,
    version_of,
)
from tests.ops.control.test_changes import (
    Scene,
    killed_at,
    no_wait_for_servers,
    own_audit_log,
    scene,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["no_wait_for_servers", "own_audit_log"]

ADAPTERS = "/admin/models/chat/adapters"
PATH = "/adapters/sql"
VLLM = {"lora_name": "chat:sql", "lora_path": PATH}


async def load(one: Scene, name: str = "sql", ref: str = PATH) -> tuple[int, Any]:
    return await ask_soon(one.folder, "POST", ADAPTERS, json={"name": name, "ref": ref})


async def unload(one: Scene, name: str = "sql") -> tuple[int, Any]:
    return await ask_soon(one.folder, "DELETE", f"{ADAPTERS}/{name}")


async def shown(one: Scene) -> dict[str, str]:
    """Return the model's adapters as shown by control."""
    _, listed = await ask_soon(one.folder, "GET", "/admin/models")
    [chat] = listed["models"]
    return dict(chat["adapters"])


async def vllm(one: Scene, order: str, body: dict[str, Any]) -> tuple[int, str]:
    """Send a request to vLLM's routes; return status and text."""

    def ask() -> tuple[int, str]:
        transport = httpx2.HTTPTransport(uds=str(one.folder / "admin.sock"))
        with httpx2.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            answer = client.post(f"/v1/{order}_lora_adapter", json=body)
            return answer.status_code, answer.text

    return await trio.to_thread.run_sync(ask)


@pytest.mark.slow
async def test_an_adapter_is_loaded_and_unloaded_and_both_are_recorded() -> None:
    with capture_logs() as lines:
        async with scene() as one:
            answer = await load(one)
            assert await one.end_of(answer) == ("done", "chat:sql is loaded")
            assert await shown(one) == {"sql": version_of(PATH)}
            assert await recorded(answer[1]["id"]) == [
                ("adapter.load", "begun"),
                ("adapter.load", "done"),
            ]
            entries = read_entries(take_snapshot(default_folder()))
            told = [(e.subject, e.after) for _, e in entries if e.request_id == answer[1]["id"]]
            assert told == [("chat:sql", None), ("chat:sql", version_of(PATH))]
            assert await one.end_of(await load(one)) == ("done", "chat:sql is loaded")
            answer = await unload(one)
            assert await one.end_of(answer) == ("done", "chat:sql is unloaded")
            assert await shown(one) == {}
            assert one.supervisor.loaded == {"chat": {}}
            assert await recorded(answer[1]["id"]) == [
                ("adapter.unload", "begun"),
                ("adapter.unload", "done"),
            ]
            _, operation = await ask_soon(one.folder, "GET", f"/admin/operations/{answer[1]['id']}")
    told = [line for line in lines if line["event"] == "operation_over"]
    assert PATH not in f"{told}{operation}", "settings are not shown"


@pytest.mark.slow
async def test_vllm_s_routes_answer_at_the_end() -> None:
    async with scene() as one:
        status, text = await vllm(one, "load", VLLM | {"lora_int_id": 1, "load_inplace": False})
        assert (status, text) == (200, "Success: LoRA adapter 'chat:sql' added successfully.")
        assert one.supervisor.named == {"chat": {"sql"}}
        # With a single model, its name is optional.
        status, text = await vllm(one, "unload", {"lora_name": "sql"})
        assert (status, text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        one.supervisor.failures["chat:sql"] = "adapter sql: r is 128"
        status, text = await vllm(one, "load", VLLM)
        assert (status, "adapter sql: r is 128" in text) == (400, True)
        for order, body, code, words in (
            ("unload", {"lora_name": "chat:fr"}, 404, "chat has no adapter 'fr'; it has none"),
            ("load", {"lora_name": "code:sql", "lora_path": "/x"}, 404, "this fleet has chat"),
            ("load", {"lora_name": "chat:sql"}, 400, "the body has no lora_path"),
            ("load", {"lora_name": "chat:", "lora_path": "/x"}, 400, "is not an adapter name"),
            ("load", VLLM | {"load_inplace": True}, 400, "unload 'chat:sql' first"),
            ("load", VLLM | {"lora_ranks": 8}, 400, "unknown field 'lora_ranks'"),
            ("load", VLLM | {"lora_path": ["/x"]}, 400, "the body has no lora_path"),
        ):
            status, text = await vllm(one, order, body)
            assert (status, words in text) == (code, True), text
        assert await one.end_of(await one.add()) == ("done", "code is added")
        status, text = await vllm(one, "load", {"lora_name": "sql", "lora_path": "/x"})
        assert status == 400
        assert "does not name a model; give MODEL:NAME, with one of chat, code" in text


async def test_what_servers_do_not_take_is_taken_back() -> None:
    async with scene(servers_s=0.3) as one:
        one.server.hides.add("chat:sql")
        status, why = await one.end_of(await load(one))
        assert status == "failed"
        assert "did not accept chat:sql within 0.3 s (control.servers_s)" in why
        assert (one.supervisor.loaded, one.supervisor.named) == ({"chat": {}}, {"chat": set()})
        assert await shown(one) == {}


async def test_what_workers_do_not_let_go_at_once_is_taken_back_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_steps, "RETRY_S", 0.05)
    async with scene(servers_s=0.3) as one:
        one.server.hides.add("chat:sql")
        answer = await load(one)
        while "sql" not in one.supervisor.named.get("chat", ()):
            await trio.lowlevel.checkpoint()
        one.supervisor.failures["chat:sql"] = "a restart is under way"
        while len([kind for kind, _ in one.supervisor.requests if kind == "drop_adapter"]) < 2:
            await trio.lowlevel.checkpoint()
        assert one.supervisor.loaded == {"chat": {"sql": PATH}}
        del one.supervisor.failures["chat:sql"]
        status, why = await one.end_of(answer)
        assert (status, "did not accept chat:sql" in why) == ("failed", True)
        assert (one.supervisor.loaded, one.supervisor.named) == ({"chat": {}}, {"chat": set()})


async def test_the_supervisor_is_right_about_adapters_that_do_not_change() -> None:
    """If the supervisor was silent at its start, control knows only the models in the settings."""
    async with scene(poll_s=0.05) as one:
        one.supervisor.loaded, one.supervisor.named = {"chat": {"sql": PATH}}, {"chat": {"sql"}}
        while await shown(one) != {"sql": version_of(PATH)}:
            await trio.lowlevel.checkpoint()
        assert await one.end_of(await unload(one)) == ("done", "chat:sql is unloaded")


async def test_workers_lose_an_adapter_once_its_requests_have_ended() -> None:
    async with scene() as one:
        await one.end_of(await load(one))
        one.server.keeps.add("chat:sql")
        answer = await unload(one)
        while "sql" in one.supervisor.named["chat"]:
            await trio.lowlevel.checkpoint()
        _, operation = await ask_soon(one.folder, "GET", f"/admin/operations/{answer[1]['id']}")
        assert operation["progress"] == "chat:sql: its requests finish"
        conflict = await load(one)
        assert conflict[0] == 409
        assert f"(operation {answer[1]['id']})" in conflict[1]["error"]["message"]
        assert one.supervisor.loaded == {"chat": {"sql": PATH}}
        one.server.keeps.clear()
        assert await one.end_of(answer) == ("done", "chat:sql is unloaded")


async def test_an_adapter_that_workers_keep_may_be_named_again() -> None:
    async with scene() as one:
        await one.end_of(await load(one))
        one.supervisor.failures["chat:sql"] = "a restart of chat is under way"
        assert await one.end_of(await unload(one)) == ("failed", "a restart of chat is under way")
        assert await shown(one) == {"sql": version_of(PATH)}


async def test_the_port_takes_versions_of_the_store_and_no_paths_of_adapters() -> None:
    with bind_port("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
    async with scene(admin_port=port) as one:

        def ask(path: str, body: dict[str, str]) -> tuple[int, Any]:
            answer = httpx2.post(f"http://127.0.0.1:{port}{path}", json=body)
            return answer.status_code, answer.json()

        for ref in (PATH, "./sql", "~/sql"):
            for path, body in (
                (ADAPTERS, {"name": "sql", "ref": ref}),
                ("/v1/load_lora_adapter", {"lora_name": "chat:sql", "lora_path": ref}),
            ):
                status, answer = await trio.to_thread.run_sync(ask, path, body)
                assert status == 403, answer
                assert "use the Unix socket to give a path" in answer["error"]["message"]
        assert one.supervisor.requests == []
        given = {"name": "sql", "ref": "chat-sql@stable"}
        answer = await trio.to_thread.run_sync(ask, ADAPTERS, given)
        assert await one.end_of(answer) == ("done", "chat:sql is loaded")
        await one.end_of(await load(one, "other"))
        assert one.supervisor.reference_only == {"chat:sql": True, "chat:other": False}


async def test_control_that_starts_anew_lets_requests_of_an_adapter_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_steps, "MEET_S", 0.5)
    with fleet_folder() as folder:
        async with supervised(folder, "chat") as supervisor, trio.open_nursery() as nursery:
            one = Scene(folder, supervisor)
            nursery.start_soon(one.server.run)
            one.server.keeps.add("chat:sql")
            async with trio.open_nursery() as first:
                await first.start(run_control, config_of(folder, "chat"))
                await one.end_of(await load(one))
                answer = await unload(one)
                while "sql" in supervisor.named["chat"]:
                    await trio.lowlevel.checkpoint()
                first.cancel_scope.cancel()
            await nursery.start(run_control, config_of(folder, "chat"))
            began = trio.current_time()
            while trio.current_time() < began + 2 * model_steps.MEET_S:
                await shown(one)
            assert supervisor.loaded == {"chat": {"sql": PATH}}
            one.server.keeps.clear()
            assert await one.end_of(answer) == ("done", "chat:sql is unloaded")
            nursery.cancel_scope.cancel()


@pytest.mark.slow
async def testkilled_at_any_step_an_adapter_is_there_wholly_or_not_at_all(
    request: pytest.FixtureRequest,
) -> None:
    """Takes over a second: kills and restarts real control processes."""
    is_whole = request.config.getoption("whole")
    unloading = ("withdraw_adapter", "drop_adapter") if is_whole else ("drop_adapter",)
    with fleet_folder() as folder:
        control = ControlProcess(folder, msgspec.to_builtins(config_of(folder, "chat")))
        async with supervised(folder, "chat") as supervisor, trio.open_nursery() as nursery:
            one = Scene(folder, supervisor)
            nursery.start_soon(one.server.run)
            await trio.to_thread.run_sync(control.start)
            orders: list[tuple[str, Callable[[], Awaitable[tuple[int, Any]]], str]] = [
                ("load_adapter", partial(load, one), "loaded"),
                *((step, partial(unload, one), "unloaded") for step in unloading),
            ]
            for step, order, word in orders:
                if word == "unloaded" and "sql" not in supervisor.named["chat"]:
                    await one.end_of(await load(one))
                end = await killed_at(step, order, one, control)
                assert end == ("done", f"chat:sql is {word}")
                there = {"sql"} if word == "loaded" else set()
                assert (supervisor.loaded["chat"].keys(), supervisor.named["chat"]) == (
                    there,
                    there,
                )
                assert (await shown(one)).keys() == there
            assert control.end(signal.SIGTERM) == 0
            nursery.cancel_scope.cancel()
