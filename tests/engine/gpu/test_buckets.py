"""Tests of batch buckets on the GPU: each batch size has one with little padding, and there are few
buckets."""

from __future__ import annotations

import pytest

from engine.gpu.buckets import bucket_for, bucket_sizes


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 7, 8, 9, 64, 100, 256])
def test_every_step_fits_into_a_size_that_wastes_little(max_num_seqs: int) -> None:
    sizes = bucket_sizes(max_num_seqs, fixed=False)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for num_rows in range(1, max_num_seqs + 1):
        assert num_rows <= bucket_for(num_rows, sizes) <= num_rows + 7


def test_a_fixed_batch_has_one_size() -> None:
    assert bucket_sizes(48, fixed=True) == (48,)
    assert bucket_for(1, (48,)) == 48
