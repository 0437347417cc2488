"""Test helpers that write LoRA adapters in PEFT's format with random numbers, and checkpoints with
the same adapters merged."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from store.adapter_files import CONFIG_FILE, MODULES, WEIGHTS_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


@dataclass(frozen=True)
class Written:
    """A written adapter.

    Attributes:
      path: its directory.
      tensors: tensors by name, as in its file.
      scale: factor of B(A(x)).
    """

    path: Path
    tensors: dict[str, Tensor]
    scale: float


def base_tensors(model_dir: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint."""
    found: dict[str, Tensor] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        found |= load_file(file)
    return found


def write_adapter(
    path: Path,
    model_dir: Path,
    seed: int,
    modules: Sequence[str] = tuple(MODULES),
    *,
    rank: int = 4,
    spread: float = 0.3,
    **fields: Any,  # noqa: ANN401 (of JSON)
) -> Written:
    """Write an adapter for all layers of a checkpoint.

    Args:
      path: the directory to create.
      model_dir: the base model.
      seed: random seed.
      modules: modules it changes.
      rank: rank of its matrices.
      spread: scale of its numbers; large enough to change tokens.
      fields: further fields of its config.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in base_tensors(model_dir).items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module in modules:
            prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            outputs, inputs = weight.shape
            tensors[f"{prefix}A.weight"] = torch.randn(rank, inputs, generator=generator) * spread
            tensors[f"{prefix}B.weight"] = torch.randn(outputs, rank, generator=generator) * spread
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(modules),
        "bias": "none",
        **fields,
    }
    path.mkdir(parents=True)
    (path / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, path / WEIGHTS_FILE)
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return Written(path, tensors, config["lora_alpha"] / divisor)


def write_merged(path: Path, model_dir: Path, adapter: Written) -> Path:
    """Write a checkpoint with the weights W + scale * B A, in one file."""
    shutil.copytree(model_dir, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    merged = base_tensors(model_dir)
    for name, low in adapter.tensors.items():
        if name.endswith("lora_A.weight"):
            up = adapter.tensors[name.replace("lora_A", "lora_B")]
            own = name.removeprefix("base_model.model.").replace(".lora_A", "")
            added = adapter.scale * up @ low
            merged[own] = (merged[own].float() + added).to(merged[own].dtype)
    save_file(merged, path / "model.safetensors", metadata={"format": "pt"})
    return path
