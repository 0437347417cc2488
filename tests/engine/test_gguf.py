"""Tests of GGUF files in the engine: the same answers as transformers with the same file, and
errors for tensors that do not fit."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, cast

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.load import open_weights
from engine.preflight.check import dtype_for
from store.gguf.container import ENCODINGS, read_gguf
from store.gguf.directory import gguf_directory
from tests.gguf_files import byte_vocabulary, finish, write_header, write_model
from tests.lazily import lazily
from triolet.config import Dtype, EngineConfig, WeightFormat
from triolet.errors import ModelError
from triolet.units import MIB

from .checkpoints import VOCAB_SIZE, Checkpoint
from .driver import generate, ids, open_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import transformers
else:
    transformers = lazily("transformers")

RANDOM = np.random.default_rng(11)
PROMPTS = [RANDOM.integers(3, VOCAB_SIZE, size=n).tolist() for n in (1, 17, 60)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a cache folder separate from the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def greedy(path: Path, num_tokens: int) -> list[list[int]]:
    config = EngineConfig(dtype=Dtype.FLOAT32, weights=WeightFormat.DTYPE, kv_pool_bytes=4 * MIB)
    engine = open_engine(gguf_directory(path), config)
    return [ids(generate(engine, [prompt], num_tokens)[0]) for prompt in PROMPTS]


def greedy_of_transformers(path: Path, num_tokens: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model.train(mode=False)
    return [Checkpoint(path, model).greedy(prompt, num_tokens) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", Kind.Q4_1),
        ("llama", Kind.Q5_0),
        ("llama", Kind.Q5_1),
        ("mistral-sharded", Kind.F32),
        ("qwen2-tied", Kind.Q8_0),
    ],
)
def test_greedy_tokens_are_those_that_transformers_gives_for_the_same_file(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, family: str, kind: Kind
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, checkpoint(family).model, kind)
    assert greedy(path, 32) == greedy_of_transformers(path, 32)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-biases", "qwen3"])
def test_greedy_tokens_are_those_of_the_model_that_the_file_was_made_of(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, family: str
) -> None:
    # transformers reads neither the biases nor Qwen3's head size from a GGUF file.
    path, model = tmp_path / "model.gguf", checkpoint(family)
    write_model(path, model.model)
    assert greedy(path, 32) == [model.greedy(prompt, 32) for prompt in PROMPTS]


@pytest.mark.slow
def test_rotary_divisors_of_a_file_stretch_as_the_config_did(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    # What llama.cpp's converter writes for Llama 3.1's rope_scaling.
    model = checkpoint("llama3-tied")
    plain = 1.0 / 10_000.0 ** (np.arange(0, 16, 2) / 16)
    stretched = cast("Any", model.model).model.rotary_emb.inv_freq.numpy()
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    write_model(path, model.model, rope_divisors=plain / stretched)
    write_model(other, model.model, rope_divisors=np.ones(8))
    expected = [model.greedy(prompt, 32) for prompt in PROMPTS]
    assert greedy(path, 32) == expected
    assert greedy(other, 32) != expected


def test_every_encoding_is_of_the_size_that_llama_cpp_has() -> None:
    known = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in Kind}
    assert {key: tuple(value) for key, value in ENCODINGS.items()}.items() <= known.items()


@pytest.mark.parametrize(
    "kind",
    # The greedy tokens above belong to the two forms that transformers cannot unpack.
    sorted(ENCODINGS.keys() - {Kind.Q5_0, Kind.Q5_1}),
    ids=lambda kind: ENCODINGS[kind].name,
)
def test_numbers_of_every_encoding_are_unpacked(tmp_path: Path, kind: int) -> None:
    encoding, shape = ENCODINGS[kind], (64, 512)
    size = prod(shape) // encoding.block_numbers * encoding.block_bytes
    packed = RANDOM.integers(0, 0x38, size=(shape[0], size // shape[0]), dtype=np.uint8)
    path = tmp_path / "model.gguf"
    writer = write_header(path, byte_vocabulary(), "qwen2", embedding_length=512)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=Kind(kind))
    finish(writer)
    into = torch.empty(shape)
    open_weights(gguf_directory(path)).read("model.embed_tokens.weight", shape, into)
    if kind in (0, 1, 30):
        dtype = {0: np.float32, 1: np.float16, 30: np.uint16}[kind]
        plain = packed.view(dtype)
        wanted = (plain.astype(np.uint32) << 16).view(np.float32) if kind == 30 else plain
        assert np.array_equal(into.numpy(), wanted.astype(np.float32))
    else:
        from transformers.integrations.gguf.dequant import dequantize

        independent = dequantize(torch.from_numpy(packed), kind).reshape(shape)
        assert torch.equal(into, independent)


def test_a_quantised_file_is_computed_in_bfloat16_unless_told_otherwise(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, checkpoint("qwen2-tied").model, Kind.Q8_0)
    opened = open_weights(gguf_directory(path))
    assert opened.dtype == "Q8_0"
    assert dtype_for(EngineConfig(), opened.dtype) is Dtype.BFLOAT16
    assert dtype_for(EngineConfig(dtype=Dtype.FLOAT32), opened.dtype) is Dtype.FLOAT32


def test_a_tensor_that_is_missing_or_has_another_shape_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = write_header(path, byte_vocabulary(), "qwen2")
    writer.add_tensor("token_embd.weight", np.zeros((256, 32), np.float32))
    finish(writer)
    opened = open_weights(gguf_directory(path))
    with pytest.raises(ModelError, match=r"token_embd.weight is F32 \[256, 32\].*\[256, 64\]"):
        opened.read("model.embed_tokens.weight", (256, 64), torch.empty(256, 64))
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.bias is missing"):
        opened.read("model.layers.1.self_attn.q_proj.bias", (64,), torch.empty(64))
    assert read_gguf(path).metadata["general.architecture"] == "qwen2"
