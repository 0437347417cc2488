"""Tests of the kernels' ARITHMETIC number: the results have exactly the bits recorded for it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.arithmetic import elementary
from engine.model_config import load_model_config
from engine.native.library import load_library
from triolet.config import Dtype, WeightFormat

from .test_exactness import teacher_forced

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 100,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 100,
}
ELEMENTARY = "996a45274a9daa0f"
BITS: dict[tuple[Dtype, WeightFormat], str] = {
    (Dtype.FLOAT32, WeightFormat.DTYPE): "85244cca3ae2aa9e",
    (Dtype.FLOAT32, WeightFormat.AUTO): "18fca9addd6d6aee",
    (Dtype.BFLOAT16, WeightFormat.DTYPE): "ef177f5cb4d44841",
    (Dtype.BFLOAT16, WeightFormat.AUTO): "8421235798f2bc3f",
}
ARITHMETIC = 3


def write_model(path: Path) -> None:
    """Write a small model; numpy guarantees the same random numbers in every version."""
    numbers = np.random.RandomState(12)

    def matrix(*shape: int) -> Tensor:
        return torch.from_numpy(numbers.standard_normal(shape).astype(np.float32) * 0.2)

    weights = {"model.embed_tokens.weight": matrix(100, 64), "model.norm.weight": 1 + matrix(64)}
    for index in range(2):
        layer = f"model.layers.{index}"
        for name, outputs, inputs in (
            ("self_attn.q_proj", 64, 64),
            ("self_attn.k_proj", 32, 64),
            ("self_attn.v_proj", 32, 64),
            ("self_attn.o_proj", 64, 64),
            ("mlp.gate_proj", 100, 64),
            ("mlp.up_proj", 100, 64),
            ("mlp.down_proj", 64, 100),
        ):
            weights[f"{layer}.{name}.weight"] = matrix(outputs, inputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = 1 + matrix(64)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("weights", list(WeightFormat))
def test_a_change_of_bits_is_a_change_of_number(
    tmp_path: Path, quantised: Path, dtype: Dtype, weights: WeightFormat
) -> None:
    library = load_library()
    if library is None:
        pytest.skip("the kernels are not built for this machine")
    write_model(tmp_path)
    if elementary(load_model_config(tmp_path)) != ELEMENTARY:
        pytest.skip("torch computes other angles here than where the bits were noted")
    token_ids = [(position * 37) % 100 for position in range(150)]
    path = quantised if weights is WeightFormat.AUTO else tmp_path
    logits = teacher_forced(path, token_ids, getattr(torch, dtype.value), "native", weights)
    bits = hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()[:16]
    # Other bits may be intended. Then raise ARITHMETIC in model.h and record the new bits here.
    assert (library.arithmetic, bits) == (ARITHMETIC, BITS[dtype, weights])
