"""Tests of adapter settings: validation, digests, and distribution to server and workers."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ops.cli import main
from ops.models.adapters import with_adapters
from ops.models.model_directory import demo_model_path
from ops.models.several import with_stored_models
from ops.settings.form import Settings, document
from ops.settings.sources import SettingSources
from ops.supervisor.plan import controlled
from ops.supervisor.prepare import prepare
from store.adapter_files import CONFIG_FILE, read_adapter
from store.layout import ModelStore
from store.sources import Source
from store.sources import Sources as Places
from tests.adapters import write_adapter
from triolet.errors import ConfigError
from triolet.ids import Role

if TYPE_CHECKING:
    from triolet.config import AdapterConfig


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "sql"
    return write_adapter(path, demo_model_path(), 1, ("q_proj",)).path


def settings_of(*assignments: str) -> Settings:
    sources = SettingSources()
    sources.add_assignments(assignments)
    sources.refuse_for_serve()
    return sources.settings()


def told_of(settings: Settings) -> list[tuple[AdapterConfig, ...]]:
    engines = [settings.worker(role).engine.adapters for role in (Role.PREFILL, Role.DECODE)]
    return [settings.server.model_adapters, *engines]


def test_a_start_is_refused_where_adapters_leave_no_memory_for_kv(adapter: Path) -> None:
    wanted = (f"fleet.adapters=sql={adapter}", "worker.engine.kv_pool_memory_share=1e-9")
    with (
        with_stored_models(settings_of(*wanted)) as stored,
        pytest.raises(ConfigError, match=r"without the \d+ of adapters.*give fewer adapters"),
    ):
        prepare(settings_of(*wanted), stored, ())


def test_each_process_is_told_of_the_adapters_of_its_model(adapter: Path) -> None:
    settings = settings_of(
        "models.chat.ref=demo",
        f"models.chat.adapters=sql={adapter}, two={adapter}",
        "models.code.ref=demo",
    )
    with with_stored_models(settings) as stored:
        plan = prepare(settings, stored, ())
    chat, code = (told_of(model.settings) for model in plan.models)
    assert code == [(), (), ()]
    assert [one.name for one in chat[0]] == ["sql", "two"]
    own, none = (model.adapter_bytes[Role.DECODE] for model in plan.models)
    assert (own > 0, none) == (True, 0)
    told = [controlled(model).adapter_bytes for model in plan.models]
    assert told == [2 * own, 0], "each of two workers holds all"
    assert chat[0] == chat[1] == chat[2]
    assert chat[0][0].path == str(adapter)
    assert chat[0][0].digest == chat[0][1].digest
    assert f'"{chat[0][0].digest}"'.encode() in document(plan.models[0].settings, Role.DECODE)


def test_a_table_of_a_file_says_the_same(adapter: Path) -> None:
    named = f'[models.chat]\nref = "demo"\n[models.chat.adapters]\nsql = "{adapter}"\n'
    sources = SettingSources()
    sources.add_document(named.encode(), "triolet.toml")
    with with_stored_models(sources.settings()) as [own]:
        assert told_of(own)[0][0].name == "sql"
    sources = SettingSources()
    sources.add_document(f'[fleet.adapters]\nsql = "{adapter}"\n'.encode(), "triolet.toml")
    with with_adapters(sources.settings()) as own:
        assert [one.name for one in told_of(own)[2]] == ["sql"]


@pytest.mark.parametrize("role", [Role.SERVER, Role.PREFILL, Role.DECODE])
def test_a_role_that_runs_alone_is_given_the_same(adapter: Path, role: Role) -> None:
    sources = SettingSources()
    sources.add_assignments([f"fleet.adapters=sql={adapter}"])
    sources.refuse_for_role(role)
    with with_adapters(sources.settings()) as own:
        assert [one.name for told in told_of(own) for one in told] == ["sql"] * 3


def test_the_digest_is_pinned_to_what_the_base_computes(adapter: Path) -> None:
    settings = settings_of(f"fleet.adapters=sql={adapter}")
    version = "sha256:" + "ab" * 32
    stored = replace(settings, server=replace(settings.server, compute_digest=version))
    with with_adapters(settings) as first, with_adapters(stored) as second:
        [plain], [pinned] = told_of(first)[0], told_of(second)[0]
    assert (plain.base, pinned.base) == ("", version)
    assert plain.digest != pinned.digest


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["fleet.adapters=sql"], "fleet.adapters is 'sql'; allowed: a table of names"),
        (["fleet.adapters=a:b=/x"], "'a:b', which is not an adapter name"),
        (["server.model_adapters=[]"], "is for a role that runs alone"),
        (["worker.engine.adapters=[]"], "is for a role that runs alone"),
        (
            ["models.chat.ref=demo", "fleet.adapters=sql=/x"],
            r"give models\.NAME\.adapters",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(assignments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(*assignments)


def test_a_start_with_adapters_that_cannot_be_served_is_refused(adapter: Path) -> None:
    at = f"fleet.adapters=sql={adapter}"
    for assignments, said in (
        (
            ["fleet.adapters=sql=/nowhere/sql"],
            "adapter sql: /nowhere/sql/.*_config.json is missing",
        ),
        (["fleet.adapters=sql=~no-such-user/sql"], "adapter sql: ~no-such-user/sql begins with"),
        ([at, "worker.engine.max_adapter_rank=2"], "r is 4, and ranks up to 2 are served"),
        ([at, "worker.engine.max_adapters=0"], "has 1, but worker.engine.max_adapters allows 0"),
    ):
        with pytest.raises(ConfigError, match=said), with_adapters(settings_of(*assignments)):
            pytest.fail("it would be served")


def test_an_adapter_is_served_from_the_store(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(adapter, tmp_path / "copy")
    where = ("--store", str(tmp_path / "store"))
    command = ("model", "import", str(copy), "--name", "chat-sql", *where)
    (copy / "config.json").write_text("{}")
    assert main(command) != 0
    assert "(of an adapter) and" in capsys.readouterr().err
    (copy / "config.json").unlink()
    assert main((*command, "--weights", "dtype")) != 0
    assert "leave out --sampling and --weights" in capsys.readouterr().err
    assert main(("model", "import", "~no-such-user/a", "--name", "a", *where)) != 0
    assert "which has no home directory here; write the full path" in capsys.readouterr().err
    assert main((*command, "--tag", "v1")) == 0
    shutil.rmtree(copy)
    given = settings_of(f"fleet.store={tmp_path / 'store'}", "fleet.adapters=sql=chat-sql:v1")
    with with_adapters(settings_of(f"fleet.adapters=sql={adapter}")) as plain:
        wanted = told_of(plain)[0][0].digest
    with with_adapters(given) as stored:
        (told,) = told_of(stored)[2]
        assert (told.name, told.digest) == ("sql", wanted)
        assert read_adapter(Path(told.path), "", 64).digest == wanted
    store = ModelStore(tmp_path / "store")
    [version] = store.entries()
    Places(store).note(Source(version.name, version.digest, "oci://registry/chat-sql"))
    [noted] = Places(store).folder.iterdir()
    for is_served in (False, True):
        os.utime(noted, (1, 1))
        with with_adapters(given, is_served=is_served):
            [used] = Places(store).all()
        assert (used.at_ns > 10**9) == is_served, "an eviction takes the longest unused"
    unknown = replace(given, fleet=replace(given.fleet, adapters={"sql": "chat-sql:v2"}))
    with (
        pytest.raises(ConfigError, match=r"adapter sql: chat-sql:v2 is not a directory here, and"),
        with_adapters(unknown),
    ):
        pytest.fail("it would be served")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / CONFIG_FILE).write_text("{}")
    assert main(("model", "import", str(tmp_path / "broken"), "--name", "b", *where)) != 0
    assert "only 'LORA' is served" in capsys.readouterr().err
