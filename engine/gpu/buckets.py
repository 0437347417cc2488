"""Batch sizes for which a decode step is captured as a CUDA graph. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL: Final = (1, 2, 4)
STEP: Final = 8
"""Distance between two sizes: at most seven rows of padding, which cost little because reading the
weights takes most of the time."""


def bucket_sizes(max_num_seqs: int, *, fixed: bool) -> tuple[int, ...]:
    """Return the sizes in ascending order.

    Args:
      max_num_seqs: most rows of a step; the largest size.
      fixed: return that size only, so that every step uses the same kernels.
    """
    if fixed:
        return (max_num_seqs,)
    sizes = {size for size in SMALL if size < max_num_seqs}
    sizes.update(range(STEP, max_num_seqs, STEP))
    return (*sorted(sizes), max_num_seqs)


def bucket_for(num_rows: int, sizes: Sequence[int]) -> int:
    """Return the smallest size that holds `num_rows`; one must exist."""
    return sizes[bisect_left(sizes, num_rows)]
