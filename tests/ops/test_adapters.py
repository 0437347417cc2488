"""Settings of adapters reach the server and both kinds of worker, read and digested once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ops.model_directory import demo_model_path
from ops.models.adapters import with_adapters
from ops.models.several import each_model
from ops.settings.form import Settings, document
from ops.settings.sources import Sources
from ops.supervisor.prepare import prepare
from tests.adapters import write_adapter
from triolet.errors import ConfigError
from triolet.ids import Role

if TYPE_CHECKING:
    from pathlib import Path

    from triolet.config import AdapterConfig


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "sql"
    return write_adapter(path, demo_model_path(), 1, ("q_proj",)).path


def settings_of(*assignments: str) -> Settings:
    sources = Sources()
    sources.add_assignments(assignments)
    sources.refuse_for_serve()
    return sources.settings()


def told_of(settings: Settings) -> list[tuple[AdapterConfig, ...]]:
    engines = [settings.worker(role).engine.adapters for role in (Role.PREFILL, Role.DECODE)]
    return [settings.server.model_adapters, *engines]


def test_each_process_is_told_of_the_adapters_of_its_model(adapter: Path) -> None:
    settings = settings_of(
        "models.chat.ref=demo",
        f"models.chat.adapters=sql={adapter}, two={adapter}",
        "models.code.ref=demo",
    )
    plan = prepare(settings, each_model(settings), ())
    chat, code = (told_of(model.settings) for model in plan.models)
    assert code == [(), (), ()]
    assert [one.name for one in chat[0]] == ["sql", "two"]
    assert chat[0] == chat[1] == chat[2]
    assert chat[0][0].path == str(adapter)
    assert chat[0][0].digest == chat[0][1].digest
    assert f'"{chat[0][0].digest}"'.encode() in document(plan.models[0].settings, Role.DECODE)


def test_a_table_of_a_file_says_the_same(adapter: Path) -> None:
    named = f'[models.chat]\nref = "demo"\n[models.chat.adapters]\nsql = "{adapter}"\n'
    sources = Sources()
    sources.add_document(named.encode(), "triolet.toml")
    [own] = each_model(sources.settings())
    assert told_of(with_adapters(own))[0][0].name == "sql"
    sources = Sources()
    sources.add_document(f'[fleet.adapters]\nsql = "{adapter}"\n'.encode(), "triolet.toml")
    told = told_of(with_adapters(sources.settings()))
    assert [one.name for one in told[2]] == ["sql"]


def test_the_digest_is_pinned_to_the_version_of_the_base(adapter: Path) -> None:
    settings = settings_of(f"fleet.adapters=sql={adapter}")
    version = "sha256:" + "ab" * 32
    stored = replace(settings, server=replace(settings.server, model_digest=version))
    [plain], [pinned] = (told_of(with_adapters(one))[0] for one in (settings, stored))
    assert (plain.base, pinned.base) == ("", version)
    assert plain.digest != pinned.digest


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["fleet.adapters=sql"], "fleet.adapters is 'sql'; allowed: a table of names"),
        (["fleet.adapters=a:b=/x"], "'a:b', which is no name of an adapter"),
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
    missing = settings_of("fleet.adapters=sql=/nowhere/sql")
    with pytest.raises(ConfigError, match=r"adapter sql: /nowhere/sql/adapter_config.json cannot"):
        with_adapters(missing)
    low = settings_of(f"fleet.adapters=sql={adapter}", "worker.engine.max_adapter_rank=2")
    with pytest.raises(ConfigError, match=r"r is 4, and ranks up to 2 are served"):
        with_adapters(low)
    few = settings_of(f"fleet.adapters=sql={adapter}", "worker.engine.max_adapters=0")
    with pytest.raises(ConfigError, match=r"adapters has 1, and worker\.engine\.max_adapters"):
        with_adapters(few)
