"""Tests of AdapterSet: validation, the settings of workers and servers, and holds in the store."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from ops.cli import main
from ops.models.model_directory import demo_model_path
from ops.supervisor import adapter_set, plan, scaling
from ops.supervisor.adapter_set import AdapterSet
from ops.supervisor.group import GroupPhase
from ops.supervisor.slot import RestartFailed
from store import adapter_files as files
from store.adapter_files import WEIGHTS_FILE
from tests.adapters import write_adapter
from triolet.config import EngineConfig, FleetConfig, WorkerConfig
from triolet.ids import Role

from . import test_model_set
from .test_pure_parts import told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ops.running_fleets import Note


async def is_met(name: str) -> bool:
    raise AssertionError(f"{name} was restarted")


class Scene(test_model_set.Scene):
    """A fleet with the model `chat`, without running workers, and its adapters."""

    @property
    def adapters(self) -> AdapterSet:
        return AdapterSet(self.supervisor, self.scaling, self.stored, self.models.changing)

    async def load(self, name: str, ref: Path | str, *, model: str = "chat", **given: bool) -> None:
        given = {"is_reference_only": False, **given}
        await self.adapters.load(model, name, str(ref), self.tell, is_met, **given)

    async def unload(self, name: str) -> None:
        await self.adapters.withdraw("chat", name)
        await self.adapters.drop("chat", name, self.tell, is_met)

    @property
    def of_workers(self) -> set[tuple[str, ...]]:
        """The adapters that each worker and spare starts with."""
        group = self.supervisor._models["chat"]
        specs = (*group.specs, *group.spares.values())
        engines = [told(spec).worker(spec.role).engine for spec in specs]
        return {tuple(one.name for one in engine.adapters) for engine in engines}

    @property
    def of_servers(self) -> tuple[list[str], list[str]]:
        """The adapters that requests may use, and further ones that workers may have."""
        [model] = self.told.models or ()
        return [one.name for one in model.adapters], [one.name for one in model.unnamed_adapters]

    @property
    def known(self) -> Mapping[str, str]:
        """The adapters in control's config."""
        [config] = self.models.configs()
        return config.adapters


@contextmanager
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Iterator[Scene]:
    monkeypatch.setattr(test_model_set, "Scene", Scene)
    with test_model_set.scene(tmp_path, **settings) as one:
        assert isinstance(one, Scene)
        yield one


@pytest.fixture
def sql(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "sql", demo_model_path(), 1, ("q_proj",)).path


async def test_workers_and_servers_are_told_and_control_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: Path
) -> None:
    with scene(tmp_path, monkeypatch) as one:
        for _ in range(2):
            await one.load("sql", sql)
            assert (one.of_workers, one.of_servers) == ({("sql",)}, (["sql"], []))
        [config] = one.models.configs()
        assert [*config.adapters] == ["sql"]
        assert config.adapters["sql"].startswith("sha256:")
        assert config.adapter_bytes > 0
        assert one.scaling.now.settings.models["chat"].adapters == {"sql": str(sql)}
        fr = write_adapter(tmp_path / "fr", demo_model_path(), 2).path
        await one.load("fr", fr)
        assert (one.of_workers, one.of_servers[0]) == ({("sql", "fr")}, ["sql", "fr"])
        # Workers planned later have the adapters too.
        specs = one.scaling.plan("chat", Role.DECODE, 2)
        assert {len(told(spec).worker(spec.role).engine.adapters) for spec in specs} == {2}
        await one.adapters.withdraw("chat", "sql")
        assert (one.of_workers, one.of_servers) == ({("sql", "fr")}, (["fr"], ["sql"]))
        assert [*one.known] == ["fr"]
        await one.load("sql", sql)  # workers still have it
        assert one.of_servers == (["fr", "sql"], [])
        for _ in range(2):
            await one.unload("sql")
            assert (one.of_workers, one.of_servers) == ({("fr",)}, (["fr"], []))
        with pytest.raises(RestartFailed, match="servers still accept requests for fr"):
            await one.adapters.drop("chat", "fr", one.tell, is_met)
        await one.unload("fr")
        assert (one.of_workers, one.of_servers) == ({()}, ([], []))
        assert one.models.configs()[0].adapter_bytes == 0


async def test_workers_that_a_refused_scaling_left_there_get_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: Path
) -> None:
    """A failed scaling leaves the requested number in the plan, but other workers running."""
    with scene(tmp_path, monkeypatch, fleet=FleetConfig(decode=2)) as one:
        one.scaling.plan("chat", Role.DECODE, 1)
        with monkeypatch.context() as patch:
            patch.setattr(plan, "MAX_WORKERS", 1)  # others may have taken their slots in the plan
            with pytest.raises(RestartFailed, match="have 2 decode"):
                await one.load("sql", sql)
        assert [*one.stored._adapters] == []
        await one.load("sql", sql)
        assert one.of_workers == {("sql",)}
        one.scaling.plan("chat", Role.DECODE, 3)
        await one.unload("sql")
        assert one.of_workers == {()}


async def test_requests_of_an_adapter_run_on_while_a_restart_keeps_it_in_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: Path
) -> None:
    with scene(tmp_path, monkeypatch) as one:
        await one.load("sql", sql)
        one.supervisor.restarting = (one.supervisor._models["chat"],)
        with pytest.raises(RestartFailed, match="already running; wait for its end"):
            await one.adapters.withdraw("chat", "sql")
        assert one.of_servers == (["sql"], [])


async def test_a_restart_that_began_before_a_model_was_gone_is_not_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: Path
) -> None:
    with scene(tmp_path, monkeypatch) as one:
        await one.add()
        group, other = (one.supervisor._models[name] for name in ("chat", "code"))
        gone = group._gone = trio.Event()
        group.phase = GroupPhase.STOPPING
        async with trio.open_nursery() as nursery:

            async def load() -> None:
                with pytest.raises(RestartFailed, match="already running; wait for its end"):
                    await one.load("sql", sql)
                nursery.cancel_scope.cancel()

            nursery.start_soon(load)
            while not gone.statistics().tasks_waiting:  # noqa: ASYNC110 (a test looks)
                await trio.sleep(0.01)
            one.supervisor.restarting, group.phase = (other,), GroupPhase.RUNNING
            gone.set()
            await trio.sleep(10)
        assert one.supervisor.restarting == (other,)
        assert one.of_workers == {()}


def large(path: Path) -> None:
    write_adapter(path, demo_model_path(), 1, ("q_proj",), rank=128)


def other_base(path: Path) -> None:
    write_adapter(path, demo_model_path(), 1, ("q_proj",))
    tensors = load_file(path / WEIGHTS_FILE)
    save_file(
        {name: one[:, :8].contiguous() if "_A" in name else one for name, one in tensors.items()},
        path / WEIGHTS_FILE,
    )


def deeper_base(path: Path) -> None:
    write_adapter(path, demo_model_path(), 1, ("q_proj",))
    tensors = load_file(path / WEIGHTS_FILE)
    deeper = {name.replace("layers.0.", "layers.99."): one for name, one in tensors.items()}
    save_file(deeper, path / WEIGHTS_FILE)


def not_finite(path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    write_adapter(path, demo_model_path(), 1, ("q_proj",))
    tensors = {name: one.to(dtype) for name, one in load_file(path / WEIGHTS_FILE).items()}
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, path / WEIGHTS_FILE)


def pipe(path: Path) -> None:
    write_adapter(path, demo_model_path(), 1, ("q_proj",))
    (path / WEIGHTS_FILE).unlink()
    os.mkfifo(path / WEIGHTS_FILE)


def huge(path: Path) -> None:
    write_adapter(path, demo_model_path(), 1, ("q_proj",))
    os.truncate(path / WEIGHTS_FILE, (4 << 30) + 1)


def another(path: Path) -> None:
    write_adapter(path, demo_model_path(), 7, ("q_proj",))


def nothing(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("write", "name", "words"),
    [
        (large, "new", "adapter new: .*: r is 128, and ranks up to 64 are served; raise"),
        (other_base, "new", r"but the base needs .*; give the adapter to the base that it was"),
        (deeper_base, "new", "is for layer 99, but the base has .*; give the adapter to the base"),
        (not_finite, "new", "has numbers that are not finite .*; use an earlier checkpoint"),
        (partial(not_finite, dtype=torch.float16), "new", "has numbers that are not finite"),
        (partial(not_finite, dtype=torch.float32), "new", "has numbers that are not finite"),
        (pipe, "new", "is not a regular file; give"),
        (huge, "new", "has more than 4294967296 bytes, the most for such a file; give"),
        (nothing, "new", "adapter_config.json is missing; give a directory written by PEFT"),
        (another, "sql", "chat:sql is sha256:.*run `triolet adapter unload chat:sql` first"),
        (another, "a:b", "'a:b', which is not an adapter name"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_anything_changes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sql: Path,
    write: Callable[[Path], None],
    name: str,
    words: str,
) -> None:
    write(tmp_path / "wrong")
    with scene(tmp_path, monkeypatch) as one:
        await one.load("sql", sql)
        before = (one.scaling.now, one.told, one.of_workers)
        with pytest.raises(RestartFailed, match=words):
            await one.load(name, tmp_path / "wrong")
        assert (one.scaling.now, one.told, one.of_workers) == before
        assert [*one.stored._adapters] == [("chat", "sql")]


async def test_models_that_are_not_there_and_names_that_are_taken_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: Path
) -> None:
    with scene(tmp_path, monkeypatch) as one:
        with pytest.raises(RestartFailed, match="no model is called 'none'; allowed: chat"):
            await one.load("sql", sql, model="none")
        await one.add(aliases=("gpt:sql",))
        with pytest.raises(RestartFailed, match="model code already uses the name 'gpt:sql'"):
            await one.load("sql", sql)
        monkeypatch.setattr(adapter_set, "available_memory_bytes", lambda: 10)
        with pytest.raises(RestartFailed, match=r"adapter fr takes .* in 2 workers, but only 10 B"):
            await one.load("fr", sql)
        monkeypatch.setattr(files, "available_memory_bytes", lambda: 1000)
        with pytest.raises(RestartFailed, match="of memory, and 1000 are free; stop programs"):
            await one.load("fr", sql)  # not readable; must not stop the supervisor
        assert [*one.stored._adapters] == []


async def test_adapters_are_as_many_as_memory_was_meant_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: Path
) -> None:
    decode = WorkerConfig(engine=EngineConfig(max_adapters=2))
    with scene(tmp_path, monkeypatch, decode=decode) as one:
        for name in ("a", "b"):
            await one.load(name, sql)  # the same weights under two names
        with pytest.raises(RestartFailed, match=r"has 3, but .*max_adapters allows 2; raise it"):
            await one.load("more", sql)
        await one.unload("a")
        await one.load("more", sql)
        assert [*one.known] == ["b", "more"]


async def test_a_failure_at_any_step_takes_all_of_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: Path
) -> None:
    def full(directory: Path, note: Note) -> None:
        raise OSError("no space left")

    async def fail(*given: object) -> None:
        raise RestartFailed("chat.decode-spare was not ready")

    with scene(tmp_path, monkeypatch) as one:
        fr = write_adapter(tmp_path / "fr", demo_model_path(), 2).path
        await one.load("fr", fr)
        with monkeypatch.context() as patch:
            patch.setattr(scaling, "write_note", full)
            with pytest.raises(RestartFailed, match="no space left"):
                await one.load("sql", sql)
            with pytest.raises(RestartFailed, match="no space left"):
                await one.adapters.withdraw("chat", "fr")
        assert [*one.known] == ["fr"]
        assert (one.of_workers, one.of_servers) == ({("fr",)}, (["fr"], []))
        with monkeypatch.context() as patch:
            calls = iter((lambda *given: None, full))  # the last step, when workers have it
            patch.setattr(scaling, "write_note", lambda *given: next(calls)(*given))
            with pytest.raises(RestartFailed, match="no space left"):
                await one.load("sql", sql)
        assert (one.of_workers, [*one.known]) == ({("fr", "sql")}, ["fr"])
        de = write_adapter(tmp_path / "de", demo_model_path(), 3).path
        await one.load("de", de)  # unnamed adapters are dropped first: servers know at most one
        assert (one.of_workers, one.of_servers) == ({("fr", "de")}, (["fr", "de"], []))
        assert [*one.stored._adapters] == [("chat", "fr"), ("chat", "de")]
        await one.unload("de")
        assert (one.of_workers, one.of_servers) == ({("fr",)}, (["fr"], []))
        with monkeypatch.context() as patch:
            patch.setattr(one.supervisor, "change_workers", fail)
            with pytest.raises(RestartFailed, match="was not ready"):
                await one.load("sql", sql)
            assert (one.of_servers, [*one.known]) == ((["fr"], []), ["fr"])
            with pytest.raises(RestartFailed, match="was not ready"):
                await one.unload("fr")
            assert (one.of_servers, [*one.known]) == ((["fr"], []), ["fr"])
        assert one.scaling.now.settings.models["chat"].adapters == {"fr": str(fr)}
        assert [*one.stored._adapters] == [("chat", "fr")]


async def test_a_version_is_held_in_the_store_until_its_adapter_is_unloaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sql: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    where = ("--store", str(tmp_path / "store"))
    assert main(("model", "import", str(sql), "--name", "chat-sql", "--tag", "v1", *where)) == 0
    blobs = tmp_path / "store" / "blobs" / "sha256"

    def collected() -> bool:
        assert main(("model", "gc", *where)) == 0
        return not [one for one in blobs.iterdir() if one.stat().st_size > 10_000]

    with scene(tmp_path, monkeypatch) as one:
        with pytest.raises(RestartFailed, match="is not a version in the store"):
            await one.load("sql", sql, is_reference_only=True)
        for _ in range(2):
            await one.load("sql", "chat-sql:v1", is_reference_only=True)
        main(("model", "rm", "chat-sql:v1", *where))
        assert not collected(), "a model of the fleet has it"
        await one.unload("sql")
        assert collected()
        await one.load("sql", sql)
    capsys.readouterr()
