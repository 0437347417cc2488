"""Test helpers that write tiny random checkpoints with transformers, and return transformers'
answers for them.

The classes of transformers are given by name and imported when they are used: importing one takes
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from tests.lazily import lazily

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import transformers
    from transformers import PreTrainedModel
else:
    transformers = lazily("transformers")

VOCAB_SIZE = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # spreads the logits: random weights must not give near ties
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: its classes' names in transformers, and the differences from
    `SHAPE`."""

    model: str
    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    max_shard_size: str = "1GB"


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {"head_dim": 16}),
    "llama-biases": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-tied": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {"head_dim": 16, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama-yarn": Family(
        "LlamaForCausalLM", "LlamaConfig", {"head_dim": 16, "rope_parameters": YARN_ROPE}
    ),
    "mistral-sharded": Family(
        "MistralForCausalLM",
        "MistralConfig",
        {"head_dim": 16, "sliding_window": None},
        max_shard_size="100KB",
    ),
    "qwen2-tied": Family("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
}


@dataclass(frozen=True)
class Checkpoint:
    """A directory, and the model of transformers that was saved there."""

    path: Path
    model: PreTrainedModel
    _answers: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the tokens of transformers' `generate`, once for all backends."""
        asked = (tuple(prompt), num_tokens)
        if asked not in self._answers:
            self._answers[asked] = self._generate(prompt, num_tokens)
        return self._answers[asked]

    def _generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        # nn.Module types an attribute that it does not know as a tensor.
        generate = cast("Callable[..., torch.Tensor]", self.model.generate)
        output = generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=VOCAB_SIZE,  # never ends: what follows an end token is compared too
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


def write_checkpoint(path: Path, name: str) -> Checkpoint:
    """Write a checkpoint of one family, the same one each time."""
    family = FAMILIES[name]
    torch.manual_seed(20)
    config = getattr(transformers, family.config)(**{**SHAPE, **family.fields})
    model: PreTrainedModel = getattr(transformers, family.model)(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Norms start as ones and biases as zeros: one that is left out must show.
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.train(mode=False)
    model.save_pretrained(path, max_shard_size=family.max_shard_size)
    return Checkpoint(path, model)
