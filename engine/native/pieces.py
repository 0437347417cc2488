"""A model's packed weights as named arrays: what a snapshot holds, and what the kernels read."""

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
      data: its bytes.
      panels: of a packed weight, else 0.
      steps: words of an output of a packed weight, else 0.
    """

    data: npt.NDArray[np.uint8]
    panels: int = 0
    steps: int = 0


class ReusedPages:
    """One memory for one piece after the other: fresh pages cost more than to pack into them."""

    def __init__(self) -> None:
        self._pages = torch.empty(0, dtype=torch.uint8)

    def __call__(self, num_bytes: int) -> Tensor:
        """Return memory that the last piece may have had."""
        if len(self._pages) < num_bytes:
            self._pages = own_pages(num_bytes)
        return self._pages[:num_bytes]


class Packing:
    """Reads a checkpoint and packs it.

    Layers are packed one by one, so that hardly more than one is in memory twice.

    Args:
      config: the model's shape.
      reader: reads the tensors.
      library: packs.
      on_progress: told the share of layers that are packed.

    Attributes:
      on_progress: as given.
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
        """Yield every piece by its name, always in the same order.

        Args:
          room: where a packed weight goes. It may be taken again once the next piece is asked for.
          num_threads: to pack with.

        Raises:
          ModelError: a tensor is missing, unknown or of another shape.
        """
        reader = self._reader
        yield "norm", _norm(reader.norm())
        table = reader.table()
        # A tied model has one table: the kernels take a token's row out of the packed one.
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
            # What `down` reads has a half of each panel of `gate_up`, the last one filled up.
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
    """Return a tensor's bytes, which it keeps alive."""
    return Piece(tensor.contiguous().view(-1).view(torch.uint8).numpy())
