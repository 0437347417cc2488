"""Pool the hidden states of one input into its embedding vector, chunk by chunk.

Sums are double precision, so that a vector does not depend on how the input was chunked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import numpy as np

from triolet.pooling import Pooling

if TYPE_CHECKING:
    import numpy.typing as npt

    from triolet.pooling import VectorForm

LEAST_NORM = 1e-12
"""Vectors with a smaller norm are not normalised; torch has the same bound."""


class Pool:
    """Collects hidden states on the device thread and returns the vector when all have arrived.

    Args:
      form: pooling, dimensions and normalisation of the vector.
      num_tokens: length of the input.
    """

    def __init__(self, form: VectorForm, num_tokens: int) -> None:
        self._form = form
        self._num_tokens = num_tokens
        self._value: npt.NDArray[np.float64] | None = None

    def wanted(self, start: int, end: int) -> range:
        """Return the positions of a chunk that are pooled."""
        match self._form.pooling:
            case Pooling.LAST:
                return range(max(start, self._num_tokens - 1), end)
            case Pooling.FIRST:
                return range(start, min(end, 1))
            case Pooling.MEAN | Pooling.MAX:
                return range(start, end)
            case _ as never:
                assert_never(never)

    def add(self, hidden: npt.NDArray[np.float32]) -> None:
        """Add the hidden states [n, hidden_size] of a chunk's wanted positions."""
        if not len(hidden):
            return
        if self._form.pooling is Pooling.MAX:
            part = hidden.max(axis=0).astype(np.float64)
            self._value = part if self._value is None else np.maximum(self._value, part)
        else:
            part = hidden.sum(axis=0, dtype=np.float64)
            self._value = part if self._value is None else self._value + part

    def vector(self) -> bytes:
        """Return the vector as little-endian fp32 [dimensions]."""
        assert self._value is not None, "the hidden states are incomplete"
        value = self._value
        if self._form.pooling is Pooling.MEAN:
            value = value / self._num_tokens
        if self._form.dimensions:
            value = value[: self._form.dimensions]
        if self._form.is_normalized:
            value = value / max(float(np.linalg.norm(value)), LEAST_NORM)
        return value.astype("<f4").tobytes()
