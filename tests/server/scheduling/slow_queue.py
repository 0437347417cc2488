"""A reference model of the fair queue for tests: plain lists, fully scanned each time.

Simple rather than fast. Ageing is not modelled; it has its own tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.scheduling.queue import QueuePlace


@dataclass
class One:
    """A waiting or running request."""

    name: int
    place: QueuePlace
    cost: int
    tag: float | None = None
    is_running: bool = False


@dataclass
class SlowQueue:
    """All requests, and the charges per class and tenant."""

    expected_tokens: int
    kv_tokens: int = 0
    all: dict[int, One] = field(default_factory=dict)
    charged: dict[tuple[int, str], float] = field(default_factory=dict)
    virtual_time: dict[int, float] = field(default_factory=lambda: dict.fromkeys(range(4), 0.0))

    def add(self, name: int, place: QueuePlace) -> None:
        """See FairQueue.add."""
        cost = place.prompt_tokens + min(place.max_tokens, self.expected_tokens)
        one = One(name, place, cost)
        service_class, tenant = self._flow(one)
        here = (service_class, tenant)
        if all(o.is_running or self._flow(o) != here for o in self.all.values()):
            now = self.virtual_time[service_class]
            charged = self.charged.get((service_class, tenant), now)
            self.charged[service_class, tenant] = max(charged, now)
        self.all[name] = one

    def _held(self) -> set[tuple[int, str]]:
        """Return the flows with a first request that a tenant's limits hold back."""
        waiting = [one for one in self.all.values() if not one.is_running]
        heads: dict[tuple[int, str], One] = {}
        for one in sorted(waiting, key=lambda o: o.place[1:4]):
            heads.setdefault(self._flow(one), one)
        return {flow for flow, one in heads.items() if not self._is_allowed(one)}

    def turns(self) -> set[int]:
        """Return the requests that may be next: several if their tenants are even."""
        for service_class in range(4):
            heads: dict[str, One] = {}
            for one in sorted(self.all.values(), key=lambda o: o.place[1:4]):
                if not one.is_running and one.place.scheduling.service_class == service_class:
                    heads.setdefault(one.place.scheduling.tenant, one)
            tags = {o.name: self._tag(o) for o in heads.values() if self._is_allowed(o)}
            if tags:
                return {name for name, tag in tags.items() if tag == min(tags.values())}
        return set()

    def take(self, name: int) -> None:
        """See FairQueue.take."""
        one = self.all[name]
        flow = self._flow(one)
        if one.tag is None:
            one.tag = self.charged[flow]
            self.virtual_time[flow[0]] = max(self.virtual_time[flow[0]], one.tag)
            self.charged[flow] += one.cost / one.place.scheduling.weight
        one.is_running = True

    def give_back(self, name: int) -> None:
        """See FairQueue.give_back."""
        self.all[name].is_running = False

    def end(self, name: int, completion_tokens: int) -> None:
        """See FairQueue.end."""
        one = self.all.pop(name)
        if one.tag is not None:
            used = one.place.prompt_tokens + completion_tokens
            self.charged[self._flow(one)] += (used - one.cost) / one.place.scheduling.weight
        service_class = int(one.place.scheduling.service_class)
        if all(o.place.scheduling.service_class != service_class for o in self.all.values()):
            self.charged = {f: c for f, c in self.charged.items() if f[0] != service_class}
            self.virtual_time[service_class] = 0.0

    def tokens_ahead(self, place: QueuePlace) -> int:
        """Return the prompt tokens ahead: of higher classes that may run, and of the same
        tenant."""
        held = self._held()
        return sum(
            o.place.prompt_tokens
            for o in self.all.values()
            if not o.is_running
            and (
                (
                    o.place.scheduling.service_class < place.scheduling.service_class
                    and (
                        self._flow(o) not in held
                        or o.place.scheduling.tenant == place.scheduling.tenant
                    )
                )
                or (self._flow(o) == self._flow_of(place) and o.place[1:3] <= place[1:3])
            )
        )

    def _flow(self, one: One) -> tuple[int, str]:
        return self._flow_of(one.place)

    def _flow_of(self, place: QueuePlace) -> tuple[int, str]:
        return (int(place.scheduling.service_class), place.scheduling.tenant)

    def _tag(self, one: One) -> float:
        return self.charged[self._flow(one)] if one.tag is None else one.tag

    def _is_allowed(self, one: One) -> bool:
        scheduling = one.place.scheduling
        running = [
            o
            for o in self.all.values()
            if o.is_running and o.place.scheduling.tenant == scheduling.tenant
        ]
        if not running:
            return True
        if scheduling.max_running is not None and len(running) >= scheduling.max_running:
            return False
        held = sum(o.cost for o in running) + one.cost
        return (
            scheduling.kv_share >= 1
            or not self.kv_tokens
            or held <= scheduling.kv_share * self.kv_tokens
        )
