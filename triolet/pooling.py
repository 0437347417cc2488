"""Options for pooling an input's hidden states into one embedding vector, named as in
sentence-transformers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Pooling(StrEnum):
    """Which hidden states are used."""

    LAST = "last"  # of the last token, which has seen all others in a decoder
    MEAN = "mean"  # the average of all tokens
    FIRST = "first"  # of the first token
    MAX = "max"  # the largest of all tokens, in each dimension


@dataclass(frozen=True, slots=True)
class VectorForm:
    """The requested form of a vector.

    Attributes:
      pooling: how it is computed from the hidden states.
      dimensions: how many of its numbers are wanted; 0 for all.
      is_normalized: whether it is scaled to length 1 after truncation.
    """

    pooling: Pooling = Pooling.LAST
    dimensions: int = 0
    is_normalized: bool = True
