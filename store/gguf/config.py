"""Translate a GGUF file's metadata into a Hugging Face config.json and generation_config.json.

Keys that affect the answers but have no counterpart in these files are refused.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from triolet.errors import ModelError

from ..model_dir.bounded import count_of
from .container import ENCODINGS

if TYPE_CHECKING:
    from .container import GgufFile

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",  # Mistral's files use this kind too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EMBEDDING: Final = "token_embd.weight"
OUTPUT: Final = "output.weight"
ROPE_FACTORS: Final = "rope_freqs.weight"
_UNCOMPUTED: Final = {
    "expert_count": 0,
    "attention.scale": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.causal": True,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "attn_logit_softcapping": 0.0,
}
"""Keys of an architecture that the engine does not support, with the value that has no effect."""
_SAMPLING: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS: Final = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"}
)
"""Control tokens that end a turn in every model that has them: many files name only one end
token."""
CONTROL: Final = 3
"""Type of tokens that only templates write, never users."""


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
      ModelError: a key is missing, or has a value that the engine does not support.
    """
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: general.architecture is {kind!r}; supported: {', '.join(ARCHITECTURES)}"
        )
    for key, harmless in _UNCOMPUTED.items():
        value = file.metadata.get(f"{kind}.{key}", harmless)
        if value != harmless:
            raise ModelError(
                f"{file.path}: {kind}.{key} is {value!r}, which is not supported here; allowed: "
                f"{harmless!r}"
            )
    num_heads = _count(file, f"{kind}.attention.head_count")
    hidden_size = _count(file, f"{kind}.embedding_length")
    head_dim = _count(file, f"{kind}.attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = _count(file, f"{kind}.{key}", head_dim)
        if found != head_dim:
            raise ModelError(
                f"{file.path}: {kind}.{key} is {found}; supported: the size of a head, {head_dim}"
            )
    if EMBEDDING not in file.tensors:
        raise ModelError(f"{file.path}: tensor {EMBEDDING} is missing; fetch the file again")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _count(file, f"{kind}.feed_forward_length"),
        "num_hidden_layers": _count(file, f"{kind}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _count(file, f"{kind}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _context_length(file, kind),
        "rms_norm_eps": _float(file, f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _float(file, f"{kind}.rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": kind == "llama" and "blk.0.ffn_up.bias" in file.tensors,
        "eos_token_id": end_token_ids(file),
    }
    scaling = _rope_scaling(file, kind, head_dim)
    return config | ({"rope_scaling": scaling} if scaling else {})


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of generation_config.json: end tokens, and sampling defaults if
    present."""
    told = {ours: file.metadata[key] for key, ours in _SAMPLING.items() if key in file.metadata}
    return {"eos_token_id": end_token_ids(file), **told}


def end_token_ids(file: GgufFile) -> list[int]:
    """Return the ids that end an answer, those named by the file first.

    Raises:
      ModelError: there are none.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    named = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    ids = [token_id for token_id in named if isinstance(token_id, int)]
    if isinstance(tokens, list) and isinstance(kinds, list):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ids += [i for i, (token, kind) in pairs if kind == CONTROL and token in _END_TOKENS]
    if not ids:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.eos_token_id is missing, so no answer would end; "
            "convert the model again with a current llama.cpp"
        )
    return list(dict.fromkeys(ids))


def _context_length(file: GgufFile, kind: str) -> int:
    """Return the longest sequence with correct answers: attention here always looks back over all
    positions, which equals a sliding window only within the window."""
    length = _count(file, f"{kind}.context_length")
    return min(length, _count(file, f"{kind}.attention.sliding_window", length))


def _rope_scaling(file: GgufFile, kind: str, head_dim: int) -> dict[str, Any] | None:
    """Return the rope scaling for config.json; None if there is none."""
    if ROPE_FACTORS in file.tensors:
        return {"rope_type": "divisors", "divisors": _rope_divisors(file, head_dim)}
    name = file.metadata.get(f"{kind}.rope.scaling.type", "none")
    factor = file.metadata.get(f"{kind}.rope.scaling.factor", 1.0)
    if name == "none" or (name == "linear" and factor in (0.0, 1.0)):
        return None
    scaling = {"rope_type": name, "factor": factor}
    if name == "linear":
        return scaling
    original = file.metadata.get(f"{kind}.rope.scaling.original_context_length")
    if name == "yarn" and original is not None:
        return scaling | {"original_max_position_embeddings": original}
    raise ModelError(
        f"{file.path}: {kind}.rope.scaling.type is {name!r}; supported: none, linear, and yarn "
        "with rope.scaling.original_context_length"
    )


def _rope_divisors(file: GgufFile, head_dim: int) -> list[float]:
    """Return the divisor of each rotary frequency: Llama 3's rope scaling, as computed by
    llama.cpp's converter."""
    place = file.tensors[ROPE_FACTORS]
    if place.shape != (head_dim // 2,) or ENCODINGS[place.encoding].name != "F32":
        raise ModelError(
            f"{file.path}: tensor {ROPE_FACTORS} is {ENCODINGS[place.encoding].name} "
            f"{list(place.shape)}; expected: F32 [{head_dim // 2}]"
        )
    with file.path.open("rb") as opened:
        opened.seek(place.start)
        return list(struct.unpack(f"<{head_dim // 2}f", opened.read(place.num_bytes)))


def _count(file: GgufFile, key: str, default: int | None = None) -> int:
    return count_of(file.path, file.metadata, key, default)


def _float(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{file.path}: {key} is {value!r}; it must be a number")
    return float(value)
