"""Load LoRA adapters as tensors, in the form that the forward pass uses.

Modules that share their input share a product, as in engine/layers.py: the A matrices of query, key
and value are stacked, and their B matrices form a block diagonal. An adapter therefore adds two
thin products to each of a layer's four. The adapter's scale is multiplied into B.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from store.adapter_files import MatrixPlace, read_adapter
from triolet.adapter_keys import digest_bytes
from triolet.errors import ModelError

from .shapes import PRODUCTS, module_shapes, not_finite, require_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from store.adapter_files import AdapterFiles
    from triolet.config import AdapterConfig

    from ..model_config import ModelConfig

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes by the names of store.adapter_files.FLOATS."""


class LowRank(NamedTuple):
    """What an adapter adds to one product.

    Attributes:
      down: [ranks, inputs].
      up: [outputs, ranks], already scaled.
    """

    down: Tensor
    up: Tensor


class Adapter(NamedTuple):
    """One adapter.

    Attributes:
      name: the name in requests; used in errors.
      layers: for each layer of the base, what the adapter adds, by product. Products that it does
        not change are missing.
    """

    name: str
    layers: Sequence[Mapping[str, LowRank]]


def load_adapters(
    configs: Iterable[AdapterConfig],
    max_rank: int,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[bytes, Adapter]:
    """Read the adapters of a base model.

    Args:
      configs: paths of the adapters, and the digests that they must have.
      max_rank: the largest rank allowed.
      model: the base's shape.
      dtype: the dtype to convert to.
      device: where the tensors are put.

    Returns:
      The adapters by digest.

    Raises:
      ModelError: an adapter is broken, has changed, belongs to a base of another shape, or has
        numbers that are not finite.
    """
    loaded = {}
    for config in configs:
        files = read_adapter(Path(config.path), config.base, max_rank)
        if files.digest != config.digest:
            raise ModelError(
                f"adapter {config.name}: {files.path} is {files.digest} and was {config.digest} "
                "when the fleet started: its files have changed; restart the fleet to serve them"
            )
        layers = layers_of(files, model, dtype, device)
        loaded[digest_bytes(files.digest)] = Adapter(config.name, layers)
    return loaded


def layers_of(
    files: AdapterFiles, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> list[dict[str, LowRank]]:
    """Return what an adapter adds to each layer, read from the bytes that its digest covers.

    Raises:
      ModelError: the adapter belongs to a base of another shape, or has numbers that are not
        finite.
    """
    require_shapes(files, model)
    shapes = module_shapes(model)

    def tensor(layer: int, module: str, matrix: str) -> Tensor:
        found = files.matrices[MatrixPlace(layer, module, matrix)]
        stored = torch.frombuffer(found.numbers, dtype=_DTYPES[found.dtype])
        scaled = stored.float().view(found.shape) * (files.scale if matrix == "B" else 1.0)
        if not bool(scaled.isfinite().all()):
            raise not_finite(files, found)
        return scaled

    return [
        {
            product: LowRank(
                torch.cat([tensor(index, one, "A") for one in present]).to(device, dtype),
                _diagonal(
                    [(shapes[one][0], one in present) for one in modules],
                    [tensor(index, one, "B") for one in present],
                ).to(device, dtype),
            )
            for product, modules in PRODUCTS.items()
            if (present := [m for m in modules if MatrixPlace(index, m, "A") in files.matrices])
        }
        for index in range(model.num_layers)
    ]


def _diagonal(outputs: Sequence[tuple[int, bool]], blocks: Sequence[Tensor]) -> Tensor:
    """Return a block-diagonal matrix, with rows of zeros for modules that have no block.

    Args:
      outputs: for each module, its number of outputs and whether it has a block.
      blocks: the blocks, each [outputs, rank].
    """
    found = torch.zeros(sum(count for count, _ in outputs), sum(one.shape[1] for one in blocks))
    row, column, left = 0, 0, iter(blocks)
    for count, has_block in outputs:
        if has_block:
            block = next(left)
            found[row : row + count, column : column + block.shape[1]] = block
            column += block.shape[1]
        row += count
    return found
