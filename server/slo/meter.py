"""`SloMeter`: counts good and total events of each service level objective, from request events.
docs/SLO.md defines which events are good."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from triolet.config import ObjectivesConfig
from triolet.service_class import ServiceClass
from triolet.slo.burn_alerts import DEPLOYMENT, PAGES, SPANS_S
from triolet.slo.objectives import Indicator

from ..contract.request_events import (
    FirstTokenArrived,
    RequestDispatched,
    RequestEnded,
    RequestRefused,
)
from .event_windows import EventWindows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.slo.objectives import ServiceObjective

    from ..contract.request_events import RequestEvents, RequestFacts

ModelVersion: TypeAlias = tuple[str, str]
"""Name of a model, and digest of its version (empty for a model outside a store)."""
VERSION_SPANS_S: Final = tuple(
    {SPANS_S[window] for pair in (DEPLOYMENT, *PAGES) for window in (pair.long, pair.short)}
)


OTHERS: Final = "other"
"""Name for all tenants without their own counters."""


class TopTenants:
    """Chooses the tenants to show by name: those with the most tokens.

    Args:
      shown: number of tenants shown by name.
      tracked: number of tenants to compare; they are ranked again after this many requests.

    Attributes:
      names: the tenants to show by name.
    """

    def __init__(self, shown: int, tracked: int) -> None:
        self.names: set[str] = set()
        self._most_shown = shown
        self._most_tracked = max(shown, tracked)
        self._tokens: dict[str, float] = {}
        self._num_requests = 0

    def name_of(self, tenant: str) -> str:
        """Return the tenant's name, or OTHERS."""
        if tenant not in self.names:
            if len(self.names) >= self._most_shown:
                return OTHERS
            self.names.add(tenant)
        return tenant

    def add(self, tenant: str, tokens: int) -> bool:
        """Count a request's tokens; return whether the tenants were ranked again."""
        self._tokens[tenant] = self._tokens.get(tenant, 0) + tokens
        self._num_requests += 1
        if self._num_requests < self._most_tracked:
            return False
        self._num_requests = 0
        ranked = heapq.nlargest(self._most_tracked // 2, self._tokens, key=self._tokens.__getitem__)
        self.names = set(ranked[: self._most_shown])
        # Halve the counts, so that a tenant that was large long ago makes room.
        self._tokens = {name: self._tokens[name] / 2 for name in ranked}
        return True


class ObjectiveCounter:
    """The events of one objective.

    Args:
      objective: the objective.
      config: bounds.
      now: the current time.

    Attributes:
      objective: see Args.
      windows: all events.
      versions: the latest events of each version, the least recently used version first.
      rolled_back: those of candidates until their rollback, kept after the versions are gone.
      series: good and total events by model, digest, class and zone.
      tenants: good and total events by tenant.
    """

    def __init__(self, objective: ServiceObjective, config: ObjectivesConfig, now: float) -> None:
        self.objective = objective
        self.windows = EventWindows((*SPANS_S.values(), objective.window_s), now)
        self.versions: dict[ModelVersion, EventWindows] = {}
        self.rolled_back: deque[EventWindows] = deque(maxlen=config.kept_versions)
        self.series: defaultdict[tuple[str, ...], list[int]] = defaultdict(_no_events)
        self.tenants: defaultdict[str, list[int]] = defaultdict(_no_events)
        self._most_versions = config.kept_versions

    def add(
        self, of: RequestFacts | RequestRefused, zone: str, tenant: str, now: float, *, good: bool
    ) -> None:
        """Count an event.

        Args:
          of: the request.
          zone: zone of its decode worker; empty without one.
          tenant: name under which its tenant counts; empty without tenants.
          now: the current time.
          good: whether the event is good.
        """
        version = (of.model, of.model_digest)
        of_version = self.versions.pop(version, None)
        if of_version is None:
            if len(self.versions) >= self._most_versions:
                self.forget(next(iter(self.versions)))
            of_version = EventWindows(VERSION_SPANS_S, self.windows.began_at)
        self.versions[version] = of_version
        for windows in (self.windows, of_version):
            windows.add(now, is_good=good)
        counts = [self.series[(*version, of.service_class.name.lower(), zone)]]
        if tenant:
            counts.append(self.tenants[tenant])
        for good_and_total in counts:
            good_and_total[0] += good
            good_and_total[1] += 1

    def note_rollback(self, version: ModelVersion) -> None:
        """Set the latest events of a version that was rolled back apart. If it gets requests again,
        those count."""
        if version in self.versions:
            self.rolled_back.append(self.versions[version])
            self.versions[version] = EventWindows(VERSION_SPANS_S, self.windows.began_at)

    def forget(self, version: ModelVersion) -> None:
        """Drop the counts of a version."""
        del self.versions[version]
        for labels in [one for one in self.series if one[:2] == version]:
            del self.series[labels]


class SloMeter:
    """Counts the events of all objectives.

    Args:
      objectives: the objectives.
      config: bounds.
      clock: returns the time [s].

    Attributes:
      counters: the counts of each objective.
      clock: see Args.
      public_name: returns the public name of a version.
      began_at: time when counting began.
      slow_gap_s: time between two tokens above which a gap is slow.
      tenant_tokens: prompt and completion tokens of ended requests by shown tenant.
    """

    def __init__(
        self,
        objectives: Sequence[ServiceObjective] = (),
        config: ObjectivesConfig | None = None,
        clock: Callable[[], float] = float,
    ) -> None:
        config = config or ObjectivesConfig()
        self.clock = clock
        self.public_name: Callable[[str], str] = str
        self.began_at = clock()
        self.counters = [ObjectiveCounter(one, config, self.began_at) for one in objectives]
        of_gaps = (one for one in objectives if one.indicator is Indicator.INTER_TOKEN)
        self.slow_gap_s = max((one.threshold_s or math.inf for one in of_gaps), default=math.inf)
        self._top_tenants = TopTenants(config.shown_tenants, config.tracked_tenants)
        self.tenant_tokens: dict[str, int] = {}

    def subscribe_to(self, events: RequestEvents) -> None:
        """Start counting these events."""
        events.subscribe(RequestRefused, self.refused)
        events.subscribe(RequestDispatched, self.dispatched)
        events.subscribe(FirstTokenArrived, self.first_token)
        events.subscribe(RequestEnded, self.ended)

    def refused(self, event: RequestRefused) -> None:
        """Count a refusal that is not the client's fault. Refused batch lines do not count, because
        they are retried until accepted."""
        if event.status >= 500 and event.service_class is not ServiceClass.BATCH:
            self._count(Indicator.AVAILABILITY, event, "", is_bad=True)

    def dispatched(self, event: RequestDispatched) -> None:
        """Count a wait in the queue."""
        self._count(Indicator.QUEUE_WAIT, event.facts, event.zone, event.queue_s)

    def first_token(self, event: FirstTokenArrived) -> None:
        """Count a time to first token."""
        self._count(Indicator.FIRST_TOKEN, event.facts, event.zone, event.ttft_s)

    def ended(self, event: RequestEnded) -> None:
        """Count a request, and whether its stream was complete and without too many slow gaps."""
        facts, zone, is_failed = event.facts, event.zone, event.status >= 500
        if is_failed or event.status < 400:
            self._count(Indicator.AVAILABILITY, facts, zone, is_bad=is_failed)
        if facts.is_streamed:
            self._count(Indicator.STREAM_COMPLETION, facts, zone, is_bad=is_failed)
        if event.is_uneven is not None:
            self._count(Indicator.INTER_TOKEN, facts, zone, is_bad=event.is_uneven)
        tokens = event.counted.prompt_tokens + event.usage.completion_tokens
        if not facts.tenant:
            return
        shown = self._top_tenants.name_of(facts.tenant)
        self.tenant_tokens[shown] = self.tenant_tokens.get(shown, 0) + tokens
        if self._top_tenants.add(facts.tenant, tokens):
            counts: list[dict[str, Any]] = [self.tenant_tokens]
            counts += [counter.tenants for counter in self.counters]
            for by_tenant in counts:
                for name in by_tenant.keys() - self._top_tenants.names - {OTHERS}:
                    del by_tenant[name]

    def forget(self, model: str) -> None:
        """Drop the counts of a removed model."""
        for counter in self.counters:
            for version in [one for one in counter.versions if one[0] == model]:
                counter.forget(version)

    def _count(
        self,
        indicator: Indicator,
        of: RequestFacts | RequestRefused,
        zone: str,
        elapsed_s: float | None = None,
        *,
        is_bad: bool = False,
    ) -> None:
        """Count an event for each objective of an indicator.

        Args:
          indicator: the indicator.
          of: the request.
          zone: see `ObjectiveCounter.add`.
          elapsed_s: time to compare with the objective's threshold.
          is_bad: whether the event is bad whatever its time.
        """
        tenant = of.tenant and self._top_tenants.name_of(of.tenant)
        for counter in self.counters:
            objective = counter.objective
            if objective.indicator is not indicator:
                continue
            name = self.public_name(of.model) if objective.models else of.model
            if objective.covers(name, of.service_class):
                is_late = elapsed_s is not None and elapsed_s > (objective.threshold_s or math.inf)
                counter.add(of, zone, tenant, self.clock(), good=not (is_bad or is_late))


def _no_events() -> list[int]:
    return [0, 0]
