"""Tests of MODEL arguments that name a version in the store."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ops.cli import main
from ops.cli.check_machine import FindingStatus
from ops.cli.doctor import check_stored
from ops.models.several import with_stored_models
from ops.models.stored import with_stored_model
from ops.settings.form import Settings, of_role
from tests.gguf_files import write_tiny
from triolet.config import FleetConfig, FleetModelConfig, ToolParser, WeightFormat
from triolet.errors import ConfigError, StoreError
from triolet.ids import Role

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a small GGUF file as `tiny`, its weights widened."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "s.json").write_text('{"temperature": 0.25}')
    file, where = write_tiny(tmp_path / "file.gguf"), ("--store", str(tmp_path / "store"))
    options = ("--name", "tiny", "--weights", "dtype", "--sampling", str(tmp_path / "s.json"))
    assert main(("model", "import", str(file), *options, *where)) == 0
    file.unlink()
    return tmp_path / "store"


def named(model: str, store: Path) -> Settings:
    return Settings(fleet=FleetConfig(model=model, store=str(store)))


def test_a_gguf_file_is_served_from_the_store_as_it_was_imported(store: Path) -> None:
    with with_stored_model(named("tiny", store)) as settings:
        assert settings.fleet.model is not None
        assert settings.server.model_name == "tiny"
        for role in (Role.PREFILL, Role.DECODE):
            assert settings.worker(role).engine.weights is WeightFormat.DTYPE
        (sampling,) = (store.parent / "cache").rglob("generation_config.json")
        assert json.loads(sampling.read_text())["temperature"] == 0.25
        assert str(sampling.parent) == settings.fleet.model


def test_a_name_that_was_given_stays(store: Path) -> None:
    settings = named("tiny", store)
    settings = replace(settings, server=replace(settings.server, model_name="mine"))
    with with_stored_model(settings) as found:
        assert found.server.model_name == "mine"


def test_another_format_of_weights_than_the_version_pins_is_refused(
    store: Path, tmp_path: Path
) -> None:
    file, where = write_tiny(tmp_path / "file.gguf"), ("--store", str(store))
    assert main(("model", "import", str(file), "--name", "wide", *where)) == 0
    settings = named("wide", store)
    engine = replace(settings.decode.engine, weights=WeightFormat.DTYPE)
    settings = of_role(settings, Role.DECODE, engine=engine)
    words = "weights is 'dtype', but wide@.* was imported with weights 'auto'; .*--weights dtype"
    with pytest.raises(ConfigError, match=words), with_stored_model(settings):
        pytest.fail("it would be served")


def test_what_exists_on_disk_is_meant_first(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    with with_stored_model(named("tiny", store)) as settings:
        assert settings == named("tiny", store)


def test_a_directory_is_not_meant_where_only_a_version_is_taken(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tiny", "demo", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    with with_stored_model(named("tiny", store), is_reference_only=True) as settings:
        assert settings.server.model_digest.startswith("sha256:")
    for name in ("demo", "mine", str(tmp_path / "mine")):
        with (
            pytest.raises(ConfigError, match=r"not a version in the store|has no mine"),
            with_stored_model(named(name, store), is_reference_only=True),
        ):
            pytest.fail("it would be served")


@pytest.mark.parametrize("model", ["demo", "auto", "smollm2", "/models/tiny", "a/b"])
def test_what_is_no_reference_is_left_to_others(store: Path, model: str) -> None:
    with with_stored_model(named(model, store)) as settings:
        assert settings == named(model, store)


def test_a_version_that_is_not_there_is_refused_with_what_is(store: Path) -> None:
    words = "is not a directory or file here, and .* has no tiny:v9; it has tiny: `triolet model"
    with pytest.raises(StoreError, match=words), with_stored_model(named("tiny:v9", store)):
        pytest.fail("it would be served")


def test_each_model_of_a_fleet_may_be_a_version_with_settings_of_its_own(store: Path) -> None:
    models = {
        "a": FleetModelConfig("tiny", aliases=("x",), prefill=2, tool_parser=ToolParser.LLAMA),
        "b": FleetModelConfig("demo"),
    }
    settings = replace(named("demo", store), models=models)
    settings = of_role(settings, Role.SERVER, tool_parser=ToolParser.HERMES)
    with with_stored_models(settings) as (one, other):
        assert one.server.model_digest == one.decode.model_digest
        assert one.server.model_digest.startswith("sha256:")
        assert one.server.compute_digest == one.decode.compute_digest != one.server.model_digest
        assert one.prefill.model_store == one.decode.model_store == str(store)
        assert one.fleet.model not in (None, "tiny", "demo")
        assert (one.server.model_name, one.server.model_aliases) == ("a", ("x",))
        weights = [own.decode.engine.weights for own in (one, other)]
        assert weights == [WeightFormat.DTYPE, WeightFormat.AUTO], "each its own"
        assert (other.fleet.model, other.server.model_digest) == ("demo", "")
        assert [own.fleet.prefill for own in (one, other)] == [2, 1]
        parsers = [own.server.tool_parser for own in (one, other)]
        assert parsers == [ToolParser.LLAMA, ToolParser.HERMES]


def test_a_model_with_a_version_that_is_not_there_is_named(store: Path) -> None:
    models = {"a": FleetModelConfig("demo"), "b": FleetModelConfig("tiny:v9")}
    settings = replace(named("demo", store), models=models)
    with (
        pytest.raises(ConfigError, match=r"^model b: tiny:v9 is not a directory or file here"),
        with_stored_models(settings),
    ):
        pytest.fail("it would be served")


def test_the_doctor_says_what_is_wrong_with_a_version(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("doctor", "tiny", "--store", str(store), "--port", "0", "--json")
    capsys.readouterr()
    (finding,), wanted_bytes = check_stored(named("tiny", store), 2)
    assert finding.status is FindingStatus.OK
    assert wanted_bytes > 0
    assert capsys.readouterr().out == "", "stdout is the findings' alone"
    for blob in (store / "blobs" / "sha256").iterdir():
        blob.chmod(0o666)
    assert main(command) == 1
    findings = {one["subject"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["Model"]["status"] == "fail"
    assert "has mode 0666" in findings["Model"]["detail"]
    assert "chmod go-w" in findings["Model"]["remedy"]
