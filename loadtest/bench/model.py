"""`python -m loadtest.bench.model`: write a Llama-shaped model with random weights, for benchmarks.

The duration of a step does not depend on the weights, so nothing is downloaded. The tokenizer is
the demo model's with additional words, so that every output of a random model can be decoded.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.console import Console
from safetensors.torch import save_file

from store.gguf.config import model_config
from store.gguf.container import read_gguf

from ..harness.progress import progress

if TYPE_CHECKING:
    import random

    from torch import Tensor

ROOT: Final = Path(__file__).parents[2]
DEMO: Final = ROOT / "triolet" / "demo"
SEED: Final = 150
MAX_DRAWN: Final = 2**24 + 2**20 - 1
"""Number of random values. Larger than every tensor of the 150M model, and odd, so that no two rows
of a matrix are equal."""
FIRST_WORD, LAST_WORD = 4_200, 16_000
"""Token ids of whole words in every model here, after the demo's vocabulary. A stream of one such
word has one event per token."""
SAID: Final = {"logit_bias": {"5000": 100}}
"""Fields of a request that make the answer one repeated word, despite random weights."""
COPIED: Final = ("tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with tied embeddings."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    vocab_size: int = 16_384
    max_position_embeddings: int = 8_192

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token in bf16."""
        return 2 * self.kv_numbers_per_token

    @property
    def kv_numbers_per_token(self) -> int:
        """Number of keys and values per token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by their names."""
        hidden, keys = self.hidden_size, self.num_kv_heads * self.head_dim
        queries, wide = self.num_heads * self.head_dim, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for index in range(self.num_layers):
            layer = f"model.layers.{index}."
            shapes |= {
                f"{layer}input_layernorm.weight": (hidden,),
                f"{layer}self_attn.q_proj.weight": (queries, hidden),
                f"{layer}self_attn.k_proj.weight": (keys, hidden),
                f"{layer}self_attn.v_proj.weight": (keys, hidden),
                f"{layer}self_attn.o_proj.weight": (hidden, queries),
                f"{layer}post_attention_layernorm.weight": (hidden,),
                f"{layer}mlp.gate_proj.weight": (wide, hidden),
                f"{layer}mlp.up_proj.weight": (wide, hidden),
                f"{layer}mlp.down_proj.weight": (hidden, wide),
            }
        return shapes


SHAPES: Final = {
    "150m": Shape(1024, 2816, num_layers=12, num_heads=16, num_kv_heads=4),
    "15m": Shape(384, 1024, num_layers=6, num_heads=6, num_kv_heads=2),
    # For a GPU: the shapes of Qwen2.5-0.5B and Llama-3-8B, with tied embeddings.
    "0.5b": Shape(896, 4864, num_layers=24, num_heads=14, num_kv_heads=2, vocab_size=151_936),
    "8b": Shape(
        4096, 14_336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128_256
    ),
}


def prompt_of(numbers: random.Random, num_tokens: int) -> list[int]:
    """Return a random prompt. No two prompts have a common prefix that a cache could use."""
    return [numbers.randint(FIRST_WORD, LAST_WORD) for _ in range(num_tokens)]


def shape_of_gguf(path: Path) -> Shape:
    """Return the shape of a model file."""
    config = model_config(read_gguf(path))
    return Shape(
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["vocab_size"],
        config["max_position_embeddings"],
    )


def write_model(directory: Path, shape: Shape) -> None:
    """Write a complete model directory, with the same bytes each time."""
    progress(f"writing a model with random weights, once: {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(SEED)
    weights: dict[str, Tensor] = {}
    for name, size in shape.tensors().items():
        weights[name] = torch.ones(size, dtype=torch.bfloat16)
        if len(size) > 1:
            weights[name] = _random(size, generator)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_description(directory, shape)  # last: a tokenizer marks a complete directory


def write_description(directory: Path, shape: Shape) -> None:
    """Write the config and tokenizer of a model, without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(shape))
    _write_json(directory / "tokenizer.json", _tokenizer(shape.vocab_size))
    for name in COPIED:
        (directory / name).write_bytes((DEMO / name).read_bytes())


def _random(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return normally distributed values. Large tensors repeat them: drawing 8e9 takes minutes."""
    numel = torch.Size(size).numel()
    drawn = torch.randn(min(numel, MAX_DRAWN), generator=generator) * 0.02
    repeated = drawn.bfloat16().repeat(-(-numel // MAX_DRAWN))
    return repeated[:numel].view(size).clone()


def _config(shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    return config | {
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "tie_word_embeddings": True,
        "vocab_size": shape.vocab_size,
    }


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return the demo tokenizer with additional words, which are decoded but never encoded."""
    tokenizer: dict[str, Any] = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token_id in range(len(vocabulary), vocab_size):
        vocabulary[f"Ġw{token_id}"] = token_id
    return tokenizer


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write one model, unless it exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=sorted(SHAPES), nargs="?", default="150m")
    parser.add_argument("--output", type=Path, help="directory; build/bench/model-SIZE")
    arguments = parser.parse_args()
    directory: Path = arguments.output or model_directory(arguments.size)
    shape = SHAPES[arguments.size]
    if not (directory / "tokenizer.json").exists():
        write_model(directory, shape)
    parameters = sum(torch.Size(size).numel() for size in shape.tensors().values())
    Console().print(
        f"{directory}: {parameters / 1e6:.0f}M parameters, "
        f"{shape.kv_bytes_per_token:,} bytes of KV per token in bf16"
    )


def written_model(size: str) -> Path:
    """Return the directory of a model of that size, and write it if it is missing."""
    directory = model_directory(size)
    if not (directory / "tokenizer.json").exists():
        write_model(directory, SHAPES[size])
    return directory


def model_directory(size: str) -> Path:
    """Return the path of a model of that size."""
    return ROOT / "build" / "bench" / f"model-{size}"


if __name__ == "__main__":
    main()
