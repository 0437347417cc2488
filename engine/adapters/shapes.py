"""Shapes of LoRA adapters, checks of adapter files, and their memory. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from store.adapter_files import WEIGHTS_FILE, MatrixPlace, place_of
from store.model_dir.headers import read_header
from triolet.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from store.adapter_files import AdapterFiles, Matrix
    from triolet.config import AdapterConfig

    from ..model_config import ModelConfig

PRODUCTS: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""A layer's matrix products, and the modules that each one stacks, in order."""


def module_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each module."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def require_shapes(files: AdapterFiles, model: ModelConfig) -> None:
    """Check that an adapter fits a base model of this shape.

    Raises:
      ModelError: it does not.
    """
    shapes = module_shapes(model)
    for place, matrix in files.matrices.items():
        if place.layer >= model.num_layers:
            raise ModelError(
                f"{files.weights}: tensor {matrix.name} is for layer {place.layer}, but the base "
                f"has {model.num_layers}; give the adapter to the base that it was made for"
            )
        outputs, inputs = shapes[place.module]
        wanted = (files.rank, inputs) if place.matrix == "A" else (outputs, files.rank)
        if matrix.shape != wanted:
            raise ModelError(
                f"{files.weights}: tensor {matrix.name} is {list(matrix.shape)}, but the base "
                f"needs {list(wanted)}; give the adapter to the base that it was made for"
            )


def require_finite(files: AdapterFiles) -> None:
    """Check that all numbers of an adapter are finite.

    Raises:
      ModelError: some are not.
    """
    import numpy as np  # here: every command of `triolet` imports this file

    for place, matrix in files.matrices.items():
        if matrix.dtype == "BF16":
            halves = np.frombuffer(matrix.numbers, np.uint16)
            numbers = (halves.astype(np.uint32) << 16).view(np.float32)
        else:
            stored = np.float32 if matrix.dtype == "F32" else np.float16
            numbers = np.frombuffer(matrix.numbers, stored).astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = numbers * np.float32(files.scale if place.matrix == "B" else 1.0)
        if not np.isfinite(scaled).all():
            raise not_finite(files, matrix)


def not_finite(files: AdapterFiles, matrix: Matrix) -> ModelError:
    """Return the error for a matrix with numbers that are not finite."""
    return ModelError(
        f"{files.weights}: tensor {matrix.name} has numbers that are not finite (its training "
        "diverged, or it was damaged); use an earlier checkpoint of the adapter"
    )


def adapter_numbers(configs: Iterable[AdapterConfig], model: ModelConfig) -> int:
    """Return how many numbers a worker holds for adapters, from the headers of their files.

    The B matrices of modules that share a product form a block diagonal. Its zeros count; the
    padding of packed panels does not.

    Raises:
      ModelError: a file cannot be read, or is no safetensors file.
    """
    shapes, found = module_shapes(model), 0
    for config in configs:
        ranks: dict[MatrixPlace, int] = {}
        try:
            header = read_header(Path(config.path) / WEIGHTS_FILE)
        except ModelError as error:
            raise ModelError(f"adapter {config.name}: {error}") from error
        for name, stored in header.items():
            place = place_of(name)
            if place is not None and place.matrix == "A" and stored.shape:
                ranks[place] = stored.shape[0]
        for layer in {place.layer for place in ranks}:
            for modules in PRODUCTS.values():
                rank = sum(ranks.get(MatrixPlace(layer, module, "A"), 0) for module in modules)
                outputs = sum(shapes[module][0] for module in modules)
                found += rank * (shapes[modules[0]][1] + outputs)
    return found
