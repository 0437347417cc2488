"""Those who wait in one service class: which tenant's turn it is.

Pure. Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM '96) over tokens, as a virtual token
counter for each tenant (Sheng et al., "Fairness in Serving Large Language Models", OSDI '24): the
tenant that was charged least by its weight is next; one that comes back from idling starts where
the others are. Knows flows and who of them is skipped; knows no other class.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from .queue_estimate import Fluid
from .tenant_queue import Flow

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from .tenant_queue import Entry
    from .tenant_usage import Holding

T = TypeVar("T", bound="Hashable")

SLACK: Final = 64
"""Notes of turns that have changed since are thrown away once they are more than this, and more
than those that hold."""


class ClassLine(Generic[T]):
    """One class.

    Attributes:
      is_paused: nobody has a turn.
      is_allowed: asked whether the first of a flow may run.
      head_start: tokens by weight that a tenant which asks for little may be ahead of the others.
      virtual_time: of the latest turn: tokens by weight that everybody who waited had.
      earned: tokens that it may have before the classes above it, for having waited.
      fluid: those of its tenants that wait for workers.
      num_waiting: requests.
      num_running: those that had their turn and have not ended.
      prompt_tokens: of those that wait.
    """

    def __init__(self, is_allowed: Callable[[Flow[T]], bool], head_start: int = 0) -> None:
        self.is_paused = False
        self.virtual_time = 0.0
        self.earned = 0.0
        self.num_waiting = 0
        self.num_running = 0
        self.prompt_tokens = 0
        self._is_allowed = is_allowed
        self.head_start = head_start
        self.fluid = Fluid()
        self._flows: dict[str, Flow[T]] = {}
        self._turns: list[tuple[float, int, Flow[T]]] = []
        self._idle: list[tuple[float, int, Flow[T]]] = []
        self._serial = 0  # of notes: flows are not compared

    def __len__(self) -> int:
        """Tenants that it remembers."""
        return len(self._flows)

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits who might have a turn."""
        return bool(self.fluid.num_flows) and not self.is_paused

    @property
    def ready_tokens(self) -> int:
        """Prompt tokens of those that wait for workers, and not for something of their tenant's to
        end: the only ones that say how much there is to do."""
        return self.fluid.prompt_tokens

    @property
    def lag_tokens(self) -> float:
        """By how many tokens of weight 1 the tenants that wait are apart."""
        charged = [flow.charged for flow in self._flows.values() if flow.shown is not None]
        return max(charged) - min(charged) if charged else 0.0

    def flow(self, tenant: str, holding: Holding) -> Flow[T]:
        """Return a tenant's flow, which begins where the others are."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = Flow(tenant, self, holding, self.virtual_time)
            flow.credit = self.head_start
        flow.holding = holding
        return flow

    def first(self) -> Entry[T] | None:
        """Return who is next, or None. Whoever may not run is left out until something of its
        tenant's is given back (`resume`)."""
        turns = self._turns
        while turns:
            tag, _, flow = turns[0]
            if not flow or flow.is_skipped or flow.tag != tag:
                heappop(turns)
            elif self._is_allowed(flow):
                return flow.head
            else:
                heappop(turns)
                flow.is_skipped = True
                flow.holding.skipped.append(flow)
                self.fluid.show(flow)
        return None

    def add(self, entry: Entry[T]) -> None:
        """Let somebody wait."""
        flow = entry.flow
        if not flow:
            # Idling, or waiting for what runs to end, buys no share; it only lets past others.
            flow.credit = flow.credit_at(self.virtual_time, self.head_start)
            flow.charged = max(flow.charged, self.virtual_time)
        flow.weight = entry.place.scheduling.weight
        self.put_back(entry)

    def take_out(self, entry: Entry[T], *, is_charged: bool = False) -> None:
        """Leave somebody who waits out, for the moment or because it has its turn."""
        flow = entry.flow
        is_head = is_charged or flow.head is entry
        flow.remove(entry)
        self.num_waiting -= 1
        self.prompt_tokens -= entry.place.prompt_tokens
        self._changed(flow, is_head=is_head)
        if not self.num_waiting:
            self.earned = 0.0

    def put_back(self, entry: Entry[T]) -> None:
        """Let somebody wait again as if it had never been taken out."""
        flow = entry.flow
        flow.add(entry)
        self.num_waiting += 1
        self.prompt_tokens += entry.place.prompt_tokens
        self._changed(flow, is_head=flow.head is entry)

    def remove(self, entry: Entry[T]) -> None:
        """Let somebody who waits go without a turn."""
        self.take_out(entry)
        self._forget(entry.flow)

    def take(self, entry: Entry[T]) -> bool:
        """Let somebody who waits have its turn; return whether it was charged, which it is once."""
        flow = entry.flow
        flow.num_running += 1
        self.num_running += 1
        if entry.tag is not None:
            self.take_out(entry)
            return False
        entry.tag = flow.tag
        self.virtual_time = max(self.virtual_time, entry.tag)
        flow.charged += entry.cost / flow.weight
        flow.credit = max(flow.credit - entry.cost / flow.weight, 0.0)
        self.take_out(entry, is_charged=True)
        return True

    def leave(self, entry: Entry[T]) -> None:
        """Take in that one that ran has left its workers."""
        entry.flow.num_running -= 1
        self.num_running -= 1
        self._forget(entry.flow)

    def give_back(self, entry: Entry[T]) -> None:
        """Let one that ran wait again: its tenant has not idled."""
        entry.flow.num_running -= 1
        self.num_running -= 1
        self.put_back(entry)

    def settle(self, entry: Entry[T], used_tokens: int) -> None:
        """Correct what one was charged by what it has used."""
        flow = entry.flow
        flow.charged += (used_tokens - entry.cost) / flow.weight
        self._changed(flow, is_head=True)

    def resume(self, flow: Flow[T]) -> None:
        """Take a flow in again that was skipped."""
        flow.is_skipped = False
        self._changed(flow, is_head=True)

    def find(self, tenant: str) -> Flow[T] | None:
        """Return a tenant's flow, if there is one."""
        return self._flows.get(tenant)

    def _changed(self, flow: Flow[T], *, is_head: bool) -> None:
        """Note when a flow's turn is, and count what waits there."""
        was = flow.head_start
        flow.head_start = self.head_start if flow.cost <= flow.credit * flow.weight else 0.0
        if is_head and flow.is_skipped:
            # Another one is first now, which may be small enough.
            flow.is_skipped = False
            flow.holding.skipped.remove(flow)
        self.fluid.show(flow)
        if (is_head or flow.head_start != was) and flow and not flow.is_skipped:
            self._serial += 1
            heappush(self._turns, (flow.tag, self._serial, flow))
            if len(self._turns) > 2 * self.fluid.num_flows + SLACK:
                flows = (f for f in self._flows.values() if f and not f.is_skipped)
                self._turns = [(f.tag, serial, f) for serial, f in enumerate(flows)]
                heapify(self._turns)

    def _forget(self, flow: Flow[T]) -> None:
        """Drop flows of which nothing is left, once the others are a head start beyond them: who is
        forgotten has left so much unused. And all once nobody is here any more: whoever had more
        than others took it from nobody."""
        if not self.num_waiting and not self.num_running:
            self._flows.clear()
            self._turns.clear()
            self._idle.clear()
            self.virtual_time = 0.0
            return
        if not flow and not flow.num_running and flow.idle_note != flow.charged:
            flow.idle_note = flow.charged
            self._serial += 1
            heappush(self._idle, (flow.charged, self._serial, flow))
        caught_up = self.virtual_time - self.head_start
        while self._idle and self._idle[0][0] <= caught_up:
            noted, _, idle = heappop(self._idle)
            if idle.idle_note == noted:
                idle.idle_note = None
            is_idle = not idle and not idle.num_running and idle.charged <= caught_up
            if is_idle and self._flows.get(idle.tenant) is idle:
                del self._flows[idle.tenant]
