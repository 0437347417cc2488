"""List the tensors that a model needs, by Hugging Face's names, and check a checkpoint's
headers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from triolet.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from store.model_dir.headers import StoredTensor

    from ..model_config import ModelConfig

_IGNORED: Final = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Old checkpoints contain the rotary frequencies, which the config determines."""
FLOATS: Final = frozenset({"F32", "F16", "BF16"})
LM_HEAD: Final = "lm_head.weight"
"""Some checkpoints of tied models contain it too."""


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a checkpoint must have, by name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    biases = config.biases
    linear = {
        "self_attn.q_proj": (queries, hidden, biases.qkv),
        "self_attn.k_proj": (keys, hidden, biases.qkv),
        "self_attn.v_proj": (keys, hidden, biases.qkv),
        "self_attn.o_proj": (hidden, queries, biases.output),
        "mlp.gate_proj": (inner, hidden, biases.mlp),
        "mlp.up_proj": (inner, hidden, biases.mlp),
        "mlp.down_proj": (hidden, inner, biases.mlp),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.has_qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.is_tied:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for name, (outputs, inputs, has_bias) in linear.items():
            shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (outputs,)
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}
    return shapes


def check_tensors(config: ModelConfig, stored: Mapping[str, StoredTensor], model_dir: Path) -> None:
    """Check that a checkpoint has exactly the tensors of its config.

    Raises:
      ModelError: a tensor is missing, unknown, of another shape, or not floating point.
    """
    wanted = tensor_shapes(config)
    for name, shape in wanted.items():
        found = stored.get(name)
        if found is None:
            raise missing(name, model_dir)
        if found.shape != shape or found.dtype not in FLOATS:
            raise mismatched(name, found, shape)
    refuse_unknown(config, stored.keys() - wanted.keys())


def missing(name: str, model_dir: Path) -> ModelError:
    """Return the error for a tensor that no file has."""
    return ModelError(
        f"tensor {name} is missing from {model_dir}; fetch the weights again, "
        "or check that config.json belongs to them"
    )


def mismatched(name: str, found: StoredTensor, shape: tuple[int, ...]) -> ModelError:
    """Return the error for a tensor with a dtype or shape that does not match the config."""
    return ModelError(
        f"{found.path}: tensor {name} is {found.dtype} {list(found.shape)}; "
        f"config.json requires floats {list(shape)}: check that they belong together"
    )


def refuse_unknown(config: ModelConfig, names: Collection[str]) -> None:
    """Refuse tensors that the model does not have.

    Args:
      config: the model's shape.
      names: names of tensors that the model does not need.

    Raises:
      ModelError: one of them is unknown.
    """
    allowed = {LM_HEAD} if config.is_tied else set()
    unknown = sorted(name for name in names if not (name in allowed or _IGNORED.fullmatch(name)))
    if unknown:
        raise ModelError(
            f"tensor {unknown[0]} has no place in a {config.architecture} as config.json "
            f"describes it ({len(unknown)} such tensors); check that they belong together"
        )
