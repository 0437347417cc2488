"""Tests of the KV cache's tier in host memory: its size is bounded, and the oldest blocks are
evicted."""

from __future__ import annotations

import pytest

from engine.host_tier import HostTier


def block(number: int) -> bytes:
    return bytes([number]) * 8


def test_what_is_put_in_comes_out_once() -> None:
    tier: HostTier[str] = HostTier(20, 8)
    assert tier.max_blocks == 2
    assert tier.put("a", block(1)) is None
    assert tier.put("b", memoryview(block(2))) is None
    assert (len(tier), tier.used_bytes) == (2, 16)
    assert tier.take("a") == block(1)
    assert "a" not in tier
    with pytest.raises(KeyError):
        tier.take("a")
    assert tier.take("b") == block(2)
    assert tier.used_bytes == 0


def test_the_oldest_gives_way_and_its_slot_is_used_again() -> None:
    tier: HostTier[int] = HostTier(16, 8)
    gone = [tier.put(number, block(number)) for number in range(5)]
    assert gone == [None, None, 0, 1, 2]
    assert [tier.take(number) for number in (3, 4)] == [block(3), block(4)]


def test_a_tier_below_a_block_holds_nothing() -> None:
    tier: HostTier[str] = HostTier(7, 8)
    assert tier.put("a", block(1)) == "a"
    assert len(tier) == 0


def test_forgetting_twice_frees_one_slot() -> None:
    tier: HostTier[str] = HostTier(8, 8)
    tier.put("a", block(1))
    tier.drop("a")
    tier.drop("a")
    assert tier.put("b", block(2)) is None
    assert tier.put("c", block(3)) == "b"
