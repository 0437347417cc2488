"""What a check of headers finds is what a loader of the tensors finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.model_config import load_model_config
from engine.preflight.check import check_weights, dtype_for
from engine.preflight.headers import read_headers, weight_files
from engine.preflight.tensors import check_tensors, tensor_shapes
from engine.weights import Checkpoint as WeightFiles
from tests.gguf_files import Kind, write_model
from triolet.config import Dtype, EngineConfig
from triolet.gguf.directory import gguf_directory

from .checkpoints import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .checkpoints import Checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_of_sound_checkpoints_hold_what_their_config_asks_for(
    checkpoint: Callable[[str], Checkpoint], family: str
) -> None:
    path = checkpoint(family).path
    config = load_model_config(path)
    stored = read_headers(weight_files(path))
    check_tensors(config, stored, path)
    assert stored.keys() == WeightFiles(path).names()
    assert {name: stored[name].shape for name in tensor_shapes(config)} == tensor_shapes(config)


@pytest.mark.parametrize("family", ["llama-biases", "mistral-sharded", "qwen2-tied", "qwen3"])
def test_gguf_files_of_sound_checkpoints_hold_what_their_config_asks_for(
    checkpoint: Callable[[str], Checkpoint],
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, model = tmp_path / "model.gguf", checkpoint(family)
    write_model(path, model.model, Kind.Q8_0)
    directory = gguf_directory(path)
    found = check_weights(load_model_config(directory), directory)
    stored = check_weights(load_model_config(model.path), model.path)
    assert (found.files, found.dtype) == ([path], "Q8_0")
    assert found.num_numbers == stored.num_numbers


@pytest.mark.parametrize(
    ("stored", "device", "dtype"),
    [
        ("Q8_0", "cpu", Dtype.BFLOAT16),
        ("Q8_0", "cuda", Dtype.BFLOAT16),
        ("BF16", "cpu", Dtype.FLOAT32),
        ("BF16", "cuda", Dtype.BFLOAT16),
    ],
)
def test_quantised_weights_are_computed_in_bfloat16_everywhere(
    stored: str, device: str, dtype: Dtype
) -> None:
    assert dtype_for(EngineConfig(), stored, device) is dtype
    assert dtype_for(EngineConfig(dtype=Dtype.FLOAT32), stored, device) is Dtype.FLOAT32
