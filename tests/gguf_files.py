"""Test helpers that write small GGUF files with llama.cpp's own package."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from engine.model_config import Biases, ModelConfig
from engine.preflight.gguf import llama_cpp_name
from engine.preflight.tensors import tensor_shapes
from engine.rope_config import RopeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

DEMO: Final = Path(str(files("triolet") / "demo"))
ALPHABET: Final = [
    *(chr(c) for c in range(0x21, 0x7F)),
    *(chr(c) for c in range(0xA1, 0xAD)),
    *(chr(c) for c in range(0xAE, 0x100)),
    *(chr(256 + n) for n in range(68)),
]
"""GPT-2's 256 characters that stand for bytes."""
ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Vocabulary(NamedTuple):
    """The tokenizer part of a file."""

    model: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    keys: Mapping[str, Any] = {}


def byte_vocabulary(**keys: Any) -> Vocabulary:  # noqa: ANN401
    """Return a vocabulary with a token for all bytes but one; 1 starts and 2 ends a text."""
    kinds = [CONTROL if token_id in (1, 2) else NORMAL for token_id in range(256)]
    named = {"bos_token_id": 1, "eos_token_id": 2, **keys}
    return Vocabulary("gpt2", [*ALPHABET[:-1], "ab"], kinds, ["a b"], None, named)


def demo_vocabulary(pre: str, **keys: Any) -> Vocabulary:  # noqa: ANN401
    """Return the demo model's tokens and merges with another pre-tokenizer."""
    document = json.loads((DEMO / "tokenizer.json").read_text())
    ids = document["model"]["vocab"] | {t["content"]: t["id"] for t in document["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    special = {t["content"] for t in document["added_tokens"]}
    kinds = [CONTROL if token in special else NORMAL for token in tokens]
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in document["model"]["merges"]
    ]
    named = {"bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 5, "pre": pre, **keys}
    return Vocabulary("gpt2", tokens, kinds, merges, None, named)


def write_header(
    path: Path,
    vocabulary: Vocabulary,
    architecture: str = "llama",
    **keys: Any,  # noqa: ANN401
) -> gguf.GGUFWriter:
    """Start a file with the metadata of a tiny model; `keys` replace or add to it."""
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Any] = {
        "context_length": 512,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10_000.0,
        **keys,
    }
    for key, value in fields.items():
        if value is None:
            continue
        add_value(writer, f"{architecture}.{key}", value)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    for key, value in vocabulary.keys.items():
        add_value(writer, key if "." in key else f"tokenizer.ggml.{key}", value)
    return writer


def add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Add a key with the type that converters use."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case float():
            writer.add_float32(key, value)
        case int():
            writer.add_uint32(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the added keys and tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TINY: Final = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10_000.0),
    is_tied=True,
    biases=Biases(),
    has_qk_norm=False,
    max_position_embeddings=512,
    sliding_window=None,
)
"""The metadata that `write_header` writes by default."""


def write_tiny(
    path: Path,
    kind: Kind = Kind.F32,
    shapes: Mapping[str, tuple[int, ...] | None] | None = None,
    vocabulary: Vocabulary | None = None,
    **keys: Any,  # noqa: ANN401
) -> Path:
    """Write a whole model of zeros.

    Args:
      path: the file's path.
      kind: format of matrices.
      shapes: shapes that replace or add to the default ones, by llama.cpp's names; None omits one.
      vocabulary: its tokenizer; one token per byte by default.
      keys: metadata of the architecture.
    """
    writer = write_header(path, vocabulary or byte_vocabulary(), **keys)
    own = {llama_cpp_name(name): shape for name, shape in tensor_shapes(TINY).items()}
    for name, shape in (own | dict(shapes or {})).items():
        if shape is not None:
            add_tensor(writer, name, np.zeros(shape, np.float32), kind)
    finish(writer)
    return path


COMPUTED: Final = {
    Kind.Q4_0: 1e-2,
    Kind.Q4_1: 1e-2,
    Kind.Q5_0: 5e-3,
    Kind.Q5_1: 5e-3,
    Kind.Q8_0: 7e-4,
    Kind.Q4_K: 1e-4,
    Kind.Q5_K: 5e-5,
    Kind.Q6_K: 3e-5,
}
"""What the kernels compute with as it is, and scales with which weights are about as large as those
of a model."""
QUANTISED: Final = replace(
    TINY,
    hidden_size=256,
    intermediate_size=512,
    num_heads=16,
    num_kv_heads=4,
    is_tied=False,
)
"""Whole blocks of every format."""


def random_blocks(
    kind: Kind, outputs: int, inputs: int, random: np.random.RandomState
) -> np.ndarray:
    """Return quantised weights [outputs, bytes of a row] of which every bit is random, but for the
    size of their scales."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.randint(0, 256, (outputs, inputs // numbers, size)).astype(np.uint8)
    scales = random.uniform(0.5, 1.5, (outputs, inputs // numbers, 2)) * COMPUTED[kind]
    scales[..., 1] *= {Kind.Q4_1: -7.5, Kind.Q5_1: -15.5}.get(kind, 7.5)
    first = 208 if kind is Kind.Q6_K else 0
    end = first + (4 if kind in (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K) else 2)
    blocks[..., first:end] = scales.astype(np.float16).view(np.uint8)[..., : end - first]
    return blocks.reshape(outputs, -1)


def write_quantised(
    path: Path,
    kinds: Sequence[Kind] = tuple(COMPUTED),
    config: ModelConfig = QUANTISED,
    seed: int = 12,
) -> Path:
    """Write a model of random blocks, its matrices in some formats by turns. numpy promises the
    same numbers for ever."""
    random = np.random.RandomState(seed)
    writer = write_header(
        path,
        byte_vocabulary(),
        embedding_length=config.hidden_size,
        feed_forward_length=config.intermediate_size,
        block_count=config.num_layers,
        **{
            "attention.head_count": config.num_heads,
            "attention.head_count_kv": config.num_kv_heads,
        },
    )
    for index, (name, shape) in enumerate(tensor_shapes(config).items()):
        if len(shape) == 1:
            norm = 1.0 + 0.2 * random.standard_normal(shape)
            writer.add_tensor(llama_cpp_name(name), norm.astype(np.float32))
            continue
        kind = kinds[index % len(kinds)]
        blocks = random_blocks(kind, *shape, random)
        writer.add_tensor(llama_cpp_name(name), blocks, raw_dtype=kind)
    finish(writer)
    return path


def write_model(
    path: Path,
    model: PreTrainedModel,
    kind: Kind = Kind.F32,
    vocabulary: Vocabulary | None = None,
    rope_divisors: np.ndarray | None = None,
    **keys: Any,  # noqa: ANN401
) -> None:
    """Write a checkpoint like llama.cpp's converter.

    Args:
      path: the file's path.
      model: a transformers model.
      kind: format of matrices; vectors are fp32.
      vocabulary: its tokenizer; one token per byte by default.
      rope_divisors: divisor of each rotary frequency.
      keys: further metadata of the architecture.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    shape = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "head_dim", None):
        shape |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
        shape["rope.dimension_count"] = config.head_dim
    writer = write_header(path, vocabulary or byte_vocabulary(), architecture, **{**shape, **keys})
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers
    )
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.astype(np.float32))
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, name
        add_tensor(writer, own_name, as_converted(name, parameter.float().numpy(), config), kind)
    finish(writer)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: Kind) -> None:
    """Add a tensor; a matrix in the given format, or in fp16 if no whole block fits into a row."""
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Kind.F16
    if values.ndim == 1 or kind is Kind.F32:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    else:
        packed = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)


def as_converted(name: str, values: np.ndarray, config: Any) -> np.ndarray:  # noqa: ANN401
    """Reorder the rows that llama.cpp rotates in neighbouring pairs."""
    if ARCHITECTURES[config.model_type] != "llama":
        return values
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if part in name:
            halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            return halves.swapaxes(1, 2).reshape(values.shape)
    return values
