"""Tests of the ledger of KV blocks: each block is free, leased or cached, and a refused call
changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.block_ledger import SCRATCH_BLOCK, BlockLedger
from triolet.errors import CapacityError, LeaseError

if TYPE_CHECKING:
    from collections.abc import Sequence


def counts(ledger: BlockLedger) -> tuple[int, int, int]:
    ledger.check_invariants()
    return ledger.free_blocks, ledger.leased_blocks, ledger.cached_blocks


def test_a_lease_may_be_given_finished_blocks_of_another_one_to_read() -> None:
    ledger = BlockLedger(10)
    origin = ledger.lease("origin", 3)
    own = ledger.lease("fork", 1)
    assert ledger.extend("fork", 1, origin[:2]) != origin[2:]
    assert ledger.blocks_of("fork")[:3] == (*origin[:2], *own)
    assert ledger.leased_blocks == 5
    assert ledger.release("origin") == 1, "two of its blocks are read by the fork"
    ledger.check_invariants()
    with pytest.raises(LeaseError, match="not valid KV"):
        ledger.extend("fork", 0, origin[2:])
    assert ledger.release("fork") == 4
    assert ledger.free_blocks == 9
    ledger.check_invariants()


def test_a_lease_takes_blocks_and_its_release_gives_them_back_once() -> None:
    ledger = BlockLedger(9)
    blocks = ledger.lease("a", 3)
    assert len(set(blocks)) == 3
    assert SCRATCH_BLOCK not in blocks
    assert ledger.blocks_of("a") == tuple(blocks)
    assert counts(ledger) == (5, 3, 0)
    assert blocks + ledger.extend("a", 2) == list(ledger.blocks_of("a"))
    assert ledger.release("a") == 5
    assert ledger.release("a") == 0
    assert not ledger.has_lease("a")
    assert counts(ledger) == (8, 0, 0)


def test_a_refusal_changes_nothing() -> None:
    ledger = BlockLedger(5)
    held = ledger.lease("a", 3)
    with pytest.raises(CapacityError, match="2 blocks requested, 1 available"):
        ledger.lease("b", 2)
    with pytest.raises(CapacityError):
        ledger.extend("a", 2)
    with pytest.raises(LeaseError, match="a already has a lease"):
        ledger.lease("a", 1)
    with pytest.raises(LeaseError, match="b has no lease"):
        ledger.extend("b", 1)
    with pytest.raises(LeaseError):
        ledger.blocks_of("b")
    with pytest.raises(LeaseError, match="cannot be shared"):
        ledger.lease("b", 0, shared=[next(iter({1, 2, 3, 4} - set(held)))])
    assert ledger.blocks_of("a") == tuple(held)
    assert ledger.num_leases == 1
    assert counts(ledger) == (1, 3, 0)


class Marks:
    """Marked blocks; a test spoils a block by removing it.

    Attributes:
      marked: the blocks.
    """

    def __init__(self) -> None:
        self.marked: set[int] = set()

    def poison(self, block_ids: Sequence[int]) -> None:
        self.marked.update(block_ids)

    def count_spoiled(self, block_ids: Sequence[int]) -> int:
        return len(set(block_ids) - self.marked)


def test_free_blocks_are_poisoned_and_their_owners_may_write() -> None:
    marks = Marks()
    ledger = BlockLedger(6, poison=marks)
    assert ledger.num_spoiled == 0
    kept, written = ledger.lease("a", 2)
    marks.marked -= {kept, written}
    assert ledger.num_spoiled == 0
    ledger.keep(kept)
    ledger.release("a")
    assert ledger.num_spoiled == 0
    assert written in marks.marked
    assert kept not in marks.marked
    marks.marked.remove(written)
    assert ledger.num_spoiled == 1
    assert BlockLedger(6).num_spoiled is None


def test_references_count_a_shared_block_for_each_lease() -> None:
    ledger = BlockLedger(9)
    shared = ledger.lease("a", 3)
    ledger.lease("b", 1, shared=shared)
    assert (ledger.num_references, ledger.leased_blocks) == (7, 4)
    ledger.release("a")
    assert (ledger.num_references, ledger.leased_blocks) == (4, 4)


def test_a_pool_of_scratch_alone_is_refused() -> None:
    with pytest.raises(CapacityError):
        BlockLedger(1)


def test_a_freed_block_is_reused_as_late_as_possible() -> None:
    ledger = BlockLedger(4)
    [first] = ledger.lease("a", 1)
    ledger.release("a")
    assert ledger.lease("b", 3)[-1] == first


def test_a_shared_block_is_free_when_its_last_lease_ends() -> None:
    ledger = BlockLedger(5)
    prefix = ledger.lease("a", 2)
    assert ledger.lease("b", 1, shared=prefix)[:2] == prefix
    assert counts(ledger) == (1, 3, 0)
    assert ledger.release("a") == 0
    assert ledger.release("b") == 3
    assert counts(ledger) == (4, 0, 0)


def watched(num_blocks: int) -> tuple[BlockLedger, list[int]]:
    """Return a ledger and the list of blocks that it evicts."""
    evicted: list[int] = []
    ledger = BlockLedger(num_blocks)
    ledger.on_evict = evicted.append
    return ledger, evicted


def test_cached_blocks_are_revived_or_pushed_out_the_end_of_a_sequence_first() -> None:
    ledger, evicted = watched(5)
    first, last = ledger.lease("a", 2)
    ledger.keep(first)
    ledger.keep(last)
    assert ledger.release("a") == 2
    assert counts(ledger) == (2, 0, 2)
    assert ledger.available_blocks == 4
    assert ledger.lease("b", 0, shared=[first]) == [first]
    assert counts(ledger) == (2, 1, 1)
    with pytest.raises(CapacityError):
        ledger.lease("c", 3, shared=[last])
    assert ledger.lease("c", 3)[-1] == last
    assert evicted == [last]
    assert counts(ledger) == (0, 4, 0)
    assert set(ledger.kept) == {first}


def test_what_was_used_last_is_pushed_out_last() -> None:
    ledger, evicted = watched(4)
    for owner in ("a", "b", "c"):
        [block] = ledger.lease(owner, 1)
        ledger.keep(block)
        ledger.release(owner)
    [of_a, of_b, of_c] = sorted(ledger.kept)
    ledger.lease("reader", 0, shared=[of_a])
    ledger.release("reader")
    ledger.lease("d", 3)
    assert evicted == [of_b, of_c, of_a]


def test_only_a_leased_block_can_be_vouched_for() -> None:
    ledger = BlockLedger(4)
    with pytest.raises(LeaseError, match="not leased"):
        ledger.keep(2)
    assert counts(ledger) == (3, 0, 0)


def test_what_leases_share_comes_back_with_the_last_of_them() -> None:
    ledger = BlockLedger(9)
    shared = ledger.lease("a", 2)
    ledger.lease("b", 1, shared=shared)
    ledger.extend("a", 1)
    assert ledger.num_only_of(["a"]) == 1
    assert ledger.num_only_of(["b"]) == 1
    assert ledger.num_only_of(["a", "b"]) == 4
    assert ledger.num_only_of(["nobody"]) == 0
    assert [ledger.num_leases_of(block) for block in (*shared, 8)] == [2, 2, 0]


class Owners(RuleBasedStateMachine):
    """Random leases, extensions, shares and releases."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(12)
        self.ledger.on_evict = self.evict
        self.held: dict[int, list[int]] = {}
        self.next_owner = 0

    def evict(self, block: int) -> None:
        assert all(block not in blocks for blocks in self.held.values()), "it is leased"
        assert not self.ledger.free_blocks, "a cached block gave way although there was a free one"

    @rule(target=leases, num_blocks=st.integers(0, 6), num_shared=st.integers(0, 4))
    def lease(self, num_blocks: int, num_shared: int) -> int:
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        candidates = sorted({block for blocks in self.held.values() for block in blocks})
        shared = candidates[:num_shared]
        if num_blocks > self.ledger.available_blocks:
            with pytest.raises(CapacityError):
                self.ledger.lease(owner, num_blocks, shared)
            return owner
        blocks = self.ledger.lease(owner, num_blocks, shared)
        assert blocks[: len(shared)] == shared
        assert not set(blocks[len(shared) :]) & set(candidates), "a leased block was leased again"
        self.held[owner] = blocks
        return owner

    @rule(owner=leases, num_blocks=st.integers(0, 4))
    def extend(self, owner: int, num_blocks: int) -> None:
        if owner not in self.held:
            with pytest.raises(LeaseError):
                self.ledger.extend(owner, num_blocks)
            return
        if num_blocks > self.ledger.available_blocks:
            with pytest.raises(CapacityError):
                self.ledger.extend(owner, num_blocks)
            return
        added = self.ledger.extend(owner, num_blocks)
        others = {block for blocks in self.held.values() for block in blocks}
        assert not set(added) & others
        self.held[owner] = self.held[owner] + added

    @rule(owner=consumes(leases), keep=st.sets(st.integers(1, 11)))
    def release(self, owner: int, keep: set[int]) -> None:
        own = set(self.held.pop(owner, []))
        others = {block for blocks in self.held.values() for block in blocks}
        for block in own & keep:
            self.ledger.keep(block)
        assert self.ledger.num_only_of([owner]) == len(own - others)
        assert self.ledger.release(owner) == len(own - others)
        assert self.ledger.release(owner) == 0

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.ledger.check_invariants()
        leased = {block for blocks in self.held.values() for block in blocks}
        assert self.ledger.leased_blocks == len(leased)
        assert self.ledger.num_leases == len(self.held)
        total = self.ledger.free_blocks + self.ledger.leased_blocks + self.ledger.cached_blocks
        assert total == self.ledger.total_blocks == 11


TestOwners = pytest.mark.slow(Owners.TestCase)
