"""How the hidden states of an input become one vector; in the words of sentence-transformers.

Knows names and what may be asked for; computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Pooling(StrEnum):
    """Which hidden states count."""

    LAST = "last"  # of the last token, which has seen all others in a decoder
    MEAN = "mean"  # the average of all tokens
    FIRST = "first"  # of the first token
    MAX = "max"  # the largest of all tokens, in each dimension


@dataclass(frozen=True, slots=True)
class VectorForm:
    """What a vector is to be like.

    Attributes:
      pooling: how it comes out of the hidden states.
      dimensions: how many of its numbers are wanted; 0 for all.
      is_normalized: whether it is scaled to length 1, after it was cut.
    """

    pooling: Pooling = Pooling.LAST
    dimensions: int = 0
    is_normalized: bool = True
