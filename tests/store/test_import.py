"""Tests of importing models to the store: what becomes a version, what is refused, and how damaged
files are found."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from ops.cli import main
from ops.models.importing import WantedImport, import_model
from ops.models.model_directory import demo_model_path
from store.ingest import Way, ingest, source_file
from store.manifest import (
    ENGINE_TYPE,
    POLICY_TYPE,
    SAMPLING_TYPE,
    WEIGHT_CONFIG_TYPE,
    WEIGHT_TYPE,
    Facts,
)
from store.receipts import SETTLED_NS, Receipts
from store.verify import is_whole
from store.view import opened
from tests.gguf_files import write_tiny
from triolet.config import WeightFormat
from triolet.errors import ConfigError, StoreError

from .conftest import copy_of_demo, faults

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ops.models.importing import Imported
    from store.layout import ModelStore

    Add = Callable[..., Imported]
EMPTY_PACK = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_a_directory_is_the_same_version_in_every_place_and_at_every_time(
    model: Path, add: Add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = add(model)
    other = copy_of_demo(tmp_path / "other").rename(tmp_path / "another")
    for path in other.iterdir():
        path.chmod(0o600)
        os.utime(path, (1, 1))
    (other / ".hidden").write_text("x")
    args = ("model", "import", str(other), "--name", "code", "--store", str(tmp_path / "second"))
    assert main(args) == 0
    assert capsys.readouterr().out == f"{first.digest}\n"


def test_a_version_names_all_that_changes_its_answers(
    model: Path, add: Add, store: ModelStore
) -> None:
    manifest = store.manifest(add(model).digest)
    assert manifest.config.media_type == "application/vnd.cncf.model.config.v1+json"
    (weights,) = [one for one in manifest.layers if one.media_type == WEIGHT_TYPE]
    assert weights.annotations["vnd.triolet.dtype"] == "BF16"
    assert weights.size == (model / "model.safetensors").stat().st_size
    policy, engine = manifest.layer(POLICY_TYPE), manifest.layer(ENGINE_TYPE)
    assert policy is not None
    assert policy.digest == EMPTY_PACK
    assert engine is not None
    assert json.loads(store.read(engine.digest, 100)) == {"weights": "auto"}
    config = json.loads(store.read(manifest.config.digest, 10_000))
    assert config["config"]["architecture"] == "LlamaForCausalLM"
    assert config["modelfs"]["diffIds"] == [one.digest for one in manifest.layers]


def test_an_import_tells_how_far_it_is(model: Path, store: ModelStore) -> None:
    told: list[tuple[int, int]] = []
    wanted = WantedImport(str(model), "chat", None, None, WeightFormat.AUTO, may_link=False)
    import_model(store, wanted, lambda *progress: told.append(progress))
    (total,) = {total for _, total in told}
    assert sum(count for count, _ in told) == total
    assert total == sum(path.stat().st_size for path in model.iterdir())


def test_each_setting_that_changes_answers_makes_another_version(
    model: Path, add: Add, tmp_path: Path, store: ModelStore
) -> None:
    cold = tmp_path / "cold.json"
    cold.write_text('{"temperature": 0.5}')
    changed = add(model, sampling=cold)
    layer = store.manifest(changed.digest).layer(SAMPLING_TYPE)
    assert layer is not None
    sampling = json.loads(store.read(layer.digest, 10_000))
    own = json.loads((model / "generation_config.json").read_text())
    assert sampling == {**own, "temperature": 0.5}
    digests = {add(model).digest, changed.digest, add(model, weights=WeightFormat.DTYPE).digest}
    assert len(digests) == 3


def test_a_gguf_file_is_a_version_whatever_its_name(add: Add, tmp_path: Path) -> None:
    first = gguf_file(tmp_path / "a.gguf")
    second = shutil.copyfile(first, tmp_path / "b.gguf")
    assert add(first).digest == add(second).digest


def test_a_folder_with_a_gguf_file_is_refused_for_the_file(model: Path, add: Add) -> None:
    (model / "model.safetensors").unlink()
    file = gguf_file(model / "model.gguf")
    with pytest.raises(ConfigError, match=f"give the file itself: {file}"):
        add(model)


def test_a_blob_of_a_store_that_may_not_be_written_is_whole_without_a_receipt(
    add: Add, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (blob, *_) = store.manifest(add(demo_model_path()).digest).blobs
    shutil.rmtree(store.receipts.folder)
    later = time.time_ns() + 2 * SETTLED_NS
    monkeypatch.setattr("store.verify.now_ns", lambda: later)
    assert is_whole(store, blob)
    assert store.receipts.find(store.blob_path(blob.digest).stat()) is None


def test_what_was_imported_before_is_not_read_again(add: Add) -> None:
    assert ways(add(demo_model_path())).keys() <= {Way.COPIED, Way.CLONED}
    assert ways(add(demo_model_path(), "code")).keys() == {Way.KNOWN}


def test_a_file_that_was_just_written_gets_no_receipt(tmp_path: Path) -> None:
    receipts, path = Receipts(tmp_path / "receipts"), tmp_path / "file"
    receipts.folder.mkdir()
    path.write_bytes(b"x")
    found, digest = path.stat(), f"sha256:{'0' * 64}"
    changed_at = max(found.st_ctime_ns, found.st_mtime_ns)
    receipts.write_settled(found, digest, changed_at + SETTLED_NS)
    assert receipts.find(found) is None
    receipts.write_settled(found, digest, changed_at + SETTLED_NS + 1)
    assert receipts.find(found) == digest
    (receipt,) = receipts.folder.iterdir()
    receipt.write_bytes(receipt.read_bytes()[:-9])
    assert receipts.find(found) is None, "a torn one is none"
    receipts.write(found, digest)
    path.write_bytes(b"xy")
    assert receipts.find(path.stat()) is None


def test_a_link_shares_the_file_and_an_edit_of_it_is_found(
    model: Path, add: Add, store: ModelStore
) -> None:
    done = ways(add(model, may_link=True))
    if Way.CLONED in done:
        pytest.skip("this disk clones files, which links would be worse than")
    assert set(done) == {Way.LINKED}
    path = model / "tokenizer_config.json"
    content = path.read_bytes()
    kept, times = store.entries()[0].digest, path.stat()
    with path.open("r+b") as file:
        file.write(b"\n" + content[1:])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with (
        pytest.raises(StoreError, match=r"tokenizer_config\.json of .* is damaged"),
        opened(store, kept),
    ):
        pytest.fail("it was opened")
    assert len(faults(store)) == 1
    path.unlink()
    path.write_bytes(content)
    assert add(model).digest == kept
    assert faults(store) == []


def test_a_flipped_bit_is_found_named_and_repaired_by_another_import(
    model: Path, add: Add, store: ModelStore, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = add(model).digest
    (layer,) = [e for e in store.manifest(digest).layers if e.file_name == "model.safetensors"]
    blob = store.blob_path(layer.digest)
    before = blob.stat()
    blob.chmod(0o644)
    with blob.open("r+b") as file:
        file.seek(5_000_000)
        byte = file.read(1)[0]
        file.seek(5_000_000)
        file.write(bytes([byte ^ 1]))
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert main(("model", "verify", "--store", str(store.root))) == 1
    said = capsys.readouterr().err
    assert f"model.safetensors of chat@{digest} is damaged: {blob} holds sha256:" in said
    assert f"expected {layer.digest}" in said
    assert "import the model again from a good copy" in said
    assert add(model).digest == digest
    assert main(("model", "verify", "chat", "--store", str(store.root))) == 0


@pytest.mark.parametrize("mode", [0o666, 0o464])
def test_a_blob_that_others_may_write_is_refused(
    model: Path, add: Add, store: ModelStore, mode: int
) -> None:
    digest = add(model).digest
    blob = store.blob_path(store.manifest(digest).layers[0].digest)
    blob.chmod(mode)
    with (
        pytest.raises(StoreError, match=f"has mode {mode:04o}, so others"),
        opened(store, digest),
    ):
        pytest.fail("it was opened")


def test_the_view_of_a_version_is_the_directory(model: Path, add: Add, store: ModelStore) -> None:
    with opened(store, add(model).digest) as (view, _):
        names = sorted(path.name for path in view.iterdir())
        assert names == sorted(path.name for path in model.iterdir())
        assert all((view / n).read_bytes() == (model / n).read_bytes() for n in names)


def test_a_shard_that_the_index_names_must_be_there(model: Path, add: Add) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "../b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"'../b.safetensors', which is not a plain"):
        add(model)
    index["weight_map"]["b"] = "model-2.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-1\.safetensors is missing, .* names it"):
        add(model)


def test_weights_that_are_cut_off_are_refused(model: Path, add: Add) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match="bytes of weights, its header says"):
        add(model)
    path.write_bytes(content[:100])
    with pytest.raises(ConfigError, match="or is truncated"):
        add(model)


def test_an_architecture_that_is_not_known_is_refused(model: Path, add: Add) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["XForCausalLM"]}))
    with pytest.raises(ConfigError, match="XForCausalLM"):
        add(model)


def test_a_link_out_of_the_directory_is_refused_and_one_within_is_not(
    model: Path, add: Add, tmp_path: Path
) -> None:
    plain = add(model).digest
    (model / "tokenizer.json").rename(model / "real.x")
    (model / "tokenizer.json").symlink_to("real.x")
    assert add(model).digest == plain
    (model / "real.x").rename(tmp_path / "real.x")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to(tmp_path / "real.x")
    with pytest.raises(StoreError, match=r"is a link to .*real\.x, outside of .*cp -rL"):
        add(model)


def test_a_file_that_changes_during_the_import_is_refused(model: Path, store: ModelStore) -> None:
    path = model / "config.json"
    source = source_file(path, path.name, WEIGHT_CONFIG_TYPE, model.resolve())
    path.write_text("{}")
    facts = Facts("LlamaForCausalLM", "safetensors", "BF16", 1)
    with store.writing() as writer, pytest.raises(StoreError, match=f"{path} changed while it"):
        ingest(writer, "chat", [source], facts, engine={})
    assert store.entries() == ()
    assert list(store.blobs.iterdir()) == []


def test_a_folder_in_place_of_a_file_is_refused(model: Path, add: Add) -> None:
    (model / "extra.json").mkdir()
    with pytest.raises(StoreError, match=r"extra\.json is not a plain file"):
        add(model)


def test_files_that_are_no_part_of_a_version_are_told(model: Path, add: Add) -> None:
    (model / "scores.csv").write_bytes(b"x")
    (model / "onnx").mkdir()
    (model / ".gitattributes").write_bytes(b"x")
    assert add(model).others == ["onnx", "scores.csv"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"temprature": 1}', "has an unknown field 'temprature'; allowed: .*temperature"),
        ('{"temperature": 9}', r"temperature in .*s\.json is 9; allowed: 0 to 2"),
        ("[]", "is not a JSON object"),
        ("{", "is not valid JSON: .*allowed: a JSON object of"),
    ],
)
def test_sampling_defaults_that_cannot_work_are_refused(
    model: Path, add: Add, tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        add(model, sampling=tmp_path / "s.json")


def test_what_is_refused_leaves_no_store(model: Path, add: Add, store: ModelStore) -> None:
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        add(model)
    assert not store.root.exists()


def test_a_broken_index_is_refused_with_its_remedy(
    model: Path, add: Add, store: ModelStore
) -> None:
    add(model)
    for content in ("{", '{"schemaVersion": 2, "manifests": [{"digest": "../x"}]}'):
        (store.root / "index.json").write_text(content)
        with pytest.raises(StoreError, match=r"index\.json cannot be read.*last backup"):
            store.entries()


def ways(imported: Imported) -> dict[Way, int]:
    return {way: size for way, size in imported.num_bytes.items() if size}


def gguf_file(path: Path) -> Path:
    write_tiny(path)
    return path
