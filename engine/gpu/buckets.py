"""Sizes of batches for which a decode step is captured once and replayed ever after. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL: Final = (1, 2, 4)
STEP: Final = 8
"""Between two sizes: at most seven rows of padding, which cost hardly anything where the weights
are what takes time."""


def bucket_sizes(max_num_seqs: int, *, fixed: bool) -> tuple[int, ...]:
    """Return the sizes, rising.

    Args:
      max_num_seqs: most rows of a step; the largest size.
      fixed: only that size. Every step then goes through the same kernels, whatever else is in it.
    """
    if fixed:
        return (max_num_seqs,)
    sizes = {size for size in SMALL if size < max_num_seqs}
    sizes.update(range(STEP, max_num_seqs, STEP))
    return (*sorted(sizes), max_num_seqs)


def bucket_for(num_rows: int, sizes: Sequence[int]) -> int:
    """Return the smallest size that holds so many rows; there must be one."""
    return sizes[bisect_left(sizes, num_rows)]
