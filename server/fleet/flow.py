"""What one tenant has waiting in one class: its order, and how much it was charged.

Pure state with its arithmetic. Knows no other tenant.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from .order_tree import OrderTree

if TYPE_CHECKING:
    from collections.abc import Hashable

    from triolet.service_class import Claim

    from .class_line import ClassLine
    from .holdings import Holding

T = TypeVar("T", bound="Hashable")

Key: TypeAlias = "tuple[int, float, int]"
"""Its own priority, when it is due, its order of arrival."""


class Place(NamedTuple):
    """What the queue has to know of whoever waits.

    Attributes:
      claim: whose it is, and of which class.
      own: its priority among those of its tenant and class; lower is earlier.
      due: the earlier one goes first among these.
      order: rises with each arrival, like nobody else's.
      prompt_tokens: to compute.
      max_tokens: of its completion.
    """

    claim: Claim
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
