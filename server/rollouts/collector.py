"""Collects what happens to requests and workers of models with a rollout, for control."""

from __future__ import annotations

import math
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from transport.control_protocol import Observed
from transport.rollout_protocol import FinishedRequest, RolloutPhase, SeenIncident
from triolet.config.routes import RoutesConfig
from triolet.units import SECONDS

from ..contract.request_events import RequestEnded
from ..scheduling.control_link import RolloutReports
from ..slo.meter import SloMeter
from ..slo.report import firing_pages, rows_of, slo_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.rollout_protocol import CandidateReport, RolloutView

    from ..contract.generation import AssignedVersion
    from ..contract.request_events import RequestEvents
    from ..scheduling.status import Observer
    from .candidates import Candidates

AT_ONCE: Final = 1000
"""Requests in one message, and incidents that wait: with names of 200 bytes, either take less than
half of the 1 MiB that a message may have."""
CLIENTS_OWN: Final = frozenset({403, 408, 429, 499})
"""Statuses that say nothing about a version: what a tenant may not do, its limits, a client that
does not read, and one that left."""
CLIENT_GONE: Final = 499
LOOK_S: Final = 1.0 * SECONDS
"""Interval at which objectives are looked at: a millisecond with ten versions, while reports may be
more frequent."""


def missed_by(status: int) -> frozenset[str]:
    """Return the objectives without a limit that a request with this status missed."""
    if status >= 500:
        return frozenset({"errors"})
    return frozenset({"rejected"} if status >= 400 and status not in CLIENTS_OWN else ())


class RolloutCollector(RolloutReports):
    """Keeps what control has not been told yet, in bounded memory.

    Args:
      config: bounds.
      slos: counts the objectives, whose alerts and budgets freeze rollouts.
      wall: returns the Unix time.

    Attributes:
      views: the rollouts of the latest news.
      tested: tests their candidates; None without control.
    """

    def __init__(
        self,
        config: RoutesConfig | None = None,
        slos: SloMeter | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.views: tuple[RolloutView, ...] = ()
        self.tested: Candidates | None = None
        self._slos = slos or SloMeter()
        self._wall = wall
        most = (config or RoutesConfig()).max_observed
        self._ended: deque[FinishedRequest] = deque(maxlen=most)
        self._incidents: deque[SeenIncident] = deque(maxlen=AT_ONCE)
        self._looked_at = -math.inf
        self._freezes: list[str] = []

    def watch(self, version: str, events: RequestEvents, observer: Observer) -> None:
        """Collect what happens to a version from now on."""
        events.subscribe(RequestEnded, self.ended)
        observer.incident = partial(self.note_incident, version)

    def hear(self, views: tuple[RolloutView, ...]) -> None:
        """Collect for these rollouts only."""
        known = {view.id for view in self.views if view.phase is RolloutPhase.ROLLED_BACK}
        self.views = views
        for view in views:
            if view.phase is RolloutPhase.ROLLED_BACK and view.id not in known:
                for counter in self._slos.counters:
                    counter.note_rollback((view.candidate, view.candidate_digest))
        if self.tested is not None:
            self.tested.use(views)

    def ended(self, event: RequestEnded) -> None:
        """Record an ended request."""
        assigned, usage = event.facts.assigned, event.usage
        if assigned is None:
            return
        seconds = {}
        # A client that leaves without a token has waited at least as long as it did.
        waited_s = event.elapsed_s if event.status == CLIENT_GONE and event.is_begun else None
        ttft_s = waited_s if usage.ttft_s is None else usage.ttft_s
        if ttft_s is not None:
            seconds["ttft"] = ttft_s - usage.queue_s
        if event.is_uneven is not None:
            # Gaps are only compared with the objective: above it, or not.
            seconds["itl"] = 2 * self._slos.slow_gap_s if event.is_uneven else 0.0
        self._add(assigned, missed_by(event.status), seconds)

    def refused(self, assigned: AssignedVersion, status: int) -> None:
        """Record a request that failed before it was submitted, unless that is the client's own."""
        if missed := missed_by(status):
            self._add(assigned, missed, {})

    def _add(
        self, assigned: AssignedVersion, missed: frozenset[str], seconds: dict[str, float]
    ) -> None:
        if all(view.model != assigned.model for view in self.views):
            return
        user, version, chosen_at = assigned.user, assigned.version, assigned.chosen_at
        request = FinishedRequest(user, version, chosen_at, self._wall(), missed, seconds)
        self._ended.append(request)

    def note_incident(self, version: str, worker: str) -> None:
        """Record that a worker of a version crashed, hung or failed a step."""
        if any(version in (view.stable, view.candidate) for view in self.views):
            self._incidents.append(SeenIncident(worker, self._wall(), version))

    def take(self, server: str) -> list[Observed]:
        """Return what is new, as messages of bounded size; none if nothing is."""
        requests, incidents = tuple(self._ended), tuple(self._incidents)
        self._ended.clear()
        self._incidents.clear()
        parts = [requests[at : at + AT_ONCE] for at in range(0, len(requests), AT_ONCE)]
        messages = [Observed(server, part) for part in parts]
        return [*messages, Observed(server, (), incidents)] if incidents else messages

    def freezes(self) -> list[str]:
        """Return why no rollout should go on, as far as the objectives say. The alert that a
        candidate caused before its rollback is no reason."""
        counters, now = self._slos.counters, self._slos.clock()
        if now < self._looked_at + LOOK_S:
            return self._freezes
        self._looked_at = now
        rows, observed_s = rows_of(counters, now), now - self._slos.began_at
        report = slo_report([one.objective for one in counters], rows, observed_s)
        burning = firing_pages(counters, now)
        spent = [report["reason"]] if report["is_frozen"] else []
        self._freezes = [*spent, *(f"the page alert of {name} fires" for name in burning)]
        return self._freezes

    def candidates(self) -> dict[str, CandidateReport]:
        """Return what is known about the candidates, by version."""
        return {} if self.tested is None else self.tested.reports()
