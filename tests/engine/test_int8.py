"""Weights rounded to int8: the same bits in any company, and logits within a stated bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import triolet
from engine.native.library import load_library
from triolet.config import Dtype, EngineConfig, WeightFormat
from triolet.errors import ConfigError
from triolet.units import MIB

from .checkpoints import FAMILIES, VOCAB_SIZE
from .driver import GREEDY, Running, generate, open_engine, prefill
from .test_exactness import teacher_forced

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .checkpoints import Checkpoint

DEMO = Path(triolet.__file__).parent / "demo"
INT8 = WeightFormat.INT8
LOGITS_ERROR = 0.06
"""What EngineConfig.weights states. bfloat16 alone errs by up to 0.022 on these models."""
TEXT = """The cat sat on the mat. Once upon a time there was a little girl who lived in a village
near the forest. What is the capital of France? The capital of France is Paris. How many days are
there in a week? There are seven days in a week. Water boils at one hundred degrees. The sun rises
in the east and sets in the west."""
PROMPTS = [
    np.random.default_rng(6).integers(3, VOCAB_SIZE, size=n).tolist() for n in (1, 17, 63, 200)
]


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Skip where there are none: nothing else computes with int8."""
    if load_library() is None:
        pytest.skip("the kernels are not built for this machine")


def rounded(weight: Tensor) -> Tensor:
    """Return what int8 makes of a weight."""
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (weight / scales).round() * scales


def round_checkpoint(model: Path, to: Path) -> None:
    """Write a copy of a model whose matrices have been rounded."""
    to.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (to / path.name).write_bytes(path.read_bytes())
    weights = load_file(model / "model.safetensors")
    matrices = {name: rounded(w) if w.dim() == 2 else w for name, w in weights.items()}
    for name, weight in weights.items():
        if name == "model.embed_tokens.weight" and "lm_head.weight" in weights:
            matrices[name] = weight  # only a tied model's table is rounded
    save_file(matrices, to / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-biases", "llama3-tied", "qwen2-tied", "qwen3"])
def test_int8_computes_with_the_rounded_weights(
    checkpoint: Callable[[str], Checkpoint], family: str, tmp_path: Path
) -> None:
    path = checkpoint(family).path
    round_checkpoint(path, tmp_path / "rounded")
    ours = teacher_forced(path, PROMPTS[3], torch.float32, "native", INT8)
    expected = teacher_forced(tmp_path / "rounded", PROMPTS[3], torch.float32, "sdpa")
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("family", ["llama3-tied", "qwen3"])
def test_the_bits_depend_on_no_batch_chunk_or_thread(
    checkpoint: Callable[[str], Checkpoint], family: str, dtype: Dtype
) -> None:
    config = EngineConfig(dtype=dtype, weights=INT8, kv_pool_bytes=8 * MIB)
    engine = open_engine(checkpoint(family).path, config)
    alone = [generate(engine, [prompt], 8)[0] for prompt in PROMPTS]
    many = PROMPTS * 4
    assert generate(engine, many, 8) == alone * 4
    for chunk in (1, 7, 64):
        assert generate(engine, PROMPTS, 8, chunk=chunk) == alone
    torch.set_num_threads(3)
    try:
        assert generate(engine, many, 8) == alone * 4
    finally:
        torch.set_num_threads(1)
    again = Running(engine, "prefilled", PROMPTS[3] + [r.token_id for r in alone[3][:7]], 1)
    prefill(engine, again, GREEDY, 512)
    assert again.results == alone[3][7:], "decode and prefill"


def error_of(ours: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the logits' errors as a share of the logits' spread."""
    return float((ours - exact).square().mean().sqrt() / exact.std())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_random_models_err_within_the_stated_bound(
    checkpoint: Callable[[str], Checkpoint], family: str, dtype: torch.dtype
) -> None:
    path = checkpoint(family).path
    exact = teacher_forced(path, PROMPTS[3], torch.float32, "native")
    ours = teacher_forced(path, PROMPTS[3], dtype, "native", INT8)
    assert 0 < error_of(ours, exact) < LOGITS_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_model_expects_the_same_words(dtype: torch.dtype) -> None:
    token_ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(TEXT).ids
    exact = teacher_forced(DEMO, token_ids, torch.float32, "native")
    ours = teacher_forced(DEMO, token_ids, dtype, "native", INT8)
    assert 0 < error_of(ours, exact) < LOGITS_ERROR
    divergence = F.kl_div(
        ours.log_softmax(-1), exact.log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert divergence < 0.006, "nats per token"
    best = exact.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 4 * LOGITS_ERROR * exact.std()
    assert is_clear.sum() > 20
    assert torch.equal(ours.argmax(-1)[is_clear], exact.argmax(-1)[is_clear])


def test_int8_is_refused_where_nothing_computes_with_it(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("llama").path
    with pytest.raises(ConfigError, match="weights is 'int8'; allowed: dtype with backend 'sdpa'"):
        open_engine(path, EngineConfig(weights=INT8, backend="sdpa", kv_pool_bytes=4 * MIB))
    monkeypatch.setattr("engine.backend.load_library", lambda: None)
    with pytest.raises(ConfigError, match="'int8', for which backend 'native' is needed: its kern"):
        open_engine(path, EngineConfig(weights=INT8, kv_pool_bytes=4 * MIB))
