"""Read and check a Hugging Face model's config.json and generation_config.json.

Accepts the spellings of transformers 4 and 5. Refuses settings that Triolet does not compute,
because the answers would differ from the original model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from store.model_dir.bounded import count_of, end_token_ids, read_json
from triolet.errors import ModelError

from .rope_config import RopeConfig, read_rope

if TYPE_CHECKING:
    from pathlib import Path

SUPPORTED_ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
UNSAFE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt", ".py"})
"""Files that run code when loaded. A model directory must not contain any."""


class Biases(NamedTuple):
    """Which linear layers have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer of the Llama family.

    Attributes:
      sliding_window: positions that the original model's attention looks back; None for all.
        Triolet attends to all, which is equal up to this length.
      has_qk_norm: whether each head's query and key pass an RMSNorm before rotation (Qwen3).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    is_tied: bool
    biases: Biases
    has_qk_norm: bool
    max_position_embeddings: int
    sliding_window: int | None

    @property
    def digest(self) -> str:
        """Digest of all fields."""
        return xxhash.xxh3_64(repr(self).encode()).hexdigest()

    @property
    def max_model_len(self) -> int:
        """Longest sequence for which Triolet computes the original model's answers."""
        if self.sliding_window is None:
            return self.max_position_embeddings
        return min(self.max_position_embeddings, self.sliding_window)

    @property
    def max_model_len_reason(self) -> str:
        """What limits `max_model_len`."""
        if self.max_model_len < self.max_position_embeddings:
            return f"the model's sliding_window of {self.sliding_window}"
        return f"the model's max_position_embeddings of {self.max_position_embeddings}"


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read and check `config.json`, and refuse a directory that holds code.

    Raises:
      ModelError: names the file, what is wrong and what to do.
    """
    check_directory(model_dir)
    path = model_dir / "config.json"
    fields = read_json(path)
    architecture = _architecture(path, fields)
    num_heads = count_of(path, fields, "num_attention_heads")
    num_kv_heads = count_of(path, fields, "num_key_value_heads", num_heads)
    hidden_size = count_of(path, fields, "hidden_size")
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    head_dim = count_of(path, fields, "head_dim", default_head_dim)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{path}: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}; the file is broken: fetch it again"
        )
    max_position_embeddings = count_of(path, fields, "max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=count_of(path, fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count_of(path, fields, "intermediate_size"),
        num_layers=count_of(path, fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_eps(path, fields),
        rope=read_rope(path, fields, max_position_embeddings),
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        biases=_biases(architecture, fields),
        has_qk_norm=architecture == "Qwen3ForCausalLM",
        max_position_embeddings=max_position_embeddings,
        sliding_window=_sliding_window(architecture, fields),
    )


def load_eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Return the ids that end a sequence, from generation_config.json or else config.json.

    Raises:
      ModelError: a file is broken, or its ids are not integers.
    """
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if ids := end_token_ids(path, read_json(path, is_optional=True)):
            return ids
    return ()


def check_directory(model_dir: Path) -> None:
    """Refuse a model directory that is missing or holds files that run code when loaded.

    Raises:
      ModelError: says which file and what to do.
    """
    if not model_dir.is_dir():
        raise ModelError(
            f"model directory {model_dir} does not exist; give the path of a directory with "
            "config.json, tokenizer.json and *.safetensors"
        )
    unsafe = sorted(p.name for p in model_dir.iterdir() if p.suffix in UNSAFE_SUFFIXES)
    if unsafe:
        raise ModelError(
            f"{model_dir / unsafe[0]}: files that can run code are refused; Triolet reads "
            "*.safetensors and *.json only: convert the weights to safetensors, or delete the file "
            "if the directory has them already"
        )


def _architecture(path: Path, fields: dict[str, Any]) -> str:
    """Return the architecture. Raise ModelError for anything that Triolet does not compute."""
    if fields.get("auto_map"):
        raise ModelError(
            f"{path}: auto_map names code that comes with the model; it is refused: use a model of "
            f"a built-in architecture ({', '.join(SUPPORTED_ARCHITECTURES)})"
        )
    names = fields.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{path}: architecture {name!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if fields.get("quantization_config"):
        raise ModelError(
            f"{path}: quantization_config: quantised weights are not supported; use the model's "
            "float32, float16 or bfloat16 directory"
        )
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{path}: hidden_act {activation!r} is not supported; supported: silu")
    return str(name)


def _eps(path: Path, fields: dict[str, Any]) -> float:
    value = fields.get("rms_norm_eps", 1e-6)
    if not isinstance(value, float | int) or not 0 <= value < 1:
        raise ModelError(f"{path}: rms_norm_eps is {value!r}; it must be a number in [0, 1)")
    return float(value)


def _biases(architecture: str, fields: dict[str, Any]) -> Biases:
    if architecture == "Qwen2ForCausalLM":
        return Biases(qkv=True)
    if architecture == "MistralForCausalLM":
        return Biases()
    attention = bool(fields.get("attention_bias", False))
    mlp = architecture == "LlamaForCausalLM" and bool(fields.get("mlp_bias", False))
    return Biases(qkv=attention, output=attention, mlp=mlp)


def _sliding_window(architecture: str, fields: dict[str, Any]) -> int | None:
    """Return the sliding window of the layers that have one; it limits `max_model_len`."""
    window = fields.get("sliding_window")
    if architecture == "LlamaForCausalLM" or type(window) is not int or window < 1:
        return None
    if architecture.startswith("Qwen") and not fields.get("use_sliding_window", False):
        return None
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list) and "sliding_attention" not in layer_types:
        return None
    return window
