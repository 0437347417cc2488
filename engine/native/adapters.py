"""Pack LoRA adapters for the C kernels, and describe the rows of a step that use them."""

from __future__ import annotations

from ctypes import POINTER, addressof, cast
from typing import TYPE_CHECKING, Final

import numpy as np

from ..adapters.rows import tokens_by_adapter
from .packing import pack
from .structs import (
    AdaptedFields,
    GroupFields,
    LayerAdapterFields,
    LayerFields,
    LinearFields,
    LowRankFields,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ..adapters.tensors import Adapter, LowRank
    from ..batch import FlatStep
    from .library import Library

GROUP_ROWS: Final = 48
"""Rows that one thread takes at a time: whole tiles of a product in every build, and few enough
that a long prompt keeps all threads busy although an adapter has only one or two panels."""


class PackedAdapter:
    """One adapter packed into panels.

    Args:
      adapter: the adapter's matrices.
      layers: the base's layers, which set the sizes of the outputs.
      library: packs the matrices.
      per_word: numbers per word.

    Attributes:
      fields: for each layer, the adapter's products.
      low_stride: width of the widest first product.
    """

    def __init__(
        self,
        adapter: Adapter,
        layers: Sequence[LayerFields],
        library: Library,
        per_word: int,
    ) -> None:
        self._kept: list[Tensor] = []
        self._library = library
        self._per_word = per_word
        self.low_stride = 0
        self.fields = (LayerAdapterFields * len(layers))()
        for own, layer, fields in zip(adapter.layers, layers, self.fields, strict=True):
            for product, low in own.items():
                base: LinearFields = getattr(layer, product)
                setattr(fields, product, self._packed(product, low, base))

    def _packed(self, product: str, low: LowRank, base: LinearFields) -> LowRankFields:
        down = self._linear(low.down, inputs=base.steps * self._per_word)
        self.low_stride = max(self.low_stride, down.panels * self._library.panel)
        up = self._linear(low.up, is_gate_up=product == "gate_up")
        assert up.panels == base.panels, "the adapter's outputs do not match the layer's"
        return LowRankFields(down, up)

    def _linear(self, weight: Tensor, *, inputs: int = 0, is_gate_up: bool = False) -> LinearFields:
        packed = pack(self._library, weight, is_gate_up=is_gate_up, inputs=inputs)
        self._kept.append(packed.weight)
        return LinearFields(packed.weight.data_ptr(), None, None, packed.panels, packed.steps)


class AdaptedRows:
    """Rows of one step, or of its last layer, grouped by their adapter.

    Args:
      adapters: all adapters, by digest.
      rows_of: the rows of each adapter, by digest.
      num_rows: rows of the step.

    Attributes:
      fields: the structure passed to the kernels; valid as long as this object.
    """

    def __init__(
        self,
        adapters: Mapping[bytes, PackedAdapter],
        rows_of: Mapping[bytes, Sequence[int]],
        num_rows: int,
    ) -> None:
        self._rows = np.array([row for rows in rows_of.values() for row in rows], dtype=np.int64)
        self._places = np.full(num_rows, -1, dtype=np.int64)
        self._places[self._rows] = np.arange(len(self._rows))
        groups, first = [], 0
        for digest, rows in rows_of.items():
            layers = cast(adapters[digest].fields, POINTER(LayerAdapterFields))
            end = first + len(rows)
            groups += [
                GroupFields(layers, start, min(start + GROUP_ROWS, end))
                for start in range(first, end, GROUP_ROWS)
            ]
            first = end
        self._groups = (GroupFields * len(groups))(*groups)
        self.fields = AdaptedFields(
            len(self._rows),
            len(groups),
            self._rows.ctypes.data,
            self._places.ctypes.data,
            cast(addressof(self._groups), POINTER(GroupFields)),
        )


def adapted_rows(
    adapters: Mapping[bytes, PackedAdapter], step: FlatStep, kept_tokens: Sequence[int]
) -> tuple[AdaptedRows, AdaptedRows] | None:
    """Return the adapted rows of a step and of its last layer; None if no row has an adapter.

    Args:
      adapters: all adapters, by digest.
      step: the step; its rows name their adapters.
      kept_tokens: tokens that the last layer computes, in order.
    """
    tokens_of = tokens_by_adapter(step)
    if not tokens_of:
        return None
    place_of = {token: place for place, token in enumerate(kept_tokens)}
    kept_of = {
        digest: [place_of[token] for token in tokens if token in place_of]
        for digest, tokens in tokens_of.items()
    }
    return (
        AdaptedRows(adapters, tokens_of, step.query_start_loc[-1]),
        AdaptedRows(adapters, kept_of, len(kept_tokens)),
    )
