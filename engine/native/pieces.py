"""A model's packed weights as named arrays (pieces), which snapshots store and kernels read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .packing import own_pages, pack, pack_bias, pack_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from ..layers import Linear, RMSNorm
    from ..model_config import ModelConfig
    from ..weights import WeightReader
    from .library import Library


class Piece(NamedTuple):
    """One array.

    Attributes:
      data: the array's bytes.
      panels: panels of a packed weight, else 0.
      steps: words per output of a packed weight, else 0.
    """

    data: npt.NDArray[np.uint8]
    panels: int = 0
    steps: int = 0


class ReusedPages:
    """A buffer reused for each piece: allocating fresh pages costs more than packing."""

    def __init__(self) -> None:
        self._pages = torch.empty(0, dtype=torch.uint8)

    def __call__(self, num_bytes: int) -> Tensor:
        """Return memory, possibly that of the previous piece."""
        if len(self._pages) < num_bytes:
            self._pages = own_pages(num_bytes)
        return self._pages[:num_bytes]


class Packing:
    """Reads a checkpoint and packs it, layer by layer to limit memory.

    Args:
      config: the model's shape.
      reader: reads the tensors.
      library: packs the weights.
      on_progress: called with the share of layers packed.

    Attributes:
      on_progress: the callback.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        library: Library,
        on_progress: Callable[[float], None],
    ) -> None:
        self._config = config
        self._reader = reader
        self._library = library
        self.on_progress = on_progress

    def pieces(
        self, room: Callable[[int], Tensor], num_threads: int
    ) -> Iterator[tuple[str, Piece]]:
        """Yield (name, piece) in a fixed order.

        Args:
          room: allocates memory for a packed weight. It may be reused for the next piece.
          num_threads: number of threads.

        Raises:
          ModelError: a tensor is missing, unknown or of another shape.
        """
        reader = self._reader
        yield "norm", _norm(reader.norm())
        table = reader.table()
        # A tied model has one table: the kernels read a token's row from the packed one.
        if not self._config.is_tied and table.blocks:
            yield from self._linear("table", table, room, num_threads)
        elif not self._config.is_tied:
            yield "embedding", _plain(table.weight)
        yield from self._linear("lm_head", reader.lm_head(table), room, num_threads)
        for index in range(self._config.num_layers):
            layer, prefix = reader.layer(index), f"layers.{index}."
            halves = self._library.panel // 2
            for name, norm in (
                ("attention_norm", layer.attention_norm),
                ("query_norm", layer.query_norm),
                ("key_norm", layer.key_norm),
                ("mlp_norm", layer.mlp_norm),
            ):
                if norm is not None:
                    yield f"{prefix}{name}", _norm(norm)
            # The input of `down` has half of each panel of `gate_up`, padded in the last one.
            inner = -(-self._config.intermediate_size // halves) * halves
            for name, linear, inputs in (
                ("qkv", layer.qkv, 0),
                ("output", layer.output, 0),
                ("gate_up", layer.gate_up, 0),
                ("down", layer.down, inner),
            ):
                yield from self._linear(f"{prefix}{name}", linear, room, num_threads, inputs)
            self.on_progress((index + 1) / self._config.num_layers)
        reader.finish()

    def _linear(
        self,
        name: str,
        layer: Linear,
        room: Callable[[int], Tensor],
        num_threads: int,
        inputs: int = 0,
    ) -> Iterator[tuple[str, Piece]]:
        is_gate_up = name.endswith("gate_up")
        if layer.blocks:
            packed = pack_blocks(
                self._library,
                layer.blocks,
                layer.weight.dtype,
                is_gate_up=is_gate_up,
                room=room,
                num_threads=num_threads,
            )
        else:
            packed = pack(
                self._library,
                layer.weight,
                is_gate_up=is_gate_up,
                inputs=inputs,
                room=room,
                num_threads=num_threads,
            )
        yield name, _plain(packed.weight)._replace(panels=packed.panels, steps=packed.steps)
        if layer.bias is not None:
            bias = pack_bias(layer.bias, self._library.panel, is_gate_up=is_gate_up)
            yield f"{name}.bias", _plain(bias)
        if packed.strips is not None:
            yield f"{name}.strips", _plain(packed.strips)


def _norm(norm: RMSNorm) -> Piece:
    return _plain(norm.weight.float())


def _plain(tensor: Tensor) -> Piece:
    """Return a piece with a tensor's bytes, keeping the tensor alive."""
    return Piece(tensor.contiguous().view(-1).view(torch.uint8).numpy())
