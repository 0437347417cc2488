"""Tests of the KV pool: exported blocks can be imported unchanged, into other blocks and in another
order."""

from __future__ import annotations

import pytest
import torch

from engine.kv_pool import KVLayout, KVPool
from triolet.errors import ConfigError, RemoteProtocolError

from .driver import exported

CPU = torch.device("cpu")


def random_pool(dtype: torch.dtype, num_blocks: int = 6) -> KVPool:
    pool = KVPool(KVLayout(3, 4, 2, 8, dtype), num_blocks, CPU)
    pool.blocks.copy_(torch.randn(pool.blocks.shape))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_blocks_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    source, target = random_pool(dtype), random_pool(dtype)
    before = target.blocks.clone()
    payload = exported(source, [5, 1, 3])
    assert len(payload) == 3 * source.bytes_per_block == 3 * 3 * 2 * 4 * 2 * 8 * dtype.itemsize
    target.import_blocks([2, 4, 1], payload)
    assert torch.equal(target.blocks[[2, 4, 1]], source.blocks[[5, 1, 3]])
    assert torch.equal(target.blocks[[0, 3, 5]], before[[0, 3, 5]])


def test_an_exported_block_is_a_copy() -> None:
    pool = random_pool(torch.float32)
    payload = exported(pool, [2])
    expected = bytes(payload)
    pool.poison([2])
    assert bytes(payload) == expected
    assert pool.blocks[2].isnan().all()
    assert not pool.blocks[[0, 1, 3, 4, 5]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_into_a_poisoned_block_shows(dtype: torch.dtype) -> None:
    pool = KVPool(KVLayout(1, 2, 1, 4, dtype), 200, CPU)
    pool.poison(range(200))
    assert pool.count_spoiled(range(1, 200)) == 0
    pool.blocks[[3, 150], 0, 1, 1, 0, 2] = 0.0
    assert pool.count_spoiled(range(1, 200)) == 2
    assert pool.count_spoiled([3]) == 1
    assert pool.count_spoiled([]) == 0


def test_a_payload_that_is_not_aligned_is_taken() -> None:
    source, target = random_pool(torch.float32), random_pool(torch.float32)
    frame = memoryview(b"\0" + bytes(exported(source, [1])))[1:]
    target.import_blocks([1], frame)
    assert torch.equal(target.blocks[1], source.blocks[1])


@pytest.mark.parametrize("num_bytes", [0, 1, 1535, 1537, 3072])
def test_a_payload_of_another_size_is_refused_and_nothing_written(num_bytes: int) -> None:
    pool = random_pool(torch.float32)
    assert pool.bytes_per_block == 1536
    before = pool.blocks.clone()
    with pytest.raises(RemoteProtocolError, match="for 1 blocks of 1536"):
        pool.import_blocks([1], b"\x7f" * num_bytes)
    assert torch.equal(pool.blocks, before)


def test_more_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_pool_bytes is \d+, and cpu does not have that much"):
        KVPool(KVLayout(80, 16, 8, 128, torch.float32), 2**32, CPU)
