"""Tests of ModelSet: adding and dropping models of a running fleet, and notifying servers."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from ops.cli import main
from ops.models.several import with_stored_models
from ops.running_fleets import NOTE, Note
from ops.settings.form import Settings
from ops.supervisor import scaling
from ops.supervisor.commands import Commands
from ops.supervisor.model_set import ModelSet
from ops.supervisor.model_status import RunState
from ops.supervisor.plan import Door, plan_processes
from ops.supervisor.prepare import prepare
from ops.supervisor.scaling import MEMBERS, Scaling
from ops.supervisor.slot import RestartFailed
from ops.supervisor.supervisor import Supervisor
from ops.supervisor.supervisor_socket import (
    AddVersionRequest,
    DropModelRequest,
    OrderRefused,
    RouteRequest,
)
from tests.gguf_files import write_tiny
from triolet.config import AutoConfig, FleetConfig, FleetModelConfig, Pinning, ServerConfig
from triolet.config.members import read_members
from triolet.config.routes import Route
from triolet.ids import Role

from .recording import Recorder
from .test_pure_parts import told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ops.models.several import StoredModels
    from ops.supervisor.plan import FleetPlan
    from ops.supervisor.process_spec import ProcessSpec
    from triolet.config.members import Members

CORES = range(4)


class Scene:
    """A fleet with the model `chat`, without running workers.

    Attributes:
      models: the tested ModelSet.
      stored: holds models in the store.
      steps: reported steps.
    """

    def __init__(self, settings: Settings, folder: Path, stored: StoredModels) -> None:
        def specs(grown: FleetPlan) -> tuple[Sequence[ProcessSpec], Sequence[ProcessSpec]]:
            planned = plan_processes(grown, ("triolet",), folder, 1, CORES, [Door(3)])
            self.planned = [*planned[0], *planned[1]]
            return planned

        self.stored = stored
        plan = prepare(settings, stored, ())
        self.planned: list[ProcessSpec] = []
        first, spares = specs(plan)
        self.supervisor = Supervisor(
            first, settings.supervisor, 1.0, Recorder(), spares=spares, stopped=["chat"]
        )
        self.scaling = Scaling(plan, Note(1, "http://127.0.0.1:1", {}), folder, specs)
        self.models = ModelSet(self.supervisor, self.scaling, stored)
        self.steps: list[str] = []
        self._folder = folder

    async def tell(self, text: str) -> None:
        self.steps.append(text)

    async def add(self, name: str = "code", ref: str = "demo", **fields: object) -> str:
        """Add a model; return the digest of its version."""
        model = FleetModelConfig(ref, **fields)  # type: ignore[arg-type]
        return (await self.models.add(name, model, self.tell)).digest

    async def drop(self, name: str) -> None:
        await self.models.set_served(name, is_served=False)
        await self.models.drop(name, self.tell)

    @property
    def told(self) -> Members:
        """The members file for servers."""
        return read_members((self._folder / MEMBERS).read_bytes(), MEMBERS)


@contextmanager
def scene(tmp_path: Path, **settings: object) -> Iterator[Scene]:
    models = {"chat": FleetModelConfig("demo", aliases=("gpt",))}
    given = Settings(fleet=FleetConfig(store=str(tmp_path / "store")), models=models)
    given = replace(given, **settings)  # type: ignore[arg-type]
    with with_stored_models(given) as stored:
        yield Scene(given, tmp_path, stored)


async def test_servers_are_told_of_a_model_when_it_is_served_and_no_sooner(tmp_path: Path) -> None:
    with scene(tmp_path) as one:
        await one.add(aliases=("coder",))
        assert one.steps == ["code: checking its files"]
        assert [model.name for model in one.supervisor.models()] == ["chat", "code"]
        assert one.supervisor.models()[1].state is RunState.STOPPED
        assert [config.name for config in one.models.configs()] == ["chat", "code"]
        assert not one.models.is_served("code")
        assert not (tmp_path / MEMBERS).exists()
        for _ in range(2):
            await one.models.set_served("code", is_served=True)
        models = one.told.models or ()
        assert [(model.name, model.aliases) for model in models] == [
            ("chat", ("gpt",)),
            ("code", ("coder",)),
        ]
        # The first model is unchanged since the servers' start, so that they keep it.
        [server] = [spec for spec in one.planned if spec.name == "server"]
        [chat, _] = told(server).server.models
        assert models[0] == chat
        addresses = {member.address.rpartition("/")[2] for member in one.told.members}
        assert {"m0.decode-0.control", "m1.decode-0.control", "m1.decode-spare.control"} < addresses
        assert "code.decode-0" in (tmp_path / NOTE).read_text()
        for _ in range(2):
            await one.drop("code")
        assert [model.name for model in one.told.models or ()] == ["chat"]
        assert [config.name for config in one.models.configs()] == ["chat"]
        await one.add()
        await one.models.set_served("code", is_served=True)
        addresses = {member.address.rpartition("/")[2] for member in one.told.members}
        assert "m2.decode-0.control" in addresses, "no address is another model's later"


async def test_a_version_is_held_in_the_store_until_its_model_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file, where = write_tiny(tmp_path / "file.gguf"), ("--store", str(tmp_path / "store"))
    assert main(("model", "import", str(file), "--name", "tiny", "--tag", "v1", *where)) == 0
    blobs = tmp_path / "store" / "blobs" / "sha256"
    with scene(tmp_path) as one:
        digest = await one.add(ref="tiny:v1")
        assert digest.startswith("sha256:")
        assert main(("model", "rm", "tiny:v1", *where)) in (0, 1)
        assert main(("model", "gc", *where)) == 0
        assert (blobs / digest.removeprefix("sha256:")).exists(), "a model of the fleet is of it"
        await one.drop("code")
        assert main(("model", "gc", *where)) == 0
        assert not (blobs / digest.removeprefix("sha256:")).exists()
    capsys.readouterr()


async def test_a_model_of_the_port_has_no_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "file.gguf")
    (tmp_path / "lora").mkdir()
    monkeypatch.chdir(tmp_path)
    where = ("--store", str(tmp_path / "store"))
    assert main(("model", "import", "file.gguf", "--name", "tiny", "--tag", "v1", *where)) == 0
    with scene(tmp_path) as one:
        for model, words in (
            (FleetModelConfig("lora"), "model code: .* has no lora"),
            (FleetModelConfig("file.gguf"), "model code: .* has no file.gguf"),
            (FleetModelConfig("demo"), "model code: 'demo' is not a version in the store"),
            (FleetModelConfig("tiny:v1", adapters={"x": "lora"}), "adapter x: .* has no lora"),
            (
                FleetModelConfig("tiny:v1", adapters={"x": "./lora"}),
                "adapter x: './lora' is not a version",
            ),
        ):
            with pytest.raises(RestartFailed, match=words):
                await one.models.add("code", model, one.tell, is_reference_only=True)


@pytest.mark.parametrize(
    ("name", "ref", "fields", "words"),
    [
        ("chat", "demo", {}, "another model is already called 'chat'"),
        ("gpt", "demo", {}, "model chat already uses 'gpt'; give gpt another name"),
        ("code", "demo", {"aliases": ("chat",)}, "model chat already uses 'chat'"),
        ("a/b", "demo", {}, "is not a model name"),
        ("code", "", {}, "models.code.ref is missing; give code=MODEL"),
        ("code", "/nowhere", {}, "model code: model directory /nowhere does not exist"),
        ("code", "auto", {}, "model code: auto can be downloaded only at the start of a fleet"),
        ("code", "demo", {"decode": 64}, "2 models have 65 decode workers together"),
        ("code", "demo", {"adapters": {"x": "/nowhere"}}, "model code: .*nowhere"),
    ],
)
async def test_what_cannot_be_added_leaves_nothing(
    tmp_path: Path, name: str, ref: str, fields: dict[str, object], words: str
) -> None:
    with scene(tmp_path) as one:
        with pytest.raises(RestartFailed, match=words):
            await one.add(name, ref, **fields)
        assert [model.name for model in one.supervisor.models()] == ["chat"]
        assert [config.name for config in one.models.configs()] == ["chat"]
        assert [*one.stored.settings] == ["chat"]
        assert not (tmp_path / MEMBERS).exists()


async def test_cores_that_are_dealt_out_keep_other_models_out(tmp_path: Path) -> None:
    fleet = FleetConfig(pin=Pinning.AUTO)
    with scene(tmp_path, fleet=fleet) as one:
        with pytest.raises(RestartFailed, match=r"start the fleet with code among its models"):
            await one.add()
        assert [*one.stored.settings] == ["chat"]


async def test_a_model_that_is_needed_is_not_dropped(tmp_path: Path) -> None:
    with scene(tmp_path) as one:
        with pytest.raises(RestartFailed, match="chat is the only model; add another one first"):
            await one.drop("chat")
        await one.add()
        with pytest.raises(RestartFailed, match="chat is the only model"):
            await one.drop("chat")  # no model is called `code` yet
        await one.models.set_served("code", is_served=True)
        with pytest.raises(RestartFailed, match="servers still serve code; withdraw it"):
            await one.models.drop("code", one.tell)
        await one.drop("chat")
        assert [model.name for model in one.told.models or ()] == ["code"]


async def test_servers_are_told_nothing_that_could_not_be_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene(tmp_path) as one:
        await one.add()
        with monkeypatch.context() as patch:
            patch.setattr(scaling, "write_note", full)
            with pytest.raises(RestartFailed, match="no space left"):
                await one.models.set_served("code", is_served=True)
        assert not one.models.is_served("code")
        assert not (tmp_path / MEMBERS).exists()


def full(directory: Path, note: Note) -> None:
    raise OSError("no space left")


async def test_a_model_of_a_ladder_is_not_dropped(tmp_path: Path) -> None:
    with scene(tmp_path) as one:
        await one.add()
        await one.models.set_served("code", is_served=True)
        settings = one.scaling.now.settings
        auto = AutoConfig(ladder=("chat", "code"))
        server = replace(settings.server, auto=auto)
        one.scaling.now = replace(one.scaling.now, settings=replace(settings, server=server))
        with pytest.raises(RestartFailed, match="code"):
            await one.drop("code")
        assert one.models.is_served("code")


async def test_no_model_is_called_auto_beside_a_ladder(tmp_path: Path) -> None:
    with scene(tmp_path, server=ServerConfig(auto=AutoConfig(ladder=("chat",)))) as one:
        for name, aliases in (("auto", ()), ("code", ("auto",))):
            with pytest.raises(RestartFailed, match="a model is called 'auto' too"):
                await one.add(name, aliases=aliases)
        assert [*one.stored.settings] == ["chat"]


async def test_a_version_comes_under_the_name_of_another_one_and_takes_its_place(
    tmp_path: Path,
) -> None:
    auto = ServerConfig(auto=AutoConfig(ladder=("chat",)))
    with scene(tmp_path, server=auto) as one:
        await one.add()
        await one.models.set_served("code", is_served=True)
        gguf = str(write_tiny(tmp_path / "tiny.gguf"))
        model = FleetModelConfig(gguf, aliases=("gpt",))
        with pytest.raises(RestartFailed, match="chat already uses 'gpt'"):
            await one.models.add("chat-2", model, one.tell)
        same = FleetModelConfig("demo", aliases=("gpt",))
        with pytest.raises(RestartFailed, match=r"chat is already served from"):
            await one.models.add("chat-2", same, one.tell, replaced="chat")
        await one.models.add("chat-2", model, one.tell, replaced="chat")
        with pytest.raises(RestartFailed, match="servers do not have chat-2"):
            await one.models.route(RouteRequest("chat", "chat-2", 0, False))
        await one.models.route(RouteRequest("chat-2", "chat", 0, False))
        assert one.told.routes == {"chat": Route({"chat": 1, "chat-2": 0}, "chat", 1)}
        assert names_told(one) == ["chat", "chat-2", "code"]
        with pytest.raises(RestartFailed, match="chat serves requests until"):
            await one.drop("chat")
        with pytest.raises(RestartFailed, match="is at revision 1, but was at 0"):
            await one.models.route(RouteRequest("chat-2", "chat", 0, True))
        for is_moved in (True, True, False):  # each step is idempotent
            await one.models.route(RouteRequest("chat-2", "chat", 1, is_moved))
        assert one.told.routes == {"chat": Route({"chat-2": 1}, "chat-2", 2)}
        assert names_told(one) == ["chat-2", "code"]
        assert '"models":["chat","code"]' in (tmp_path / NOTE).read_text().replace(" ", "")
        await one.models.drop("chat", one.tell)
        with pytest.raises(RestartFailed, match="already uses 'chat'"):
            await one.add("chat")
        await one.add("tall")  # the ladder contains the public name
        with pytest.raises(RestartFailed, match="chat"):
            await one.drop("chat-2")


async def test_a_version_that_is_taken_back_leaves_the_route_of_the_other_one(
    tmp_path: Path,
) -> None:
    with scene(tmp_path) as one:
        model = FleetModelConfig(str(write_tiny(tmp_path / "tiny.gguf")), aliases=("gpt",))
        await one.models.add("chat-2", model, one.tell, replaced="chat")
        await one.models.route(RouteRequest("chat-2", "chat", 0, False))
        await one.drop("chat-2")
        assert one.told.routes == {"chat": Route({"chat": 1}, "chat", 2)}
        await one.add()
        await one.models.set_served("code", is_served=True)
        await one.drop("chat")
        assert (one.told.routes, names_told(one)) == ({}, ["code"])


async def test_a_version_that_computes_alike_takes_the_place_of_the_other_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = tiny_versions(tmp_path, monkeypatch, capsys)
    models = {"chat": FleetModelConfig("tiny:v1", aliases=("gpt",))}
    with scene(tmp_path, models=models) as one:
        for _ in range(2):  # idempotent
            request = AddVersionRequest("chat-2", "chat", "tiny:warm")
            config = await one.models.add_version(request, one.tell)
            assert (config.name, config.digest) == ("chat", digests[1])
        assert [model.name for model in one.supervisor.models()] == ["chat"]
        [told_of] = one.told.models or ()
        assert (told_of.name, told_of.digest, told_of.aliases) == ("chat", digests[1], ("gpt",))
        assert one.told.routes == {}
        workers = one.supervisor._models["chat"].specs
        assert {told(spec).worker(spec.role).model_digest for spec in workers} == {digests[1]}
        request = AddVersionRequest("chat-2", "chat", "tiny:v1")
        with monkeypatch.context() as patch:
            patch.setattr(scaling, "write_note", full)
            with pytest.raises(RestartFailed, match="no space left"):
                await one.models.add_version(request, one.tell)
        [config] = one.models.configs()
        assert config.digest == digests[1]
        assert [*one.stored.settings] == ["chat"], "what was not used is held no more"
        with pytest.raises(RestartFailed, match="no model is called 'none'"):
            await one.models.add_version(AddVersionRequest("x", "none", "tiny:v1"), one.tell)


@pytest.mark.parametrize("pin", [Pinning.OFF, Pinning.AUTO])
async def test_a_version_that_computes_alike_has_the_workers_of_the_one_beside_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pin: Pinning,
) -> None:
    digests = tiny_versions(tmp_path, monkeypatch, capsys)
    fleet = FleetConfig(store=str(tmp_path / "store"), pin=pin)
    with scene(tmp_path, models={"chat": FleetModelConfig("tiny:v1")}, fleet=fleet) as one:
        before, lends = workers_planned(one), one.scaling.now.lends
        request = AddVersionRequest("chat-2", "chat", "tiny:warm", is_beside=True)
        for _ in range(2):  # each step may be asked for again
            config = await one.models.add_version(request, one.tell)
            told_of = (config.name, config.digest, config.workers_of, config.num_workers)
            assert told_of == ("chat-2", digests[1], "chat", 0)
        assert (workers_planned(one), one.scaling.now.lends) == (before, lends)
        assert [model.name for model in one.supervisor.models()] == ["chat"]
        await one.models.route(RouteRequest("chat-2", "chat", 0, is_moved=False))
        assert workers_told(one, "chat") == workers_told(one, "chat-2") != set()
        for model in one.told.models or ():
            addresses = {*model.prefill_addresses, *model.decode_addresses}
            assert addresses == workers_told(one, "chat")
        if pin is Pinning.OFF:
            specs = one.scaling.plan("chat", Role.DECODE, 2)
            one.scaling.note("chat", [spec.name for spec in specs])
            assert workers_told(one, "chat") == workers_told(one, "chat-2")
        with monkeypatch.context() as patch:
            patch.setattr(scaling, "write_note", full)
            with pytest.raises(RestartFailed, match="no space left"):
                await one.models.route(RouteRequest("chat-2", "chat", 1, is_moved=True))
        assert [model.digest for model in one.told.models or ()] == digests
        for _ in range(2):
            await one.models.route(RouteRequest("chat-2", "chat", 1, is_moved=True))
            assert [model.digest for model in one.told.models or ()] == [digests[1]] * 2
        for _ in range(2):
            await one.drop("chat-2")
            assert [model.digest for model in one.told.models or ()] == digests[1:]
        assert one.told.routes == {"chat": Route({"chat": 1}, "chat", 2)}
        assert [*one.stored.settings] == ["chat"]
        workers = one.supervisor._models["chat"].specs
        assert {told(spec).worker(spec.role).model_digest for spec in workers} == {digests[1]}


async def test_a_version_that_servers_cannot_read_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = tiny_versions(tmp_path, monkeypatch, capsys)
    with scene(tmp_path, models={"chat": FleetModelConfig("tiny:v1")}) as one:
        request = AddVersionRequest("chat-2", "chat", "tiny:warm")
        for _ in range(2):
            await one.models.add_version(request, one.tell)
        for _ in range(2):  # each step may be asked for again
            await one.drop("chat-2")
            assert [model.digest for model in one.told.models or ()] == digests[:1]
        assert one.scaling.now.settings.models["chat"].ref == "tiny:v1"
        await one.models.add_version(request, one.tell)
        await one.models.drop("chat-2", one.tell)  # the switch is over
        await one.drop("chat-2")
        assert [model.digest for model in one.told.models or ()] == digests[1:]


async def test_a_version_is_asked_for_again_after_the_other_one_was_scaled(tmp_path: Path) -> None:
    with scene(tmp_path) as one:
        gguf = str(write_tiny(tmp_path / "tiny.gguf"))
        request = AddVersionRequest("chat-2", "chat", gguf)
        first = await one.models.add_version(request, one.tell)
        one.scaling.plan("chat", Role.DECODE, 2)
        assert await one.models.add_version(request, one.tell) == first


def tiny_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Import `tiny:v1` and `tiny:warm`, which compute alike; return their digests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    where = ("--store", str(tmp_path / "store"))
    sampling = tmp_path / "sampling.json"
    sampling.write_text('{"temperature": 0.5}')
    for tag, more in (("v1", ()), ("warm", ("--sampling", str(sampling)))):
        assert main(("model", "import", "demo", "--name", "tiny", "--tag", tag, *more, *where)) == 0
    return capsys.readouterr().out.split()


async def test_a_mistake_in_a_command_is_told_and_does_not_end_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mistaken(*_: object) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr(ModelSet, "drop", mistaken)
    answers: list[object] = []

    async def tell(answer: object) -> None:
        answers.append(answer)

    with scene(tmp_path) as one, capture_logs() as lines:
        commands = Commands(one.supervisor, one.scaling, one.models, None)  # type: ignore[arg-type]
        await commands.obey(None, DropModelRequest("chat"), tell)  # type: ignore[arg-type]
    [refused] = answers
    assert isinstance(refused, OrderRefused)
    assert "bug in Triolet" in refused.message
    assert "no such thing" in refused.message
    [line] = [line for line in lines if line["event"] == "model_drop_failed"]
    assert (line["log_level"], line["exc_info"]) == ("error", True)


def workers_planned(one: Scene) -> list[ProcessSpec]:
    return [spec for spec in one.planned if spec.model]


def workers_told(one: Scene, model: str) -> set[str]:
    return {member.address for member in one.told.members if member.model == model}


def names_told(one: Scene) -> list[str]:
    return [model.name for model in one.told.models or ()]
