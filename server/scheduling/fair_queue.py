"""Who waits for workers, and whose turn it is.

Pure. First by service class; a class that waits below others earns a part of what they are given,
so that it never stands still. In a class by tenant, weighted fair by tokens (class_line.py). Of a
tenant by its own priority, then who is due first, then who came first. A tenant that has all that
it may have on workers is skipped until something of it is given back, and holds up nobody. Each
step costs what finding a place among as many costs, whatever waits. Knows claims and sizes; refuses
to know workers, prices and predictions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from triolet.service_class import ServiceClass

from .class_queue import ClassLine
from .newcomer import heeded, tokens_ahead_in
from .tenant_queue import Entry, Place
from .tenant_usage import Holdings

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator

    from triolet.config import QueueConfig
    from triolet.service_class import Scheduling

    from .tenant_queue import Flow

T = TypeVar("T", bound="Hashable")

OVERDUE: Final = 4
"""Times its cost: once a class has earned so much by waiting, its first one no longer lets others
pass when it finds no room. A large one would never find it."""


class FairQueue(Generic[T]):
    """All that wait, and what those that run were charged.

    Attributes:
      config: how they share.
      holdings: what each tenant has on workers.
      lines: of each service class, in order.
    """

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.holdings = Holdings(
            config.expected_completion_tokens, config.spare_rows_share if config.fair else 0.0
        )
        head_start = config.head_start_tokens if config.fair else 0
        self.lines = tuple(ClassLine[T](self.holdings.allows, head_start) for _ in ServiceClass)
        self._entries: dict[T, Entry[T]] = {}
        self._aside: list[Entry[T]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        """Those that wait."""
        return self._num_waiting

    def __iter__(self) -> Iterator[T]:
        """Go through those that wait, in order of arrival; they may leave meanwhile."""
        return iter([item for item, entry in self._entries.items() if not entry.is_running])

    def __contains__(self, item: T) -> bool:
        """Return whether it waits."""
        entry = self._entries.get(item)
        return entry is not None and not entry.is_running

    @property
    def num_running(self) -> int:
        """Those that left the queue and have not ended."""
        return len(self._entries) - self._num_waiting

    @property
    def num_tenants(self) -> int:
        """Tenants of which something waits or runs."""
        return len(self.holdings)

    @property
    def lag_tokens(self) -> float:
        """By how many tokens of weight 1 the tenants that wait are apart, in the worst class."""
        return max(line.lag_tokens for line in self.lines)

    def tokens_ahead(
        self,
        scheduling: Scheduling,
        own: int,
        due: float,
        prompt_tokens: int = 0,
        max_tokens: float = math.inf,
    ) -> int:
        """Return the prompt tokens that go before a newcomer, as things stand.

        Args:
          scheduling: whose it is.
          own: its priority among its tenant's.
          due: when it is.
          prompt_tokens: its own.
          max_tokens: of its completion.
        """
        scheduling, own, due = heeded(self.config, scheduling, own, due)
        cost = prompt_tokens + min(max_tokens, self.holdings.completion_tokens(scheduling.tenant))
        higher = (line for line in self.lines[: scheduling.service_class] if not line.is_paused)
        # Whoever waits by its own limits is in nobody's way but its own.
        tokens = sum(line.ready_tokens + _held(line.find(scheduling.tenant)) for line in higher)
        line = self.lines[scheduling.service_class]
        return tokens + tokens_ahead_in(line, scheduling, own, due, cost)

    def is_skipped(self, item: T) -> bool:
        """Return whether one waits for something of its own tenant's to end."""
        entry = self._entries.get(item)
        return entry is not None and not entry.is_running and entry.flow.is_skipped

    def is_over_share(self, item: T) -> bool:
        """Return whether the tenant of one that waits asks for more than it left unused, so that
        whoever asks for less is computed before it: also who comes when it is alone now."""
        return not self._entries[item].flow.head_start

    def add(self, item: T, place: Place) -> None:
        """Let somebody wait who is not here."""
        assert item not in self._entries, "nobody waits twice"
        scheduling, own, due = heeded(self.config, place.scheduling, place.own, place.due)
        place = place._replace(scheduling=scheduling, own=own, due=due)
        holding = self.holdings.of(scheduling.tenant, scheduling.weight)
        completion_tokens = min(place.max_tokens, round(holding.completion_tokens))
        flow = self.lines[scheduling.service_class].flow(scheduling.tenant, holding)
        entry = Entry(item, place, flow, place.prompt_tokens + completion_tokens)
        self._entries[item] = entry
        self._num_waiting += 1
        holding.num_waiting += 1
        flow.line.add(entry)

    def first(self, *, is_aged_too: bool = True) -> T | None:
        """Return whose turn it is; None if nobody may run that waits. While one whose turn it is
        leaves rows to others nobody else of its class takes them: who comes seldom is before it
        anyhow. Lower classes may.

        Args:
          is_aged_too: a lower class may come first by what it has earned.
        """
        chosen: Entry[T] | None = None
        for line in self.lines:
            if (entry := _first_of(line, self.holdings)) is None:
                continue
            if chosen is None:
                chosen = entry
                if not is_aged_too:
                    break
            elif line.earned >= entry.cost:
                chosen = entry
                break
        return None if chosen is None else chosen.item

    def lets_pass(self, item: T) -> bool:
        """Return whether others may go first if there is no room for this one, whose turn it is: it
        is before them only because its class waited, and not for too long yet."""
        entry = self._entries[item]
        service_class = entry.place.scheduling.service_class
        is_below = any(_first_of(line, self.holdings) for line in self.lines[:service_class])
        return is_below and self.lines[service_class].earned < OVERDUE * entry.cost

    def take(self, item: T) -> None:
        """Let one that waits run. It is charged, unless it was before."""
        entry = self._entries[item]
        flow = entry.flow
        if flow.line.take(entry):
            _earn(
                self.lines,
                entry.place.scheduling.service_class,
                entry.cost,
                self.config.min_class_share,
            )
        entry.is_running = True
        self._num_waiting -= 1
        flow.holding.num_waiting -= 1
        self.holdings.take(flow.tenant, flow.holding, entry.cost)

    def give_back(self, item: T) -> None:
        """Let one that ran wait again, in its old place and without being charged again."""
        entry = self._entries[item]
        flow = entry.flow
        entry.is_running = False
        self._num_waiting += 1
        flow.holding.num_waiting += 1
        flow.line.give_back(entry)
        self.holdings.give(flow.holding, entry.cost)

    def end(self, item: T, completion_tokens: int) -> None:
        """Forget one that waits or runs, and settle what it was charged by what it has used."""
        entry = self._entries.pop(item)
        line, holding = entry.flow.line, entry.flow.holding
        if entry.tag is not None:
            line.settle(entry, entry.place.prompt_tokens + completion_tokens)
        if entry.is_running:
            line.leave(entry)
            self.holdings.give(holding, entry.cost)
        else:
            self._num_waiting -= 1
            holding.num_waiting -= 1
            if entry in self._aside:
                self._aside.remove(entry)
            else:
                line.remove(entry)
        if completion_tokens:
            moved = completion_tokens - holding.completion_tokens
            holding.completion_tokens += self.config.completion_memory * moved
        self.holdings.left(entry.place.scheduling.tenant)

    def set_aside(self, item: T) -> None:
        """Leave one that waits out of `first` until `restore`."""
        entry = self._entries[item]
        entry.flow.line.take_out(entry)
        self._aside.append(entry)

    def restore(self) -> None:
        """Put whatever was set aside back into its place."""
        while self._aside:
            entry = self._aside.pop()
            entry.flow.line.put_back(entry)

    def pause(self, classes: Collection[ServiceClass]) -> None:
        """Give turns to no one of these classes from now on, and to all others again."""
        for service_class in ServiceClass:
            self.lines[service_class].is_paused = service_class in classes

    def note_pools(self, kv_tokens: int, rows: int) -> None:
        """Take in how many tokens and sequences all decode workers can hold."""
        self.holdings.note_pools(kv_tokens, rows)


def _first_of(line: ClassLine[T], holdings: Holdings) -> Entry[T] | None:
    """Return who of a class may go now."""
    entry = line.first() if line.is_waiting else None
    return None if entry is None or holdings.leaves_rows(entry.flow) else entry


def _held(flow: Flow[T] | None) -> int:
    """Return the prompt tokens of a tenant that waits by its own limits."""
    return flow.prompt_tokens if flow is not None and flow.is_skipped else 0


def _earn(
    lines: tuple[ClassLine[T], ...], service_class: ServiceClass, cost: int, share: float
) -> None:
    """Let lower classes that wait earn a share of a turn, and let it be paid for if others waited
    above it."""
    if any(line.is_waiting for line in lines[:service_class]):
        line = lines[service_class]
        line.earned = max(0.0, line.earned - cost)
    for line in lines[service_class + 1 :]:
        if line.is_waiting:
            line.earned += share * cost
