"""Which kept block holds the KV of which tokens: found again by prompts that begin with the same
ones.

Knows token ids (packed, four bytes each), salts and block numbers; knows no tensors, requests or
time. Leases, and the eviction of cached blocks, are the ledger's (block_ledger.py).

Full blocks form a tree: a node is one block, its parent the block before it, its children are found
by the very tokens that they hold. The path to a node is the whole prefix, so a hit compares every
token id, and no hash can be made to collide: Python hashes bytes with a key of its own for each
process. The first level of the tree are the salts, so that a prompt with another one never meets
the same node. Source: radix attention (SGLang, 2024) over the full blocks of PagedAttention (SOSP
'23).

An evicted node may live on in host memory, from where a hit brings it back into a block of the
pool. One that is in neither place is hollow; it is forgotten with its last child.
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
        """Return the bytes of some blocks."""
        ...

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Overwrite blocks that no running step reads."""
        ...


@dataclass(slots=True, eq=False)
class Node:
    """One full block of some prefix.

    Attributes:
      parent: the block before it; None above all salts.
      key: its tokens, packed; of a first level's node its salt.
      children: what follows, by key.
      block: of the pool, None if it holds none.
      keeper: the tenant for which it is kept, once it has been. Below one salt there is one tenant
        only, without exception: a lease, which is of one salt, names blocks of one tenant.
    """

    parent: Node | None
    key: bytes
    children: dict[bytes, Node] = field(default_factory=dict)
    block: int | None = None
    keeper: Keeper = field(init=False)


@dataclass(slots=True)
class CacheCounts:
    """What the cache has done so far. Only rises.

    Attributes:
      queried_tokens: of sequences that began.
      hit_tokens: of these, whose KV was there.
      evicted_blocks: cached blocks that gave way to others.
      spilled_blocks: of these, whose bytes went to host memory.
      restored_blocks: brought back from there.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    spilled_blocks: int = 0
    restored_blocks: int = 0


class PrefixFrontier(NamedTuple):
    """Where a sequence leaves the tree: two that do so at one place will compute the same block."""

    node: Node
    next_key: bytes


class Prospect(NamedTuple):
    """What the cache would do for a sequence if it began now.

    Attributes:
      num_cached_blocks: leading blocks that are there.
      num_needed_blocks: what its lease takes of the blocks that are available.
      frontier: the first block that is not there; None if that is not a full one.
    """

    num_cached_blocks: int
    num_needed_blocks: int
    frontier: PrefixFrontier | None


class Leased(NamedTuple):
    """A lease that begins with what the cache had.

    Attributes:
      blocks: all of them, in sequence order.
      num_cached_blocks: leading ones whose KV is final and that no attempt may write.
    """

    blocks: list[int]
    num_cached_blocks: int


class PrefixCache:
    """What is in the kept blocks of one pool.

    Args:
      ledger: the leases of blocks.
      block_size: tokens per block.
      pool: moves bytes to and from host memory.
      host: where evicted blocks go; None to forget them.
      keeps_completions: whether KV of completions is what a prompt with the same tokens would get,
        bit for bit; if not, only prompts are kept.
      is_enabled: False keeps and finds nothing.

    Attributes:
      ledger: the leases of blocks.
      counts: what it has done.
      keeps_completions: as above.
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
        """Host memory that evicted blocks occupy."""
        return 0 if self._host is None else self._host.used_bytes

    def prospect(self, tokens: bytes, salt: bytes, num_blocks: int) -> Prospect:
        """Return what a sequence of `num_blocks` blocks would find. Changes nothing.

        Args:
          tokens: the prompt, packed.
          salt: of the cache.
          num_blocks: of its lease.
        """
        path = self._find(tokens, salt)
        leased = sum(
            node.block is not None and self.ledger.num_leases_of(node.block) > 0 for node in path
        )
        return Prospect(len(path), num_blocks - leased, self._frontier(tokens, salt, path))

    def lease(self, owner: Hashable, tokens: bytes, salt: bytes, num_blocks: int) -> Leased:
        """Open a lease that shares the blocks which hold the beginning of a prompt.

        The prompt's last token is never among what is found: a step has to compute what follows
        it.

        Args:
          owner: of the lease.
          tokens: the prompt, packed.
          salt: of the cache.
          num_blocks: of the lease, shared ones included.

        Raises:
          CapacityError: fewer blocks are available; nothing has changed.
          LeaseError: the owner has a lease already.
        """
        path = self._find(tokens, salt)
        shared = [node.block for node in path if node.block is not None]
        returning = path[len(shared) :]
        self.ledger.check_lease(owner, num_blocks - len(shared), shared)
        payloads = [self._host.take(node) for node in returning] if self._host else []
        for node in returning:
            node.block = SCRATCH_BLOCK  # not hollow, while others are pushed out for it
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
        """Note that some leased blocks hold the final KV of the beginning of a sequence.

        What is known already stays where it is: a second copy is freed with its lease.

        Args:
          tokens: of the sequence, packed; at least those of the blocks.
          salt: of the cache.
          blocks: its leading blocks, all of them full.
          keeper: of that salt; its share counts from now on.
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
        """Assert that tree, pool and host memory agree, and the ledger with itself."""
        self.ledger.check_invariants()
        assert self.ledger.kept.keys() == self._nodes.keys(), "kept blocks and known KV differ"
        num_spilled = 0
        found: set[int] = set()
        for node in _descendants(self._top):
            assert node.parent is not None, "a node above all salts has a parent"
            assert node.parent.children[node.key] is node, "a node is not its parent's child"
            is_spilled = self._host is not None and node in self._host
            assert node.block is None or not is_spilled, "a block is in two places"
            is_hollow = node.block is None and not is_spilled
            assert node.children or not is_hollow, "a hollow node leads nowhere"
            num_spilled += is_spilled
            if node.block is not None:
                assert self._nodes[node.block] is node, "a block is known as another's"
                found.add(node.block)
        assert found == set(self._nodes), "a kept block cannot be found any more"
        assert self._host is None or num_spilled == len(self._host), "host memory is lost"

    def _keys(self, tokens: bytes) -> Iterator[bytes]:
        """Yield the packed tokens of each full block."""
        size = self._key_bytes
        return (tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size))

    def _find(self, tokens: bytes, salt: bytes) -> list[Node]:
        """Return the nodes of the leading blocks that are in the pool, then of those that are in
        host memory; none of them holds the last token."""
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
                break  # a lease's own blocks come after the shared ones
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
        """The ledger takes a cached block for another lease."""
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
        """Forget a node that is hollow and has no children, and parents that become so by that."""
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
