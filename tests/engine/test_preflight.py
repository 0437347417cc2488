"""Tests of the checks of a model before it is loaded: tensor headers, memory for the KV pool, and
the choice of the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from engine.model_config import load_model_config
from engine.preflight.check import check_weights, chosen_device, dtype_for, with_pool_size
from engine.preflight.tensors import check_tensors, tensor_shapes
from engine.weights import Checkpoint as WeightFiles
from store.gguf.directory import gguf_directory
from store.model_dir.headers import read_headers, weight_files
from tests.gguf_files import Kind, write_model
from triolet.config import Dtype, EngineConfig
from triolet.errors import ConfigError
from triolet.units import GIB

from .checkpoints import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.model_config import ModelConfig

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
    ("stored", "dtype"),
    [
        ("Q8_0", Dtype.BFLOAT16),
        ("BF16", Dtype.BFLOAT16),
        ("F16", Dtype.BFLOAT16),
        ("F32", Dtype.FLOAT32),
    ],
)
def test_the_checkpoint_says_what_is_computed_in(stored: str, dtype: Dtype) -> None:
    assert dtype_for(EngineConfig(), stored) is dtype
    assert dtype_for(EngineConfig(dtype=Dtype.FLOAT32), stored) is Dtype.FLOAT32


def sized(
    model: ModelConfig,
    free_bytes: int | None = None,
    bytes_per_block: int = 1000,
    **fields: Any,  # noqa: ANN401 (of any type)
) -> int:
    config = EngineConfig(block_size=16, **fields)
    found = with_pool_size(config, model, bytes_per_block, free_bytes).kv_pool_bytes
    assert found is not None
    return found


def test_a_pool_is_sized_from_the_model_and_the_memory_that_is_free(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model = load_model_config(checkpoint("llama").path)
    length = model.max_model_len
    assert length == 512
    assert sized(model, max_num_seqs=1) == 33 * 1000, "one sequence of full length"
    assert sized(model, max_num_seqs=64) == (1 + 64 * 16) * 1000, "256 tokens for each row"
    assert sized(model, max_num_seqs=64, kv_pool_row_tokens=64) == (1 + 64 * 4) * 1000
    quarter = {"kv_pool_context_share": 0.25, "kv_pool_row_tokens": 1}
    assert sized(model, max_num_seqs=64, **quarter) == (1 + 64 * 8) * 1000
    assert sized(model, max_num_seqs=64, kv_pool_row_tokens=9999) == (1 + 64 * 32) * 1000
    assert sized(model, 100_000, max_num_seqs=64) == 25_000, "a quarter of what is free"
    assert sized(model, 10, kv_pool_bytes=77) == 77, "what is said counts"


@pytest.mark.parametrize("context", [4096, 8192, 131_072])
def test_a_pool_with_plenty_of_memory_holds_four_whole_contexts(
    checkpoint: Callable[[str], Checkpoint], context: int
) -> None:
    model = load_model_config(checkpoint("llama").path)
    model = replace(model, max_position_embeddings=context)
    blocks = 1 + 4 * context // 16
    assert sized(model, 1 << 40) == blocks * 1000


def test_the_pool_of_smollm2_135m_takes_less_than_a_gibibyte_of_a_large_memory(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model = replace(load_model_config(checkpoint("llama").path), max_position_embeddings=8192)
    # 30 layers, keys and values, 3 heads of 64 numbers, bfloat16
    bytes_per_block = 16 * 30 * 2 * 3 * 64 * 2
    pool_bytes = sized(model, 64 * GIB, bytes_per_block)
    assert pool_bytes == 2049 * bytes_per_block
    assert pool_bytes < GIB
    tokens_per_row = (pool_bytes // bytes_per_block - 1) * 16 // EngineConfig().max_num_seqs
    assert tokens_per_row == 512, "all rows still have room for a prompt and its answer"


def test_memory_that_holds_no_sequence_is_refused(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model = load_model_config(checkpoint("llama").path)
    assert sized(model, 8000) == 2000, "the context is cut to what the pool holds"
    with pytest.raises(ConfigError, match=r"7999 bytes of memory are free.*the KV of 16 tokens"):
        sized(model, 7999)
    assert sized(model, 12_000, max_model_len=32, max_num_seqs=1) == 3000
    with pytest.raises(ConfigError, match="KV of 32 tokens takes 3000"):
        sized(model, 11_999, max_model_len=32)


def test_adapters_take_their_part_of_the_pools_share(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model = load_model_config(checkpoint("llama").path)
    config = EngineConfig(block_size=16)
    found = with_pool_size(config, model, 1000, 100_000, adapter_bytes=4000)
    assert found.kv_pool_bytes == 21_000, "of 25,000"
    with pytest.raises(ConfigError, match=r"0\.25: 1999 bytes, without the 23001 of adapters; "):
        with_pool_size(config, model, 1000, 100_000, adapter_bytes=23_001)
    said = replace(config, kv_pool_bytes=77)
    assert with_pool_size(said, model, 1000, 100_000, adapter_bytes=23_001) == said


def test_a_device_that_cannot_be_used_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert chosen_device(EngineConfig()) == "cpu"
    assert chosen_device(EngineConfig(device="cuda:1")) == "cuda:1"
    assert chosen_device(EngineConfig(backend="native")) == "cpu"


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_a_backend_for_gpus_says_why_auto_chose_the_cpu_and_what_to_set(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ConfigError) as refused:
        chosen_device(EngineConfig(backend=backend))
    assert str(refused.value) == (
        "device is 'auto', which chose 'cpu' because CUDA_VISIBLE_DEVICES is '-1' and hides "
        f"every GPU; backend '{backend}' needs 'cuda'; use backend 'auto', or unset "
        "CUDA_VISIBLE_DEVICES"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert chosen_device(EngineConfig(backend=backend, device="cpu")) == "cpu"
