"""Merkle tree of RFC 6962: leaf and node hashes, roots and inclusion proofs.

Our own implementation, because it needs O(log n) memory: the log keeps only the right border of the
tree, and proofs are computed from a stream of leaves. `pymerkle` stores the whole tree.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LEAF: Final = b"\0"
NODE: Final = b"\1"
"""Prefixes that distinguish leaves from nodes (RFC 6962, 2.1)."""
EMPTY_ROOT: Final = sha256().digest()


def leaf_hash(content: bytes) -> bytes:
    """Return the hash of an entry."""
    return sha256(LEAF + content).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of two subtrees."""
    return sha256(NODE + left + right).digest()


class Frontier:
    """The right border of a growing tree: the roots of its complete subtrees, largest first.

    Attributes:
      size: number of leaves.
      peaks: one root for each set bit of `size`.
    """

    def __init__(self, size: int = 0, peaks: Sequence[bytes] = ()) -> None:
        if size < 0 or len(peaks) != size.bit_count():
            raise ValueError(f"{len(peaks)} peaks are not the frontier of {size} leaves")
        self.size = size
        self.peaks = list(peaks)

    def push(self, leaf: bytes) -> None:
        """Add a leaf by its hash."""
        node, level = leaf, self.size
        while level & 1:
            node = sha256(NODE + self.peaks.pop() + node).digest()
            level >>= 1
        self.peaks.append(node)
        self.size += 1

    def root(self) -> bytes:
        """Return the root hash of the whole tree."""
        if not self.peaks:
            return EMPTY_ROOT
        *others, node = self.peaks
        for peak in reversed(others):
            node = node_hash(peak, node)
        return node

    def copy(self) -> Frontier:
        """Return an independent copy."""
        return Frontier(self.size, self.peaks)


def sibling_ranges(index: int, size: int) -> list[tuple[int, int]]:
    """Return the sibling subtrees on the path from a leaf to the root, the leaf's sibling first.

    Args:
      index: index of the leaf.
      size: number of leaves.

    Returns:
      Ranges [first, end) of leaves, which together with the leaf cover the whole tree.
    """
    if not 0 <= index < size:
        raise ValueError(f"a tree of {size} leaves has no leaf {index}")
    first, end, ranges = 0, size, []
    while end - first > 1:
        middle = first + (1 << (end - first - 1).bit_length() - 1)
        if index < middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((first, middle))
            first = middle
    return ranges[::-1]


def root_of_path(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """Return the root computed from a leaf and its audit path."""
    ranges = sibling_ranges(index, size)
    if len(ranges) != len(path):
        raise ValueError(f"the path has {len(path)} hashes, but needs {len(ranges)}")
    node = leaf
    for (first, _), sibling in zip(ranges, path, strict=True):
        node = node_hash(sibling, node) if first <= index else node_hash(node, sibling)
    return node


def inclusion_path(leaves: Iterable[bytes], index: int, size: int) -> list[bytes]:
    """Return the audit path of a leaf (RFC 6962, 2.1.1).

    Args:
      leaves: hashes of at least `size` leaves, in order; further ones are not read.
      index: index of the leaf.
      size: number of leaves.
    """
    ranges = sibling_ranges(index, size)
    own = (index, index + 1)
    roots: dict[tuple[int, int], bytes] = {}
    stream = iter(leaves)
    position = 0
    for first, end in sorted([*ranges, own]):
        subtree = Frontier()
        for leaf in stream:
            if position >= first:
                subtree.push(leaf)
            position += 1
            if position == end:
                break
        if position < end:
            raise ValueError(f"only {position} of {size} leaves exist")
        roots[first, end] = subtree.root()
    return [roots[one] for one in ranges]
