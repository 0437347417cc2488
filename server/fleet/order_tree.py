"""Keys in order, and the sum of what stands before any of them.

Pure. A B-tree whose nodes hold the sums of their children: finding the first, putting in, taking
out and summing up each touch one node per level, three of them for a hundred thousand keys. Knows
neither what the keys nor what the amounts mean.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST: Final = 64
"""Keys in a leaf, children of a node: moved and summed in C, within a microsecond."""

K = TypeVar("K", bound=tuple[float, ...])


class _Leaf(Generic[K]):
    __slots__ = ("amounts", "keys")

    def __init__(self, keys: list[K], amounts: list[int]) -> None:
        self.keys = keys
        self.amounts = amounts

    def split(self) -> tuple[K, _Leaf[K]]:
        """Give away the upper half; return the last key that stays, and the half."""
        half = len(self.keys) // 2
        upper = _Leaf(self.keys[half:], self.amounts[half:])
        del self.keys[half:], self.amounts[half:]
        return self.keys[-1], upper


class _Inner(Generic[K]):
    """Children and the amount of each. `bounds[i]` is no less than any key of child i, and less
    than every key of child i + 1."""

    __slots__ = ("amounts", "bounds", "children")

    def __init__(self, bounds: list[K], children: list[_Node[K]], amounts: list[int]) -> None:
        self.bounds = bounds
        self.children = children
        self.amounts = amounts

    def split(self) -> tuple[K, _Inner[K]]:
        """Give away the upper half; return the bound of what stays, and the half."""
        half = len(self.children) // 2
        bound = self.bounds[half - 1]
        upper = _Inner(self.bounds[half:], self.children[half:], self.amounts[half:])
        del self.bounds[half - 1 :], self.children[half:], self.amounts[half:]
        return bound, upper


_Node: TypeAlias = "_Leaf[K] | _Inner[K]"


class OrderTree(Generic[K]):
    """Keys, each once and each with an amount.

    Attributes:
      amount: of all keys.
    """

    def __init__(self) -> None:
        self.amount = 0
        self._root: _Node[K] = _Leaf([], [])
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        """Go through the keys in order; nothing may change meanwhile."""
        return _keys(self._root)

    @property
    def depth(self) -> int:
        """Levels of nodes."""
        depth, node = 1, self._root
        while isinstance(node, _Inner):
            depth, node = depth + 1, node.children[0]
        return depth

    def first(self) -> K:
        """Return the least key. There must be one."""
        node = self._root
        while isinstance(node, _Inner):
            node = node.children[0]
        return node.keys[0]

    def add(self, key: K, amount: int) -> None:
        """Put in a key that is not there."""
        self.amount += amount
        self._count += 1
        path: list[tuple[_Inner[K], int]] = []
        node = self._root
        while isinstance(node, _Inner):
            at = bisect_left(node.bounds, key)
            node.amounts[at] += amount
            path.append((node, at))
            node = node.children[at]
        at = bisect_left(node.keys, key)
        node.keys.insert(at, key)
        node.amounts.insert(at, amount)
        if len(node.keys) > MOST:
            self._split(node, path)

    def remove(self, key: K) -> None:
        """Take out a key that is there."""
        path: list[tuple[_Inner[K], int]] = []
        node = self._root
        while isinstance(node, _Inner):
            at = bisect_left(node.bounds, key)
            path.append((node, at))
            node = node.children[at]
        at = bisect_left(node.keys, key)
        assert node.keys[at] == key, "only what is there can be taken out"
        del node.keys[at]
        amount = node.amounts.pop(at)
        self.amount -= amount
        self._count -= 1
        for parent, child in path:
            parent.amounts[child] -= amount
        if not node.keys:
            self._prune(path)

    def amount_before(self, key: tuple[float, ...]) -> int:
        """Return the amount of all keys less than this one, which need not be there."""
        amount = 0
        node = self._root
        while isinstance(node, _Inner):
            at = bisect_left(node.bounds, key)
            amount += sum(node.amounts[:at])
            node = node.children[at]
        return amount + sum(node.amounts[: bisect_left(node.keys, key)])

    def _split(self, node: _Node[K], path: list[tuple[_Inner[K], int]]) -> None:
        """Halve a node that has become too large, and those above that become so by it."""
        while True:
            bound, upper = node.split()
            if not path:
                amounts = [sum(node.amounts), sum(upper.amounts)]
                self._root = _Inner([bound], [node, upper], amounts)
                return
            parent, at = path.pop()
            parent.bounds.insert(at, bound)
            parent.children.insert(at + 1, upper)
            parent.amounts[at : at + 1] = [sum(node.amounts), sum(upper.amounts)]
            if len(parent.children) <= MOST:
                return
            node = parent

    def _prune(self, path: list[tuple[_Inner[K], int]]) -> None:
        """Drop the empty leaf at the path's end, and whatever becomes empty by that. Nodes are not
        merged: the front of a queue is taken out leaf by leaf."""
        while path:
            parent, at = path.pop()
            del parent.children[at], parent.amounts[at]
            if parent.bounds:
                del parent.bounds[min(at, len(parent.bounds) - 1)]
            if parent.children:
                break
        else:
            self._root = _Leaf([], [])
        while isinstance(self._root, _Inner) and len(self._root.children) == 1:
            self._root = self._root.children[0]


def _keys(node: _Node[K]) -> Iterator[K]:
    if isinstance(node, _Leaf):
        yield from node.keys
        return
    for child in node.children:
        yield from _keys(child)
