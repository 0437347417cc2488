"""Tests of pushing LoRA adapters to a real registry and pulling them: they come back unchanged,
with signatures, and can be served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ops.cli import main
from ops.models.adapters import with_adapters
from ops.models.model_directory import demo_model_path
from ops.settings.sources import SettingSources
from store.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from store.layout import ModelStore
from store.referrers import SIGNATURE_TYPE, referrers_of
from store.signatures import signatures_of
from store.view import opened
from tests.adapters import write_adapter
from triolet.errors import ConfigError
from triolet.ids import Role

from .conftest import digest_in

if TYPE_CHECKING:
    from pathlib import Path

    from ops.settings.form import Settings

    from .docker_registry import DockerRegistry

NAME = "chat-sql"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter as PEFT writes it."""
    return write_adapter(tmp_path / "sql", demo_model_path(), 1, ("q_proj",)).path


@pytest.fixture
def imported(adapter: Path, tmp_path: Path) -> ModelStore:
    """A store with the adapter as `chat-sql:v1`."""
    store = ModelStore(tmp_path / "imported")
    run(store, "import", str(adapter), "--name", NAME, "--tag", "v1")
    return store


def run(store: ModelStore, *words: str) -> None:
    assert main(("model", *words, "--store", str(store.root))) == 0


def settings_of(store: ModelStore) -> Settings:
    """Return the settings of a fleet with the adapter of a store."""
    sources = SettingSources()
    sources.add_assignments((f"fleet.store={store.root}", f"fleet.adapters=sql={NAME}:v1"))
    return sources.settings()


def weights_of(store: ModelStore) -> Path:
    with opened(store, digest_in(store)) as (view, _):
        return (view / WEIGHTS_FILE).resolve()


def test_an_adapter_comes_back_byte_for_byte_and_is_served_as_what_was_imported(
    registry: DockerRegistry,
    adapter: Path,
    imported: ModelStore,
    store: ModelStore,
) -> None:
    location = f"oci://{registry.host}/adapter/{NAME}:v1"
    run(imported, "push", f"{NAME}:v1", location)
    run(store, "pull", location)
    assert digest_in(store) == digest_in(imported)
    with opened(store, digest_in(store)) as (view, _):
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            assert (view / name).read_bytes() == (adapter / name).read_bytes()
    run(store, "verify")
    with with_adapters(settings_of(store)) as served:
        (told,) = served.worker(Role.DECODE).engine.adapters
        assert told.digest == read_adapter(adapter, "", 64).digest


def test_an_adapter_that_was_damaged_is_found_and_neither_sent_nor_served(
    registry: DockerRegistry, imported: ModelStore, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = weights_of(imported)
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    where = ("--store", str(imported.root))
    location = f"oci://{registry.host}/damaged/{NAME}:v1"
    for command in (("verify",), ("push", f"{NAME}:v1", location)):
        capsys.readouterr()
        assert main(("model", *command, *where)) != 0
        said = "".join(capsys.readouterr())
        assert f"{WEIGHTS_FILE} of" in said
        assert "is damaged" in said
    with (
        pytest.raises(ConfigError, match=rf"adapter sql: {WEIGHTS_FILE} of .* is damaged"),
        with_adapters(settings_of(imported)),
    ):
        pytest.fail("it would be served")


def test_signatures_of_an_adapter_travel_with_it_and_are_required(
    registry: DockerRegistry,
    imported: ModelStore,
    store: ModelStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    location, digest = f"oci://{registry.host}/signed/{NAME}:v1", digest_in(imported)
    run(imported, "push", f"{NAME}:v1", location)
    capsys.readouterr()
    assert main(("model", "key", str(tmp_path / "key"))) == 0
    signer = capsys.readouterr().out.strip()
    with store.writing():
        pass
    run(store, "require", NAME, signer)
    where = ("--store", str(store.root))
    assert main(("model", "pull", location, *where)) != 0
    assert "is not signed" in capsys.readouterr().err
    assert store.entries() == ()
    run(imported, "sign", f"{NAME}:v1", "--key", str(tmp_path / "key"))
    run(imported, "push", f"{NAME}:v1", location)
    run(store, "pull", location)
    capsys.readouterr()
    run(store, "verify", f"{NAME}:v1")
    assert f"is signed by {signer}" in capsys.readouterr().err
    assert signatures_of(store, digest).keys == (signer,)
    with with_adapters(settings_of(store)) as served:
        assert [one.name for one in served.server.model_adapters] == ["sql"]
    for referrer in referrers_of(store, digest, SIGNATURE_TYPE):
        store.blob_path(referrer.digest).unlink()
    with (
        pytest.raises(ConfigError, match=r"adapter sql: .* is not signed"),
        with_adapters(settings_of(store)),
    ):
        pytest.fail("it would be served")
