"""The prefix cache: find cached KV blocks for the beginning of a new prompt.

Leases and the eviction of cached blocks are in block_ledger.py.

Full blocks form a tree: a node is one block, its parent is the block before it, and children are
found by their token ids (packed, four bytes each). The path to a node is the whole prefix, so a hit
compares every token id. Hash collisions cannot be forced, because Python hashes bytes with a random
key per process. The first level of the tree is the salt, so prompts with different salts never
share a node. Source: radix attention (SGLang, 2024) over the full blocks of PagedAttention (SOSP
'23).

An evicted node may stay in host memory, and a hit copies it back into a block of the pool. A node
in neither place is hollow; it is removed with its last child.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from triolet.fair_lru import ANYBODY, Keeper

from .block_ledger import SCRATCH_BLOCK

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from .block_ledger import BlockLedger
    from .host_tier import HostTier

TOKEN_BYTES: Final = 4


class BlockBytes(Protocol):
    """Copies blocks out of the pool and into it."""

    def export_blocks(self, block_ids: Sequence[int]) -> bytes | memoryview:
        """Return the bytes of blocks."""
        ...

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Overwrite blocks that no running step reads."""
        ...


@dataclass(slots=True, eq=False)
class Node:
    """One full block of some prefix.

    Attributes:
      parent: the block before it; None for the root.
      key: its packed tokens; on the first level, the salt.
      children: following blocks, by key.
      block: block of the pool; None if it is not in the pool.
      keeper: the tenant for which it is kept. All nodes below a salt must have the same tenant,
        because a lease has one salt and names blocks of one tenant.
    """

    parent: Node | None
    key: bytes
    children: dict[bytes, Node] = field(default_factory=dict)
    block: int | None = None
    keeper: Keeper = field(init=False)


@dataclass(slots=True)
class CacheCounts:
    """Counters of the cache.

    Attributes:
      queried_tokens: prompt tokens looked up.
      hit_tokens: prompt tokens with cached KV.
      evicted_blocks: cached blocks evicted from the pool.
      spilled_blocks: evicted blocks copied to host memory.
      restored_blocks: blocks copied back from host memory.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    spilled_blocks: int = 0
    restored_blocks: int = 0


class PrefixFrontier(NamedTuple):
    """The first missing block of a sequence: equal frontiers would compute the same block."""

    node: Node
    next_key: bytes


class Prospect(NamedTuple):
    """What the cache would provide for a sequence now.

    Attributes:
      num_cached_blocks: leading blocks in the cache.
      num_needed_blocks: available blocks that its lease would take.
      frontier: the first block that is missing; None if that is not a full block.
    """

    num_cached_blocks: int
    num_needed_blocks: int
    frontier: PrefixFrontier | None


class Leased(NamedTuple):
    """A lease that starts with cached blocks.

    Attributes:
      blocks: all blocks, in sequence order.
      num_cached_blocks: leading blocks with final KV, which must not be written.
    """

    blocks: list[int]
    num_cached_blocks: int


class PrefixCache:
    """Index of the kept blocks of one pool.

    Args:
      ledger: leases of blocks.
      block_size: tokens per block.
      pool: moves bytes to and from host memory.
      host: where evicted blocks go; None to drop them.
      keeps_completions: whether the KV of a completion has the same bits as that of a prompt with
        the same tokens; if not, only prompts are kept.
      is_enabled: False disables the cache.

    Attributes:
      ledger: leases of blocks.
      counts: counters.
      keeps_completions: whether completions are kept.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        block_size: int,
        pool: BlockBytes,
        *,
        host: HostTier[Node] | None = None,
        keeps_completions: bool = True,
        is_enabled: bool = True,
    ) -> None:
        self.counts = CacheCounts()
        self.keeps_completions = keeps_completions
        self.ledger = ledger
        self._key_bytes = TOKEN_BYTES * block_size
        self._pool = pool
        self._host = host
        self._is_enabled = is_enabled
        self._top = Node(None, b"")
        self._nodes: dict[int, Node] = {}
        ledger.on_evict = self._evicted

    @property
    def host_bytes(self) -> int:
        """Bytes of evicted blocks in host memory."""
        return 0 if self._host is None else self._host.used_bytes

    def prospect(self, tokens: bytes, salt: bytes, num_blocks: int) -> Prospect:
        """Return what a sequence would find, without changing anything.

        Args:
          tokens: the prompt, packed.
          salt: the request's cache salt.
          num_blocks: blocks of its lease.
        """
        path = self._find(tokens, salt)
        leased = sum(
            node.block is not None and self.ledger.num_leases_of(node.block) > 0 for node in path
        )
        return Prospect(len(path), num_blocks - leased, self._frontier(tokens, salt, path))

    def lease(self, owner: Hashable, tokens: bytes, salt: bytes, num_blocks: int) -> Leased:
        """Open a lease that shares the cached blocks of a prompt's beginning.

        A shared block never holds the prompt's last token: a step must compute it to get logits.

        Args:
          owner: owner of the lease.
          tokens: the prompt, packed.
          salt: the request's cache salt.
          num_blocks: blocks of the lease, including shared ones.

        Raises:
          CapacityError: fewer blocks are available; nothing has changed.
          LeaseError: the owner already has a lease.
        """
        path = self._find(tokens, salt)
        shared = [node.block for node in path if node.block is not None]
        returning = path[len(shared) :]
        self.ledger.check_lease(owner, num_blocks - len(shared), shared)
        payloads = [self._host.take(node) for node in returning] if self._host else []
        for node in returning:
            node.block = SCRATCH_BLOCK  # not hollow while blocks are evicted for it
        blocks = self.ledger.lease(owner, num_blocks - len(shared), shared)
        for node, block, payload in zip(
            returning, blocks[len(shared) : len(path)], payloads, strict=True
        ):
            self._pool.import_blocks([block], payload)
            self._settle(node, block, node.keeper)
        self.counts.restored_blocks += len(returning)
        self.counts.queried_tokens += len(tokens) // TOKEN_BYTES
        self.counts.hit_tokens += len(path) * self._key_bytes // TOKEN_BYTES
        return Leased(blocks, len(path))

    def insert(
        self, tokens: bytes, salt: bytes, blocks: Sequence[int], keeper: Keeper = ANYBODY
    ) -> None:
        """Record that leased blocks hold the final KV of a sequence's beginning.

        Blocks already in the cache stay; a second copy is freed with its lease.

        Args:
          tokens: tokens of the sequence, packed; at least those of the blocks.
          salt: the request's cache salt.
          blocks: the sequence's leading blocks, all full.
          keeper: the salt's tenant, with its current share.
        """
        if not (self._is_enabled and blocks):
            return
        is_known = salt in self._top.children
        node = self._child(self._top, salt)
        if is_known and keeper.tenant != node.keeper.tenant:
            keeper = Keeper(node.keeper.tenant, keeper.share)
        node.keeper = keeper
        for block, key in zip(blocks, self._keys(tokens), strict=False):
            node = self._child(node, key)
            if node.block is None:
                if self._host is not None:
                    self._host.drop(node)
                self._settle(node, block, keeper)

    def check_invariants(self) -> None:
        """Assert that tree, pool and host memory agree, and that the ledger is consistent."""
        self.ledger.check_invariants()
        assert self.ledger.kept.keys() == self._nodes.keys(), "kept and indexed blocks differ"
        num_spilled = 0
        found: set[int] = set()
        for node in _descendants(self._top):
            assert node.parent is not None, "a root is indexed as a block"
            assert node.parent.children[node.key] is node, "a node is not its parent's child"
            is_spilled = self._host is not None and node in self._host
            assert node.block is None or not is_spilled, "a block is in two places"
            is_hollow = node.block is None and not is_spilled
            assert node.children or not is_hollow, "a hollow node has no children"
            num_spilled += is_spilled
            if node.block is not None:
                assert self._nodes[node.block] is node, "a block is indexed for another node"
                found.add(node.block)
        assert found == set(self._nodes), "a kept block is not in the tree"
        assert self._host is None or num_spilled == len(self._host), "a host slot is lost"

    def _keys(self, tokens: bytes) -> Iterator[bytes]:
        """Yield the packed tokens of each full block."""
        size = self._key_bytes
        return (tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size))

    def _find(self, tokens: bytes, salt: bytes) -> list[Node]:
        """Return the nodes of leading blocks in the pool, then of those in host memory. None of
        them holds the last token."""
        path: list[Node] = []
        node = self._top.children.get(salt)
        if node is None:
            return path
        is_spilled = False
        for key in self._keys(tokens[:-TOKEN_BYTES]):
            node = node.children.get(key)
            if node is None:
                break
            if node.block is None:
                if self._host is None or node not in self._host:
                    break
                is_spilled = True
            elif is_spilled:
                break  # a lease's new blocks come after the shared ones
            path.append(node)
        return path

    def _frontier(self, tokens: bytes, salt: bytes, path: list[Node]) -> PrefixFrontier | None:
        start = len(path) * self._key_bytes
        next_key = tokens[start : start + self._key_bytes]
        if len(next_key) < self._key_bytes or not self._is_enabled:
            return None
        if path:
            return PrefixFrontier(path[-1], next_key)
        root = self._top.children.get(salt)
        return (
            PrefixFrontier(self._top, salt + next_key)
            if root is None
            else PrefixFrontier(root, next_key)
        )

    @staticmethod
    def _child(node: Node, key: bytes) -> Node:
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key)
        return child

    def _settle(self, node: Node, block: int, keeper: Keeper) -> None:
        node.block = block
        node.keeper = keeper
        self._nodes[block] = node
        self.ledger.keep(block, keeper)

    def _evicted(self, block: int) -> None:
        """Handle the eviction of a cached block: move it to host memory or drop it."""
        node = self._nodes.pop(block)
        node.block = None
        self.counts.evicted_blocks += 1
        if self._host is None:
            self._prune(node)
            return
        gone = self._host.put(node, self._pool.export_blocks([block]), node.keeper)
        self.counts.spilled_blocks += gone is not node
        if gone is not None:
            self._prune(gone)

    def _prune(self, node: Node) -> None:
        """Remove a hollow node without children, and its parents that become such nodes."""
        while node.parent is not None and not node.children and self._is_hollow(node):
            del node.parent.children[node.key]
            node = node.parent

    def _is_hollow(self, node: Node) -> bool:
        return node.block is None and (self._host is None or node not in self._host)


def _descendants(top: Node) -> Iterator[Node]:
    pending = list(top.children.values())
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())
