"""The queue of waiting requests: ordered by service class, then by tenant with weighted fair shares
of tokens, then by priority and deadline. A waiting lower class earns a share of what higher classes
are given, so it is never starved."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeAlias, TypeVar

from triolet.service_class import ANYWHERE, DEFAULT_SCHEDULING, Scheduling, ServiceClass

from .tenant_usage import TenantUsages

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator

    from triolet.config import QueueConfig
    from triolet.service_class import Placement

    from .tenant_usage import TenantUsage

T = TypeVar("T", bound="Hashable")

UNKNOWN_TOKENS: Final = 1 << 31
"""`max_tokens` of a request that is not read yet: its tenant's usual completion then counts."""
OVERDUE: Final = 4
"""Multiple of its cost: with this much aging credit, the first request of a class stops letting
others pass when it finds no room. A large request would otherwise never find it."""


class QueuePlace(NamedTuple):
    """What determines a request's place in the queue.

    Attributes:
      scheduling: its tenant, the tenant's weight and limits, and the service class.
      priority: priority within its tenant and class; lower is earlier.
      due: deadline; among equal priorities the earliest is first.
      order: unique number of arrival; breaks ties.
      prompt_tokens: prompt tokens to compute.
      max_tokens: maximum completion tokens.
    """

    scheduling: Scheduling
    priority: int
    due: float
    order: int
    prompt_tokens: int
    max_tokens: int = 0


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[T]):
    """A waiting or running request.

    Attributes:
      item: the caller's request.
      place: its place in the queue.
      queue: the queue of its tenant and class.
      cost: tokens charged at dispatch.
      tag: virtual time of its first dispatch; None before.
      is_running: dispatched and not ended.
    """

    item: T
    place: QueuePlace
    queue: TenantQueue[T]
    cost: int
    tag: float | None = None
    is_running: bool = False


@dataclass(slots=True, eq=False)
class TenantQueue(Generic[T]):
    """The requests of one tenant in one class.

    Attributes:
      tenant: the tenant's name.
      of_class: the queue of the class.
      usage: what the tenant uses on workers, in all classes.
      charged: virtual time up to which the tenant was served: tokens / weight.
      credit: tokens / weight of its share that it recently left unused.
      weight: weight of its latest request.
      cost: tokens that the waiting requests will be charged.
      prompt_tokens: prompt tokens of the waiting requests.
      num_running: requests of this class on workers.
      head_start: virtual time by which its turn comes before `charged`; 0 for a tenant that asks
        for more than its credit.
      turn: its entry in the class's turns; None if it has none.
      idle: its entry among the class's idle tenants; None if it is not idle.
    """

    tenant: str
    of_class: ClassQueue[T]
    usage: TenantUsage
    charged: float
    credit: float
    weight: float = 1.0
    cost: int = 0
    prompt_tokens: int = 0
    num_running: int = 0
    head_start: float = 0.0
    turn: Turn[T] | None = None
    idle: tuple[float, str] | None = None
    _entries: list[tuple[int, float, int, QueueEntry[T]]] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> QueueEntry[T]:
        """The first entry; the queue must not be empty."""
        return self._entries[0][3]

    @property
    def tag(self) -> float:
        """Virtual time of the next turn. A request that is retried keeps its first tag."""
        tag = self.head.tag
        return self.charged - self.head_start if tag is None else tag

    @property
    def is_held(self) -> bool:
        """Whether its requests wait for the tenant's own limit, not for workers."""
        return bool(self._entries) and self.turn is None

    @property
    def placement(self) -> Placement:
        """The workers that the first request may use."""
        return self.head.place.scheduling.placement

    def add(self, entry: QueueEntry[T]) -> None:
        """Add an entry."""
        place = entry.place
        at = bisect_left(self._entries, place[1:4])
        self._entries.insert(at, (*place[1:4], entry))
        self._tokens.insert(at, place.prompt_tokens)
        self.cost += entry.cost
        self.prompt_tokens += place.prompt_tokens

    def remove(self, entry: QueueEntry[T]) -> None:
        """Remove an entry."""
        at = bisect_left(self._entries, entry.place[1:4])
        assert self._entries[at][3] is entry, "only a waiting entry can be removed"
        del self._entries[at], self._tokens[at]
        self.cost -= entry.cost
        self.prompt_tokens -= entry.place.prompt_tokens

    def credit_at(self, virtual_time: float, most: float) -> float:
        """Return its credit plus the share left unused until `virtual_time`, at most `most`."""
        unused = 0.0 if self else max(virtual_time - self.charged, 0.0)
        return min(self.credit + unused, most)

    def tokens_before(self, priority: int, due: float) -> int:
        """Return the prompt tokens ahead of a new request."""
        return sum(self._tokens[: bisect_left(self._entries, (priority, due, math.inf))])


Turn: TypeAlias = tuple[float, int, TenantQueue[T]]
"""Virtual time; order of the first request, which breaks ties; the tenant's queue."""


class ClassQueue(Generic[T]):
    """The tenants of one service class.

    Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM '96) over tokens, with a virtual token
    counter per tenant (Sheng et al., "Fairness in Serving Large Language Models", OSDI '24): the
    tenant charged least, relative to its weight, is next; a tenant that returns from idling starts
    where the others are.

    Args:
      usages: usage and limits of all tenants.
      head_start: tokens / weight by which a tenant that asks for little may be ahead of the others.
      placements: number of requests by placement, in all classes.

    Attributes:
      is_paused: no request is dispatched.
      virtual_time: virtual time of the latest turn.
      aging_credit: tokens that the class may send ahead of higher classes, earned by waiting.
      num_waiting: waiting requests.
      num_running: requests on workers.
    """

    def __init__(
        self, usages: TenantUsages, head_start: int, placements: Counter[Placement]
    ) -> None:
        self.is_paused = False
        self.virtual_time = 0.0
        self.aging_credit = 0.0
        self.num_waiting = 0
        self.num_running = 0
        self._usages = usages
        self._head_start = head_start
        self._placements = placements
        self._tenants: dict[str, TenantQueue[T]] = {}
        self._turns: list[Turn[T]] = []
        self._idle: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Return the number of remembered tenants."""
        return len(self._tenants)

    def __iter__(self) -> Iterator[TenantQueue[T]]:
        """Iterate over the remembered tenants."""
        return iter(self._tenants.values())

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits that may be dispatched."""
        return bool(self._turns) and not self.is_paused

    def ready_tokens(self, placement: Placement = ANYWHERE) -> int:
        """Return the prompt tokens that wait for workers of a placement. Requests held back by
        their tenant's limit do not count."""
        return sum(queue.prompt_tokens for queue in self.rivals(placement))

    def rivals(self, placement: Placement) -> Iterator[TenantQueue[T]]:
        """Iterate over the tenants with requests that wait for workers of a placement."""
        is_simple = len(self._placements) < 2
        return (q for _, _, q in self._turns if is_simple or q.placement.meets(placement))

    @property
    def lag_tokens(self) -> float:
        """Tokens at weight 1 between the most and the least charged waiting tenant."""
        charged = [queue.charged for _, _, queue in self._turns]
        return max(charged) - min(charged) if charged else 0.0

    def find(self, tenant: str) -> TenantQueue[T] | None:
        """Return a tenant's queue, or None."""
        return self._tenants.get(tenant)

    def first(self, blocked: Collection[Placement] = ()) -> QueueEntry[T] | None:
        """Return the next entry outside blocked placements. Return None while the class is paused,
        or if the next tenant must leave the last rows to others (lower classes may then use them).
        A tenant need not leave rows in its own pool."""
        if self.is_paused:
            return None
        has_to_leave = False
        for _, _, queue in self._turns:
            placement = queue.placement
            if placement in blocked or (has_to_leave and not placement.pools):
                continue
            if placement.pools or not self._usages.leaves_rows(queue.tenant, queue.usage):
                return queue.head
            if len(self._placements) < 2:
                return None
            has_to_leave = True
        return None

    def queue_of(self, scheduling: Scheduling, usage: TenantUsage) -> TenantQueue[T]:
        """Return the queue for a tenant's new request."""
        queue = self._tenants.get(scheduling.claimant)
        if queue is None:
            queue = TenantQueue(
                scheduling.claimant, self, usage, self.virtual_time, float(self._head_start)
            )
            self._tenants[scheduling.claimant] = queue
        queue.usage = usage
        if queue.idle is not None:
            del self._idle[bisect_left(self._idle, queue.idle)]
            queue.idle = None
        if not queue:
            # Idling, or waiting for a running request to end, does not save up a share.
            queue.credit = queue.credit_at(self.virtual_time, self._head_start)
            queue.charged = max(queue.charged, self.virtual_time)
        queue.weight = scheduling.weight
        return queue

    def put(self, entry: QueueEntry[T]) -> None:
        """Add a waiting entry."""
        entry.queue.add(entry)
        self.num_waiting += 1
        self.refresh(entry.queue)

    def drop(self, entry: QueueEntry[T]) -> None:
        """Remove a waiting entry."""
        entry.queue.remove(entry)
        self.num_waiting -= 1
        if not self.num_waiting:
            self.aging_credit = 0.0
        self.refresh(entry.queue)

    def take(self, entry: QueueEntry[T]) -> bool:
        """Start a waiting entry; return whether it was charged, which happens once."""
        queue = entry.queue
        queue.num_running += 1
        self.num_running += 1
        is_charged = entry.tag is None
        if is_charged:
            entry.tag = queue.tag
            self.virtual_time = max(self.virtual_time, entry.tag)
            queue.charged += entry.cost / queue.weight
            queue.credit = max(queue.credit - entry.cost / queue.weight, 0.0)
        self.drop(entry)
        return is_charged

    def leave(self, entry: QueueEntry[T]) -> None:
        """Stop counting a running entry."""
        entry.queue.num_running -= 1
        self.num_running -= 1

    def settle(self, entry: QueueEntry[T], used_tokens: int) -> None:
        """Replace an entry's charge by the tokens it used."""
        if entry.tag is not None:
            entry.queue.charged += (used_tokens - entry.cost) / entry.queue.weight

    def forget(self, queue: TenantQueue[T]) -> None:
        """Drop a tenant without requests once the others are a head start beyond it, since its
        credit is full by then; drop all tenants once the class is empty, since past imbalance no
        longer matters."""
        if not self.num_waiting and not self.num_running:
            self._tenants.clear()
            self._idle.clear()
            self.virtual_time = 0.0
            return
        if not queue and not queue.num_running and queue.idle is None:
            queue.idle = (queue.charged, queue.tenant)
            insort(self._idle, queue.idle)
        while self._idle and self._idle[0][0] <= self.virtual_time - self._head_start:
            del self._tenants[self._idle.pop(0)[1]]

    def refresh(self, queue: TenantQueue[T]) -> None:
        """Update a tenant's turn from its charge, first entry and limits."""
        is_within = queue.cost <= queue.credit * queue.weight
        queue.head_start = float(self._head_start) if is_within else 0.0
        is_ready = len(queue) > 0 and self._usages.allows(
            queue.usage, queue.head.place.scheduling, queue.head.cost
        )
        turn = (queue.tag, queue.head.place.order, queue) if is_ready else None
        if turn == queue.turn:
            return
        if queue.turn is not None:
            del self._turns[bisect_left(self._turns, queue.turn)]
        if turn is not None:
            insort(self._turns, turn)
        queue.turn = turn

    def head_start_of(self, scheduling: Scheduling, cost: float) -> float:
        """Return the head start of a new request's turn: the full one if its tenant's credit covers
        everything that would wait, else 0."""
        queue = self._tenants.get(scheduling.claimant)
        credit, waiting = float(self._head_start), 0
        if queue is not None:
            credit, waiting = queue.credit_at(self.virtual_time, self._head_start), queue.cost
        return float(self._head_start) if waiting + cost <= credit * scheduling.weight else 0.0

    def tokens_ahead(self, place: QueuePlace, cost: float) -> int:
        """Return the prompt tokens of the class ahead of a new request: those of its tenant before
        it, and for each other tenant what is served until its turn:

            prompt_tokens * min(1, weight * virtual_tokens / cost)

        Here `virtual_tokens` is what its own tenant is served until then, by weight, plus half of
        its own cost: of the tenants with equal virtual time, half are first.
        """
        scheduling = place.scheduling
        mine = self._tenants.get(scheduling.claimant)
        before, virtual_tokens = 0, cost / (2 * scheduling.weight)
        if mine is not None:
            virtual_tokens += max(mine.charged - self.virtual_time, 0.0)
            if mine and (before := mine.tokens_before(place.priority, place.due)):
                virtual_tokens += mine.cost * before / mine.prompt_tokens / scheduling.weight
        virtual_tokens -= self.head_start_of(scheduling, cost)
        if virtual_tokens <= 0.0:
            return before
        others = 0.0
        for queue in self.rivals(scheduling.placement):
            if queue is not mine and queue.cost:
                share = queue.weight * virtual_tokens / queue.cost
                others += queue.prompt_tokens * (share if share < 1.0 else 1.0)
        return before + int(others)


class FairQueue(Generic[T]):
    """The whole queue, including the charges of running requests.

    Attributes:
      config: how shares are given.
      usages: what each tenant uses on workers.
      classes: the queue of each service class, in order.
      num_running: dispatched requests that have not ended.
      placements: number of requests by placement.
    """

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.num_running = 0
        self.usages = TenantUsages(
            config.expected_completion_tokens, config.spare_rows_share if config.fair else 0.0
        )
        head_start = config.head_start_tokens if config.fair else 0
        self.placements: Counter[Placement] = Counter()
        self.classes = tuple(
            ClassQueue[T](self.usages, head_start, self.placements) for _ in ServiceClass
        )
        self._entries: dict[T, QueueEntry[T]] = {}
        self._aside: list[QueueEntry[T]] = []

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._entries) - self.num_running

    def __iter__(self) -> Iterator[T]:
        """Iterate over waiting requests in order of arrival; they may end during iteration."""
        return iter([item for item, entry in self._entries.items() if not entry.is_running])

    def live(self) -> Iterator[T]:
        """Iterate over waiting and running requests; the set must not change during iteration."""
        return iter(self._entries)

    @property
    def num_tenants(self) -> int:
        """Tenants with waiting or running requests."""
        return len(self.usages)

    def tokens_ahead(self, place: QueuePlace) -> int:
        """Return the prompt tokens currently ahead of a new request."""
        place = effective_place(self.config, place)
        scheduling = place.scheduling
        tokens = self.classes[scheduling.service_class].tokens_ahead(place, self.cost_of(place))
        for higher in self.classes[: scheduling.service_class]:
            if not higher.is_paused:
                mine = higher.find(scheduling.claimant)
                # Another tenant's requests that wait for its own limit delay no one else.
                is_held = mine is not None and mine.is_held
                tokens += higher.ready_tokens(scheduling.placement)
                tokens += mine.prompt_tokens if mine and is_held else 0
        return tokens

    def cost_of(self, place: QueuePlace) -> float:
        """Return the tokens that a new request would be charged."""
        completion_tokens = self.usages.completion_tokens(place.scheduling.claimant)
        return place.prompt_tokens + min(place.max_tokens, completion_tokens)

    def is_held(self, item: T) -> bool:
        """Return whether a request waits for another request of its tenant to end."""
        entry = self._entries.get(item)
        return entry is not None and not entry.is_running and entry.queue.is_held

    def is_over_share(self, item: T) -> bool:
        """Return whether a waiting request's tenant asks for more than its credit. Workers then
        compute other tenants' requests before it, including later ones."""
        return not self._entries[item].queue.head_start

    def add(self, item: T, place: QueuePlace) -> None:
        """Add a new waiting request."""
        assert item not in self._entries, "a request is in the queue once"
        place = effective_place(self.config, place)
        scheduling = place.scheduling
        usage = self.usages.of(scheduling.claimant, scheduling.weight)
        usage.num_requests += 1
        self.placements[scheduling.placement] += 1
        one = self.classes[scheduling.service_class]
        cost = place.prompt_tokens + min(place.max_tokens, round(usage.completion_tokens))
        entry = self._entries[item] = QueueEntry(item, place, one.queue_of(scheduling, usage), cost)
        one.put(entry)

    def first(self, blocked: Collection[Placement] = (), *, is_aged_too: bool = True) -> T | None:
        """Return the next request; None if none may be dispatched.

        Args:
          blocked: placements to skip.
          is_aged_too: whether a lower class may go first by its aging credit.
        """
        chosen: QueueEntry[T] | None = None
        for one in self.classes:
            if (entry := one.first(blocked)) is None:
                continue
            if chosen is None:
                chosen = entry
                if not is_aged_too:
                    break
            elif one.aging_credit >= entry.cost:
                chosen = entry
                break
        return None if chosen is None else chosen.item

    def lets_pass(self, item: T, blocked: Collection[Placement] = ()) -> bool:
        """Return whether higher classes may go first if there is no room for the next request: it
        is ahead of them only by an aging credit that is not overdue yet."""
        entry = self._entries[item]
        service_class = entry.place.scheduling.service_class
        is_below = any(one.first(blocked) for one in self.classes[:service_class])
        return is_below and self.classes[service_class].aging_credit < OVERDUE * entry.cost

    def take(self, item: T) -> None:
        """Start a request. It is charged the first time only."""
        entry = self._entries[item]
        if entry.queue.of_class.take(entry):
            share = self.config.min_class_share
            _age(self.classes, entry.place.scheduling.service_class, entry.cost, share)
        entry.is_running = True
        self.num_running += 1
        self.usages.take(entry.queue.tenant, entry.queue.usage, entry.cost)
        _refresh(self.classes, entry.queue.tenant)

    def give_back(self, item: T) -> None:
        """Return a running request to its old place, without charging it again."""
        entry = self._entries[item]
        entry.is_running = False
        self.num_running -= 1
        self.usages.give(entry.queue.usage, entry.cost)
        entry.queue.of_class.leave(entry)
        entry.queue.of_class.put(entry)
        _refresh(self.classes, entry.queue.tenant)

    def end(self, item: T, completion_tokens: int) -> None:
        """Remove a request and settle its charge by the tokens it used."""
        entry = self._entries.pop(item)
        queue, placement = entry.queue, entry.place.scheduling.placement
        self.placements[placement] -= 1
        if not self.placements[placement]:
            del self.placements[placement]
        one, usage = queue.of_class, queue.usage
        one.settle(entry, entry.place.prompt_tokens + completion_tokens)
        if entry.is_running:
            self.num_running -= 1
            one.leave(entry)
            self.usages.give(usage, entry.cost)
        elif entry in self._aside:
            self._aside.remove(entry)
        else:
            one.drop(entry)
        _refresh(self.classes, entry.queue.tenant)
        one.forget(entry.queue)
        if completion_tokens:
            moved = completion_tokens - usage.completion_tokens
            usage.completion_tokens += self.config.completion_memory * moved
        usage.num_requests -= 1
        self.usages.left(entry.queue.tenant)

    def set_aside(self, item: T) -> None:
        """Exclude a waiting request from `first` until `restore`."""
        entry = self._entries[item]
        entry.queue.of_class.drop(entry)
        self._aside.append(entry)

    def restore(self) -> None:
        """Put back the requests that were set aside."""
        while self._aside:
            entry = self._aside.pop()
            entry.queue.of_class.put(entry)

    def pause(self, classes: Collection[ServiceClass]) -> None:
        """Pause these classes, and resume all others."""
        for service_class, one in zip(ServiceClass, self.classes, strict=True):
            one.is_paused = service_class in classes

    def note_pools(self, kv_tokens: int, rows: int) -> None:
        """Record how many tokens and sequences all decode workers can hold."""
        if self.usages.note_pools(kv_tokens, rows):
            for one in self.classes:
                for queue in one:
                    one.refresh(queue)


def effective_scheduling(config: QueueConfig, scheduling: Scheduling) -> Scheduling:
    """Return the scheduling that applies: without fairness, one class and tenant for all."""
    if config.fair:
        return scheduling
    return replace(DEFAULT_SCHEDULING, placement=scheduling.placement)


def effective_place(config: QueueConfig, place: QueuePlace) -> QueuePlace:
    """Return the place that applies: without fairness, by class and priority, then arrival."""
    if config.fair:
        return place
    priority = place.scheduling.priority(place.priority)
    scheduling = effective_scheduling(config, place.scheduling)
    return place._replace(scheduling=scheduling, priority=priority, due=0.0)


def _age(
    classes: tuple[ClassQueue[T], ...], service_class: ServiceClass, cost: int, share: float
) -> None:
    """Give the waiting lower classes their share of a dispatch as aging credit, and charge the
    dispatched class if a higher one was waiting."""
    if any(one.is_waiting for one in classes[:service_class]):
        taken = classes[service_class]
        taken.aging_credit = max(0.0, taken.aging_credit - cost)
    for lower in classes[service_class + 1 :]:
        if lower.is_waiting:
            lower.aging_credit += share * cost


def _refresh(classes: tuple[ClassQueue[T], ...], tenant: str) -> None:
    """Reapply a tenant's limits in all classes."""
    for one in classes:
        if (queue := one.find(tenant)) is not None:
            one.refresh(queue)
