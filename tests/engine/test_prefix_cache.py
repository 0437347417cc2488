"""Tests of the prefix cache: it finds KV by tokens and salt only, evicts fairly by tenant, and
never mixes up blocks."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.block_ledger import BlockLedger
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache, Prospect
from triolet.errors import CapacityError
from triolet.fair_lru import ANYBODY, Keeper

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from engine.prefix_cache import Node

BLOCK_SIZE = 4
BYTES = 4 * BLOCK_SIZE
NOBODYS = bytes(BYTES)


def pack(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


class Pool:
    """A pool that stores in each block the tokens that it holds KV for."""

    def __init__(self, num_blocks: int, host_blocks: int = 0, **switches: bool) -> None:
        self.memory = [NOBODYS] * (num_blocks + 1)
        self.ledger = BlockLedger(num_blocks + 1)
        host: HostTier[Node] = HostTier(host_blocks * BYTES, BYTES)
        self.cache = PrefixCache(
            self.ledger, BLOCK_SIZE, self, host=host if host_blocks else None, **switches
        )

    def export_blocks(self, block_ids: Sequence[int]) -> bytes:
        return b"".join(self.memory[block] for block in block_ids)

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        [block] = block_ids
        self.memory[block] = bytes(payload)

    def begin(
        self,
        owner: Hashable,
        tokens: Sequence[int],
        salt: bytes = b"",
        keeper: Keeper = ANYBODY,
    ) -> int:
        """Lease blocks for a prompt and compute missing ones. Return the number of cached
        tokens."""
        packed = pack(tokens)
        blocks, num_cached = self.cache.lease(owner, packed, salt, -(-len(tokens) // BLOCK_SIZE))
        for index, block in enumerate(blocks):
            wanted = packed[index * BYTES : (index + 1) * BYTES]
            if index < num_cached:
                assert self.memory[block] == wanted, "another sequence's KV"
            else:
                self.memory[block] = wanted
        self.cache.insert(packed, salt, blocks[: len(tokens) // BLOCK_SIZE], keeper)
        self.cache.check_invariants()
        return num_cached * BLOCK_SIZE

    def run(self, tokens: Sequence[int], salt: bytes = b"", keeper: Keeper = ANYBODY) -> int:
        """Begin and end a prompt. Return the number of cached tokens."""
        num_cached = self.begin("passing", tokens, salt, keeper)
        self.ledger.release("passing")
        self.cache.check_invariants()
        return num_cached


def test_whoever_begins_alike_finds_whole_blocks_but_never_its_last_token() -> None:
    pool = Pool(16)
    turn = list(range(10))
    assert pool.run(turn) == 0
    assert pool.run(turn) == 8
    assert pool.run([*turn, 50, 51, 52]) == 8
    assert pool.run(turn[:8]) == 4
    assert pool.run([*turn[:5], 99, 99, 99, 99]) == 4
    assert pool.run([99, *turn]) == 0
    counts = pool.cache.counts
    assert (counts.queried_tokens, counts.hit_tokens) == (10 + 10 + 13 + 8 + 9 + 11, 24)


def test_salts_share_nothing() -> None:
    pool = Pool(16)
    prompt = list(range(9))
    assert pool.run(prompt, b"one") == 0
    assert pool.run(prompt, b"two") == 0
    assert pool.run(prompt) == 0
    assert pool.run(prompt, b"one") == pool.run(prompt, b"two") == 8


def test_living_sequences_share_what_is_final() -> None:
    pool = Pool(8)
    assert pool.begin("a", range(9)) == 0
    assert pool.begin("b", range(9)) == 8
    assert pool.ledger.leased_blocks == 4
    assert pool.ledger.release("a") == 1
    assert pool.begin("c", range(9)) == 8


def test_the_same_block_computed_twice_is_kept_once() -> None:
    pool = Pool(8)
    packed = pack(range(8))
    for owner in ("a", "b"):
        pool.cache.lease(owner, packed, b"", 2)
    for owner in ("a", "b"):
        pool.cache.insert(packed, b"", pool.ledger.blocks_of(owner))
    pool.ledger.release("a")
    pool.ledger.release("b")
    pool.cache.check_invariants()
    assert (pool.ledger.cached_blocks, pool.ledger.free_blocks) == (2, 6)


def test_a_prospect_is_what_the_lease_then_does() -> None:
    pool = Pool(8)
    pool.run(range(9))
    pool.begin("a", range(5))
    prospect = pool.cache.prospect(pack(range(9)), b"", 3)
    assert (prospect.num_cached_blocks, prospect.num_needed_blocks) == (2, 2)
    before = pool.ledger.available_blocks
    pool.begin("b", range(9))
    assert before - pool.ledger.available_blocks == prospect.num_needed_blocks


def test_two_that_leave_the_tree_at_one_place_are_known_by_it() -> None:
    pool = Pool(8)
    pool.run(range(4))

    def frontier(tokens: Sequence[int], salt: bytes = b"") -> object:
        return pool.cache.prospect(pack(tokens), salt, 4).frontier

    assert frontier(range(9)) == frontier(range(12)) is not None
    assert frontier(range(9)) != frontier([*range(4), 9, 9, 9, 9, 9])
    assert frontier(range(9), b"other") != frontier(range(9))
    assert frontier([9, 9, 9, 9]) == frontier([9, 9, 9, 9], b"") is not None
    assert frontier(range(7)) is None


def test_cached_blocks_give_way_before_anybody_is_refused() -> None:
    pool = Pool(4)
    pool.run(range(16))
    assert pool.ledger.free_blocks == 0
    assert pool.run(range(100, 116)) == 0
    assert pool.cache.counts.evicted_blocks == 4
    pool.begin("a", range(200, 213))
    with pytest.raises(CapacityError):
        pool.cache.lease("b", pack([1]), b"", 1)
    pool.cache.check_invariants()


def test_the_end_of_a_prompt_gives_way_before_its_beginning() -> None:
    pool = Pool(4)
    pool.run(range(16))
    pool.run(range(100, 106))
    assert pool.run(range(16)) == 8


def test_evicted_blocks_come_back_from_host_memory() -> None:
    pool = Pool(4, host_blocks=4)
    pool.run(range(16))
    pool.run(range(100, 116))
    assert pool.cache.host_bytes == 4 * BYTES
    assert pool.run([*range(15), 99]) == 12
    counts = pool.cache.counts
    assert (counts.spilled_blocks, counts.restored_blocks) == (8, 3)


def test_a_refusal_leaves_host_memory_as_it_was() -> None:
    pool = Pool(4, host_blocks=4)
    pool.run(range(16))
    pool.begin("a", range(100, 116))
    with pytest.raises(CapacityError):
        pool.cache.lease("b", pack(range(16)), b"", 4)
    pool.cache.check_invariants()
    pool.ledger.release("a")
    assert pool.run(range(16)) == 12


def test_switched_off_it_keeps_and_finds_nothing() -> None:
    pool = Pool(8, is_enabled=False)
    assert pool.run(range(9)) == pool.run(range(9)) == 0
    assert pool.ledger.free_blocks == 8
    assert pool.cache.prospect(pack(range(9)), b"", 3) == Prospect(0, 3, None)


def test_what_is_forgotten_leaves_no_node_behind() -> None:
    pool = Pool(3)
    for number in range(40):
        pool.run(range(10 * number, 10 * number + 9), bytes([number]))
    assert len(pool.cache._top.children) == 1
    assert len(pool.cache._nodes) == pool.ledger.cached_blocks


@pytest.mark.parametrize(
    ("num_blocks", "length", "flood", "found", "restored_blocks"),
    [
        (16, 25, 16, 24, 0),
        # The whole pool is leased at once, so that the quiet tenant's blocks go to host memory.
        (8, 29, 32, 16, 4),
    ],
    ids=["pool", "host memory"],
)
def test_a_tenant_that_floods_pushes_out_its_own(
    num_blocks: int, length: int, flood: int, found: int, restored_blocks: int
) -> None:
    pool = Pool(num_blocks, host_blocks=8)
    quiet, loud = Keeper(b"quiet"), Keeper(b"loud")
    prompt = list(range(length))
    pool.run(prompt, b"q", quiet)
    for number in range(1, 30):
        assert pool.run(range(1000 * number, 1000 * number + flood), b"l", loud) == 0
    assert pool.cache.counts.restored_blocks == 0
    assert pool.run(prompt, b"q", quiet) == found
    assert pool.cache.counts.restored_blocks == restored_blocks


def test_room_that_nobody_else_wants_is_lent() -> None:
    pool = Pool(16)
    pool.run(range(61), b"l", Keeper(b"loud", 0.1))
    assert pool.run(range(61), b"l", Keeper(b"loud", 0.1)) == 60
    assert pool.ledger.cached.num_tenants == 1


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=22)
"""Few ids: most prompts begin like some other."""


class Prompts(RuleBasedStateMachine):
    """Random prompts in a pool that is too small for them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(9, host_blocks=3)
        self.running: list[int] = []
        self.next_owner = 0

    @rule(tokens=TOKENS, salt=st.sampled_from((b"", b"other", b"third")))
    def begin(self, tokens: list[int], salt: bytes) -> None:
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        num_blocks = -(-len(tokens) // BLOCK_SIZE)
        prospect = self.pool.cache.prospect(pack(tokens), salt, num_blocks)
        available = self.pool.ledger.available_blocks
        if prospect.num_needed_blocks > available:
            with pytest.raises(CapacityError):
                self.pool.cache.lease(owner, pack(tokens), salt, num_blocks)
            return
        keeper = Keeper(salt[:1], 0.3 if salt == b"third" else 1.0)
        assert (
            self.pool.begin(owner, tokens, salt, keeper) == prospect.num_cached_blocks * BLOCK_SIZE
        )
        assert available - self.pool.ledger.available_blocks == prospect.num_needed_blocks
        self.running.append(owner)

    @rule(index=st.integers(0, 8))
    def end(self, index: int) -> None:
        if self.running:
            self.pool.ledger.release(self.running.pop(index % len(self.running)))

    @invariant()
    def everything_agrees(self) -> None:
        self.pool.cache.check_invariants()


TestPrompts = pytest.mark.slow(Prompts.TestCase)
