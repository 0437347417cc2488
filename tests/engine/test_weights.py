"""Tests of loading weights: valid checkpoints are loaded correctly, and broken or hostile ones are
refused with the name of the tensor or file."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_config import load_model_config
from engine.weights import Checkpoint as WeightFiles
from engine.weights import load_weights, weights_digest
from triolet.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from engine.layers import Weights

    from .checkpoints import Checkpoint

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32) -> Weights:
    shares: list[float] = []
    weights = load_weights(load_model_config(path), WeightFiles(path), dtype, CPU, shares.append)
    assert shares == [0.5, 1.0]
    return weights


@pytest.fixture
def model_dir(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> Path:
    """Return a copy that a test may damage."""
    return shutil.copytree(checkpoint("llama").path, tmp_path / "model")


def change(model_dir: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    edit(tensors)
    save_file(tensors, model_dir / "model.safetensors")


def test_merged_layers_are_their_parts_stacked(model_dir: Path) -> None:
    stored = load_file(model_dir / "model.safetensors")
    layer = load(model_dir).layers[1]
    attention = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(layer.qkv.weight, torch.cat([stored[name] for name in attention]))
    mlp = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert torch.equal(layer.gate_up.weight, torch.cat([stored[name] for name in mlp]))
    assert layer.qkv.bias is None


def test_weights_are_converted(model_dir: Path) -> None:
    exact, rounded = load(model_dir), load(model_dir, torch.bfloat16)
    assert torch.equal(exact.embedding.bfloat16(), rounded.embedding)
    assert rounded.layers[0].down.weight.dtype is torch.bfloat16


def test_a_tied_model_has_one_matrix(checkpoint: Callable[[str], Checkpoint]) -> None:
    weights = load(checkpoint("qwen2-tied").path)
    assert weights.lm_head.weight is weights.embedding


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "tensor model.layers.1.mlp.up_proj.weight is missing",
        ),
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            "tensor model.norm.weight is F32 [63]; config.json requires floats [64]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}),
            "tensor model.norm.weight is I64",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}),
            "tensor model.layers.2.mlp.up_proj.weight has no place in a LlamaForCausalLM",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    model_dir: Path, edit: Callable[[dict[str, Tensor]], None], text: str
) -> None:
    change(model_dir, edit)
    with pytest.raises(ModelError) as caught:
        load(model_dir)
    assert text in str(caught.value)


def test_tensors_of_old_checkpoints_that_mean_nothing_are_passed_over(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(model_dir, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert len(load(model_dir).layers) == 2


def header(fields: dict[str, object], body: bytes = b"") -> bytes:
    encoded = json.dumps(fields).encode()
    return len(encoded).to_bytes(8, "little") + encoded + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        (2**62).to_bytes(8, "little") + b"{}",
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**40]}}),
        header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 16]}}, b"\0" * 16),
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 0]}}, b"\0" * 16),
    ],
)
def test_a_lying_file_is_a_clean_error(model_dir: Path, content: bytes) -> None:
    (model_dir / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a valid safetensors file"):
        load(model_dir)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "is not a plain *.safetensors file name"),
        ({"weight_map": {"a": "/tmp/x.safetensors"}}, "is not a plain *.safetensors file name"),
        ({"weight_map": {"a": "model-00001-of-00002.safetensors"}}, "is missing, model.safetens"),
    ],
)
def test_a_lying_index_is_a_clean_error(
    model_dir: Path, index: dict[str, object], text: str
) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError) as caught:
        load(model_dir)
    assert text in str(caught.value)


def test_missing_weights_are_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load(model_dir)


def test_a_tensor_in_two_files_is_refused(model_dir: Path) -> None:
    shutil.copy(model_dir / "model.safetensors", model_dir / "again.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "again.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"is also in again\.safetensors"):
        load(model_dir)


def test_the_digest_sees_one_changed_bit(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    before = weights_digest([path])
    assert weights_digest([path]) == before
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert weights_digest([path]) != before
