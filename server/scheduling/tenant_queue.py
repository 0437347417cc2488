"""Keys in order, and the sum of what stands before any of them.

Pure. A B-tree whose nodes hold the sums of their children: finding the first, putting in, taking
out and summing up each touch one node per level, three of them for a hundred thousand keys. Knows
neither what the keys nor what the amounts mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from triolet.service_class import Scheduling

    from .class_queue import ClassLine
    from .tenant_usage import Holding


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


T = TypeVar("T", bound="Hashable")

Key: TypeAlias = "tuple[int, float, int]"
"""Its own priority, when it is due, its order of arrival."""


class Place(NamedTuple):
    """What the queue has to know of whoever waits.

    Attributes:
      scheduling: whose it is, and of which class.
      own: its priority among those of its tenant and class; lower is earlier.
      due: the earlier one goes first among these.
      order: rises with each arrival, like nobody else's.
      prompt_tokens: to compute.
      max_tokens: of its completion.
    """

    scheduling: Scheduling
    own: int
    due: float
    order: int
    prompt_tokens: int
    max_tokens: int = 0


class Entry(Generic[T]):
    """One that waits or runs.

    Attributes:
      item: what the caller calls it.
      place: what it said.
      flow: where it waits.
      cost: tokens that it is charged.
      tag: virtual time at which its turn came first; None before.
      is_running: it has left the queue, and has not ended.
    """

    __slots__ = ("cost", "flow", "is_running", "item", "place", "tag")

    def __init__(self, item: T, place: Place, flow: Flow[T], cost: int) -> None:
        self.item = item
        self.place = place
        self.flow = flow
        self.cost = cost
        self.tag: float | None = None
        self.is_running = False

    @property
    def key(self) -> Key:
        """Where it stands in its flow."""
        return self.place[1:4]


class Flow(Generic[T]):
    """One tenant in one class.

    Attributes:
      tenant: whose.
      line: of its class.
      holding: what the tenant has on workers.
      weight: as its latest request claims.
      charged: virtual time up to which it was served: tokens by weight.
      cost: tokens to be charged for all that wait.
      num_running: of this class, on workers.
      idle_note: `charged` for which it stands among those to be forgotten; None if it does not.
      credit: of its share, that it left unused lately: for that it is let past others.
      head_start: virtual time by which its turn is earlier than what it was charged says.
      is_skipped: its next one may not run before something of the tenant's ends.
      shown: what the class counts for it (`fluid.py`); None for nothing.
    """

    __slots__ = (
        "_entries",
        "_tree",
        "charged",
        "cost",
        "credit",
        "head_start",
        "holding",
        "idle_note",
        "is_skipped",
        "line",
        "num_running",
        "shown",
        "tenant",
        "weight",
    )

    def __init__(self, tenant: str, line: ClassLine[T], holding: Holding, charged: float) -> None:
        self.tenant = tenant
        self.line = line
        self.holding = holding
        self.weight = 1.0
        self.charged = charged
        self.cost = 0
        self.num_running = 0
        self.idle_note: float | None = None
        self.credit = 0.0
        self.head_start = 0.0
        self.is_skipped = False
        self.shown: tuple[int, int, float, int] | None = None
        self._tree: OrderTree[Key] = OrderTree()
        self._entries: dict[int, Entry[T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def prompt_tokens(self) -> int:
        """Of all that wait."""
        return self._tree.amount

    @property
    def head(self) -> Entry[T]:
        """Who is first. Somebody must wait."""
        return self._entries[self._tree.first()[2]]

    @property
    def tag(self) -> float:
        """The virtual time of its turn: that of its first one, if that had its turn already."""
        tag = self.head.tag
        return self.charged - self.head_start if tag is None else tag

    def add(self, entry: Entry[T]) -> None:
        """Let somebody wait."""
        self._tree.add(entry.key, entry.place.prompt_tokens)
        self._entries[entry.place.order] = entry
        self.cost += entry.cost

    def remove(self, entry: Entry[T]) -> None:
        """Let somebody who waits go."""
        self._tree.remove(entry.key)
        del self._entries[entry.place.order]
        self.cost -= entry.cost

    def credit_at(self, virtual_time: float, most: float) -> float:
        """Return what is left of its credit, and of what it has not used until then, up to the most
        that is remembered."""
        unused = 0.0 if self else max(virtual_time - self.charged, 0.0)
        return min(self.credit + unused, most)

    def tokens_before(self, own: int, due: float) -> int:
        """Return the prompt tokens of those that go before a newcomer."""
        return self._tree.amount_before((own, due, math.inf))
