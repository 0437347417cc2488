"""Tests of adding and dropping models through control; crashes and failures are rolled back."""

from __future__ import annotations

import signal
import sqlite3
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from ops.audit.recording import default_folder
from ops.audit.verification import read_entries, take_snapshot
from ops.control import model_steps
from ops.control.control import Control, new_id
from ops.control.controller import Controller, ControlStep
from ops.control.journal import FILE_NAME, SCHEMA, opened_journal
from ops.control.operations import Operation, WantedState
from ops.control.process import run_control
from ops.ports import bind_port
from ops.running_fleets import SUPERVISOR_SOCKET
from tests.ops.control.fleets import (
    ControlProcess,
    FakeSupervisor,
    ServerEnd,
    address_in,
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
from transport.control_protocol import Activity, ModelActivity
from transport.frames import Goodbye
from transport.link import PeerGone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

MODELS = "/admin/models"
SAID_S = 0.02


@pytest.fixture(autouse=True)
def own_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def no_wait_for_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_steps, "MEET_S", 0.0)


class FakeServer:
    """A fake server that reports the models that the supervisor tells servers to serve.

    Args:
      folder: directory of the fleet.
      supervisor: fake supervisor of the fleet.

    Attributes:
      refused: why it refuses models, by name.
      keeps: models and adapters that it has not dropped yet.
      hides: models and adapters that it does not report.
      older: models of which it reports an earlier version.
      identity: identity of its link.
      unready: models for which it has not connected to the workers.
    """

    def __init__(self, folder: Path, supervisor: FakeSupervisor) -> None:
        self.refused: dict[str, str] = {}
        self.keeps: set[str] = set()
        self.hides: set[str] = set()
        self.older: set[str] = set()
        self.unready: set[str] = set()
        self.identity = b"server"
        self._address = address_in(folder)
        self._supervisor = supervisor

    async def run(self) -> None:
        """Report repeatedly, and reconnect if control is away."""
        while True:
            try:
                linked = server_end(self._address, identity=self.identity)
                async with linked as end, trio.open_nursery() as nursery:
                    nursery.start_soon(self._hear, end, nursery.cancel_scope)
                    await self._say(end)
            except* PeerGone:
                await trio.sleep(SAID_S)

    async def _say(self, end: ServerEnd) -> None:
        while True:
            told = {*self._supervisor.added} - self._supervisor.withdrawn
            kept = {one for one in self.keeps if ":" not in one}
            names = (told - self.refused.keys() - self.hides) | kept
            models = tuple(
                ModelActivity(
                    name,
                    in_flight=0,
                    queued=0,
                    last_used_s_ago=None,
                    is_ready=name not in self.unready,
                    adapters=self._adapters(name),
                    version=self._version(name),
                )
                for name in names
            )
            refused = {name: why for name, why in self.refused.items() if name in told}
            await end.say(self._activity(models, refused))
            await trio.sleep(SAID_S)

    def _activity(self, models: tuple[ModelActivity, ...], refused: dict[str, str]) -> Activity:
        return Activity("server", models, refused)

    def _version(self, model: str) -> str:
        """Return the version of a model that it reports."""
        is_older = model in self.older
        return version_of(f"{model} before") if is_older else self._supervisor.version(model)

    def _adapters(self, model: str) -> tuple[str, ...]:
        """Return the adapter digests of a model that it reports, given `hides` and `keeps`."""
        told = self._supervisor
        named = {f"{model}:{one}" for one in told.named.get(model, ())} - self.hides
        loaded = told.loaded.get(model, {})
        return tuple(
            version_of(ref) for one, ref in loaded.items() if f"{model}:{one}" in named | self.keeps
        )

    async def _hear(self, end: ServerEnd, link: trio.CancelScope) -> None:
        while not isinstance(await end.next_frame(), Goodbye):
            pass
        link.cancel()  # control was restarted


class Scene:
    """A fleet with control in this process, a fake supervisor and a fake server."""

    def __init__(self, folder: Path, supervisor: FakeSupervisor) -> None:
        self.folder = folder
        self.supervisor = supervisor
        self.server = FakeServer(folder, supervisor)
        self.model_dir = str(folder / "model")

    async def add(self, name: str = "code", **fields: object) -> tuple[int, Any]:
        given = {"name": name, "ref": self.model_dir, **fields}
        return await ask_soon(self.folder, "POST", MODELS, json=given)

    async def drop(self, name: str = "code") -> tuple[int, Any]:
        return await ask_soon(self.folder, "DELETE", f"{MODELS}/{name}")

    async def end_of(self, answer: tuple[int, Any]) -> tuple[str, str]:
        """Return how the operation in a response ended."""
        assert answer[0] == 202, answer
        done = await ended(self.folder, answer[1]["id"])
        return done["status"], done["progress"]


@asynccontextmanager
async def scene(**fields: float) -> AsyncIterator[Scene]:
    with fleet_folder() as folder:
        async with supervised(folder, "chat") as supervisor, trio.open_nursery() as nursery:
            one = Scene(folder, supervisor)
            await nursery.start(run_control, config_of(folder, "chat", **fields))
            nursery.start_soon(one.server.run)
            yield one
            nursery.cancel_scope.cancel()


async def test_a_model_is_added_and_dropped_and_both_are_recorded() -> None:
    async with scene() as one:
        answer = await one.add(aliases=["coder"])
        assert await one.end_of(answer) == ("done", "code is added")
        assert (await states(one.folder)) == {"chat": "staged", "code": "serving"}
        assert len(one.supervisor.pids("code")) == 2
        assert one.supervisor.withdrawn == set()
        begun_done = [("model.add", "begun"), ("model.add", "done")]
        assert await recorded(answer[1]["id"]) == begun_done
        entries = read_entries(take_snapshot(default_folder()))
        afters = [e.after for _, e in entries if e.request_id == answer[1]["id"]]
        assert afters == [None, version_of("code")]
        answer = await one.drop()
        assert await one.end_of(answer) == ("done", "code is dropped")
        assert (await states(one.folder)) == {"chat": "staged"}
        assert one.supervisor.pids("code") == []
        kinds = [kind for kind, name in one.supervisor.requests if name == "code"]
        assert kinds == ["add_model", "start_model", "serve_model", "serve_model", "drop_model"]
        assert await one.end_of(await one.add(start=False)) == ("done", "code is added")
        assert (await states(one.folder))["code"] == "staged"


async def test_a_server_that_has_another_model_of_this_name_has_not_taken_it() -> None:
    """A drop does not wait for a server that was silent for `silence_s`, so it keeps the model."""
    async with scene(server_drain_s=0.05, servers_s=0.2) as one:
        one.server.keeps.add("code")
        one.server.older.add("code")
        status, progress = await one.end_of(await one.add())
        assert status == "failed"
        assert progress.startswith("the servers took longer than 0.2 s")
        assert await states(one.folder) == {"chat": "staged"}
        one.server.older.clear()
        assert await one.end_of(await one.add()) == ("done", "code is added")


async def test_aliases_are_few_and_short() -> None:
    async with scene() as one:
        for aliases, words in (
            ([f"name-{n}" for n in range(17)], "aliases is 17; allowed: at most 16 names"),
            (["x" * 129], "aliases is '129 characters'; allowed: names of at most 128 characters"),
        ):
            status, answer = await one.add(aliases=aliases)
            assert (status, answer["error"]["code"]) == (400, "bad_request")
            assert words in answer["error"]["message"]
        most = [f"{n:02}".ljust(128, "x") for n in range(16)]
        assert await one.end_of(await one.add(aliases=most)) == ("done", "code is added")


async def test_settings_of_an_added_model_are_neither_shown_nor_logged() -> None:
    with capture_logs() as lines:
        async with scene() as one:
            answer = await one.add(aliases=["coder"])
            assert await one.end_of(answer) == ("done", "code is added")
            _, shown = await ask_soon(one.folder, "GET", f"/admin/operations/{answer[1]['id']}")
    told = [line for line in lines if line["event"] == "operation_over"]
    assert {line["model"] for line in told} == {"code"}
    for text in map(str, (answer, shown, told)):
        assert "code" in text
        assert "coder" not in text
        assert one.model_dir not in text


async def test_workers_end_once_servers_have_let_a_model_go() -> None:
    async with scene() as one:
        await one.end_of(await one.add())
        one.server.keeps.add("code")
        answer = await one.drop()
        while "code" not in one.supervisor.withdrawn:
            await trio.lowlevel.checkpoint()
        _, shown = await ask_soon(one.folder, "GET", f"/admin/operations/{answer[1]['id']}")
        assert shown["progress"] == "code: its requests finish"
        assert len(one.supervisor.pids("code")) == 2
        one.server.keeps.clear()
        assert await one.end_of(answer) == ("done", "code is dropped")


async def test_worker_seconds_of_a_model_are_those_of_all_its_lives() -> None:
    async def seconds(one: Scene) -> float:
        _, listed = await ask_soon(one.folder, "GET", MODELS)
        [code] = [model for model in listed["models"] if model["name"] == "code"]
        return sum(code["worker_seconds"].values())

    async with scene() as one:
        for told, expected in ((5.0, 5.0), (1.0, 6.0)):
            await one.end_of(await one.add())
            one.supervisor.worker_seconds["code"] = told
            while await seconds(one) != expected:
                await trio.lowlevel.checkpoint()
            await one.end_of(await one.drop())
            del one.supervisor.worker_seconds["code"]


async def test_control_that_starts_anew_ends_no_workers_before_servers_were_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_steps, "MEET_S", 0.5)
    with fleet_folder() as folder:
        async with supervised(folder, "chat", "code") as supervisor, trio.open_nursery() as nursery:
            one = Scene(folder, supervisor)
            one.server.keeps.add("code")
            async with trio.open_nursery() as first:
                await first.start(run_control, config_of(folder, "chat", "code"))
                answer = await one.drop()
                first.cancel_scope.cancel()
            await nursery.start(run_control, config_of(folder, "chat", "code"))
            while "code" not in supervisor.withdrawn:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(one.server.run)
            began = trio.current_time()
            while trio.current_time() < began + 2 * model_steps.MEET_S:
                await states(folder)
            assert ("drop_model", "code") not in supervisor.requests
            one.server.keeps.clear()
            assert await one.end_of(answer) == ("done", "code is dropped")
            nursery.cancel_scope.cancel()


async def test_a_server_that_lets_nothing_go_is_not_waited_for_for_ever() -> None:
    async with scene(server_drain_s=0.05, servers_s=0.05) as one:
        one.server.keeps.add("chat")
        assert await one.end_of(await one.drop("chat")) == ("done", "chat is dropped")


async def test_a_drop_waits_for_a_restart_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_steps, "RETRY_S", 0.01)
    async with scene() as one:
        await one.end_of(await one.add())
        one.supervisor.busy["drop_model"] = 3
        assert await one.end_of(await one.drop()) == ("done", "code is dropped")
        assert await states(one.folder) == {"chat": "staged"}


async def test_a_model_whose_workers_do_not_end_is_served_again() -> None:
    async with scene(operation_timeout_s=0.05) as one:
        one.supervisor.busy["drop_model"] = 1000
        answer = await one.drop("chat")
        assert await one.end_of(answer) == ("failed", "a restart of code is under way")
        assert one.supervisor.withdrawn == set()
        assert await states(one.folder) == {"chat": "staged"}


async def test_the_supervisor_is_right_about_which_models_there_are() -> None:
    async with scene() as one:
        one.supervisor.names.append("more")
        one.supervisor.added["more"] = one.model_dir
        while "more" not in await states(one.folder):
            await trio.lowlevel.checkpoint()
        one.supervisor.names.remove("more")
        del one.supervisor.added["more"]
        while "more" in await states(one.folder):
            await trio.lowlevel.checkpoint()
        assert await states(one.folder) == {"chat": "staged"}


async def test_a_step_of_a_model_that_was_dropped_meanwhile_is_not_done() -> None:
    with fleet_folder() as folder, opened_journal(folder) as journal:
        config = config_of(folder)
        past, now = journal.past({}), trio.current_time()
        controller = Controller(config, 1, {}, past, new_id, now)
        async with supervised(folder) as supervisor, trio.open_nursery() as nursery:
            path = folder / SUPERVISOR_SOCKET
            control = Control(config, journal, controller, path, nursery)
            operation = Operation("1", "code", WantedState.SLEEP, "keep-alive", 0.0)
            await control._do(ControlStep(operation, is_start=False))
            assert supervisor.requests == []


@pytest.mark.parametrize("fault", ["files", "load", "memory", "server", "silence"])
async def test_what_cannot_be_added_says_why_and_leaves_nothing(fault: str) -> None:
    words = {
        "files": "model code: there is no such directory",
        "load": "code.decode-0 has died three times",
        "memory": "code takes 100 MiB and does not fit: the budget is 1000 B",
        "server": "server: its tokenizer is broken",
        "silence": "the servers took longer than 0.3 s; their log says why",
    }
    config: dict[str, dict[str, float]] = {
        "memory": {"memory_bytes": 1000},
        "silence": {"servers_s": 0.3},
    }
    async with scene(**config.get(fault, {})) as one:
        match fault:
            case "files":
                one.supervisor.failures["code"] = words[fault]
            case "load":
                one.supervisor.fail_start["code"] = words[fault]
            case "server":
                one.server.refused["code"] = "its tokenizer is broken"
            case "silence":
                one.server.hides.add("code")
        status, why = await one.end_of(await one.add())
        assert status == "failed"
        assert words[fault] in why
        assert await states(one.folder) == {"chat": "staged"}
        assert [*one.supervisor.added] == ["chat"]
        assert one.supervisor.pids("code") == []
        kinds = [kind for kind, _ in one.supervisor.requests]
        assert ("drop_model" in kinds) == (fault != "files"), "nothing is there to take back"


async def test_orders_that_contradict_are_refused() -> None:
    async with scene() as one:
        going_on = trio.Event()

        async def gate(kind: str, name: str) -> None:
            await going_on.wait()

        one.supervisor.gate = gate
        first = await one.add()
        operation_id = first[1]["id"]
        for answer in (
            await one.add(),
            await one.drop(),
            await ask_soon(one.folder, "POST", f"{MODELS}/code/load"),
        ):
            if answer[0] == 404:
                assert "no model is called 'code'" in answer[1]["error"]["message"]
                continue
            assert answer[0] == 409, answer
            assert f"(operation {operation_id})" in answer[1]["error"]["message"]
        going_on.set()
        one.supervisor.gate = None
        assert (await one.end_of(first))[0] == "done"
        status, answer_body = await one.add()
        assert (status, answer_body["error"]["code"]) == (409, "conflict")
        assert "a model code exists already" in answer_body["error"]["message"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "the body has no name"),
        ({"name": "a/b", "ref": "x"}, "'a/b' is not a model name"),
        ({"name": "a", "reff": "x"}, "unknown field 'reff'; allowed: name, ref, aliases"),
        ({"name": "a", "ref": 1}, "ref is 1; allowed: text"),
        ({"name": "a", "ref": "x", "decode": 0}, "decode is 0; allowed: 1 to 64"),
    ],
)
async def test_a_body_that_means_nothing_is_refused(given: dict[str, object], words: str) -> None:
    async with scene() as one:
        status, answer = await ask_soon(one.folder, "POST", MODELS, json=given)
        assert status == 400
        assert words in answer["error"]["message"]
        status, answer = await one.drop("none")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_the_port_takes_versions_of_the_store_and_no_paths() -> None:
    with bind_port("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
    async with scene(admin_port=port) as one:

        def ask(ref: str) -> tuple[int, Any]:
            given = {"name": "code", "ref": ref}
            answer = httpx2.post(f"http://127.0.0.1:{port}{MODELS}", json=given)
            return answer.status_code, answer.json()

        for ref in (one.model_dir, "./model", "~/model"):
            status, answer = await trio.to_thread.run_sync(ask, ref)
            assert status == 403, answer
            assert "use the Unix socket to give a path" in answer["error"]["message"]
        assert [*one.supervisor.added] == ["chat"]
        assert await one.end_of(await trio.to_thread.run_sync(ask, "code@stable")) == (
            "done",
            "code is added",
        )
        await one.end_of(await one.add("other"))
        assert one.supervisor.reference_only == {"code": True, "other": False}


async def test_what_is_asked_of_a_fleet_that_has_ended_is_not_done_in_the_next_one() -> None:
    with fleet_folder() as folder:
        async with supervised(folder, "chat") as supervisor:
            one = Scene(folder, supervisor)
            reached = trio.Event()

            async def gate(kind: str, name: str) -> None:
                reached.set()
                await trio.sleep_forever()

            supervisor.gate = gate
            async with trio.open_nursery() as nursery:
                await nursery.start(run_control, config_of(folder, "chat"))
                answer = await one.add()
                await reached.wait()
                nursery.cancel_scope.cancel()
            supervisor.gate, supervisor.run_id = None, "another"
            async with trio.open_nursery() as nursery:
                await nursery.start(run_control, config_of(folder, "chat"))
                status, why = await one.end_of(answer)
                assert (status, "the fleet ended before" in why) == ("failed", True)
                assert await states(folder) == {"chat": "staged"}
                nursery.cancel_scope.cancel()


async def test_a_model_of_which_nothing_is_known_any_more_is_taken_back() -> None:
    with fleet_folder() as folder:
        async with supervised(folder, "chat", "code") as supervisor:
            supervisor.withdrawn.add("code")
            async with trio.open_nursery() as nursery:
                await nursery.start(run_control, config_of(folder, "chat"))
                while "code" in supervisor.added:
                    await trio.lowlevel.checkpoint()
                while "code" in await states(folder):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()


@pytest.mark.slow
async def testkilled_at_any_step_a_model_is_there_wholly_or_not_at_all(
    request: pytest.FixtureRequest,
) -> None:
    """Takes over a second: kills and restarts real control processes."""
    is_whole = request.config.getoption("whole")
    adding = ("add_model", "start_model", "serve_model") if is_whole else ("start_model",)
    dropping = ("serve_model", "drop_model") if is_whole else ("drop_model",)
    with fleet_folder() as folder:
        config = msgspec.to_builtins(config_of(folder, "chat"))
        control = ControlProcess(folder, config)
        async with supervised(folder, "chat") as supervisor, trio.open_nursery() as nursery:
            one = Scene(folder, supervisor)
            nursery.start_soon(one.server.run)
            await trio.to_thread.run_sync(control.start)
            for step in adding:
                assert await killed_at(step, one.add, one, control) == ("done", "code is added")
                assert (await states(folder))["code"] in ("warm", "serving")
                assert len(supervisor.pids("code")) == 2
                await one.end_of(await one.drop())
            for step in dropping:
                await one.end_of(await one.add())
                assert await killed_at(step, one.drop, one, control) == ("done", "code is dropped")
                assert await states(folder) == {"chat": "staged"}
                assert supervisor.pids("code") == []
            assert control.end(signal.SIGTERM) == 0
            nursery.cancel_scope.cancel()


async def killed_at(
    step: str, order: Callable[[], Awaitable[tuple[int, Any]]], one: Scene, control: ControlProcess
) -> tuple[str, str]:
    """Start an operation, kill and restart control during a step; return how the operation
    ended."""
    reached, going_on = trio.Event(), trio.Event()

    async def gate(kind: str, name: str) -> None:
        if kind == step:
            reached.set()
            await going_on.wait()

    one.supervisor.gate = gate
    answer = await order()
    await reached.wait()
    await trio.to_thread.run_sync(control.end)
    one.supervisor.gate = None
    going_on.set()
    await trio.to_thread.run_sync(control.start)
    return await one.end_of(answer)


def test_a_journal_of_the_release_before_is_taken_over(tmp_path: Path) -> None:
    lines = [line for line in SCHEMA.splitlines() if "DEFAULT ''" not in line]
    old = "\n".join(lines).replace("progress TEXT NOT NULL,", "progress TEXT NOT NULL")
    tmp_path.chmod(0o700)
    path = tmp_path / FILE_NAME
    connection = sqlite3.connect(path)
    connection.executescript(old)
    row = ("1", "chat", "load", "user:x", 1.0, "waiting", "accepted")
    connection.execute("INSERT INTO operations VALUES (1, ?, ?, ?, ?, ?, ?, ?)", row)
    connection.execute("PRAGMA user_version = 1")
    connection.commit()
    connection.close()
    path.chmod(0o600)
    for _ in range(2):
        with opened_journal(tmp_path) as journal:
            [operation] = journal.past({}).unfinished
            assert (operation.id, operation.settings, operation.run) == ("1", "", "")
