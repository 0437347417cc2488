"""The evidence of a rollout: counts by bucket, version and signal of the current step, the last
minute for the guard, incidents of workers, and costs.

Memory is bounded by NUM_BUCKETS tallies, WINDOW_S slots with as many buckets each, MAX_USERS users
and MAX_WORKERS workers. A request counts if its version was chosen in the current step, and is the
one that the plan's route gives to its bucket. All of it is msgspec structs, so it survives a
restart as JSON; stores leave out `warm_at`.
"""

from __future__ import annotations

import math
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import astuple

from triolet.config.routes import NUM_BUCKETS

from .inference import THETAS, log_factors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transport.rollout_protocol import FinishedRequest, SeenIncident, WorkDone

    from .plan import Objective, RolloutPlan, StepCosts

WINDOW_S: Final = 60
"""Seconds that the guard looks back."""
INCIDENT_S: Final = 10
"""Incidents of one worker within this time are one event: a crash is often followed by a failed
restart."""
MAX_WORKERS: Final = 10_000
"""Workers whose last incident is kept; incidents of others are ignored."""
MAX_USERS: Final = 100_000
"""Users whose first request is remembered, 10 MB; the times of others do not count."""
MIN_BATCH_S: Final = 0.05
"""Expected device time below which ten seconds of work are too little to compare costs."""


def is_bad_request(
    request: FinishedRequest, name: str, objective: Objective, *, is_cold: bool
) -> bool | None:
    """Return whether a request missed an objective; None if it says nothing about it.

    Args:
      request: the request.
      name: signal of the objective.
      objective: the objective.
      is_cold: whether the prefix cache may not have known the user.
    """
    if objective.limit_s is None:
        return name in request.missed
    if is_cold or name not in request.seconds:
        return None
    return request.seconds[name] > objective.limit_s


class BucketTally(msgspec.Struct):
    """Counts of one bucket in the current step.

    Attributes:
      is_canary: whether it is assigned to the candidate.
      is_fresh: whether it was on the stable version before this step.
      requests: requests that count, by signal.
      bad: of these, bad ones.
    """

    is_canary: bool
    is_fresh: bool
    requests: dict[str, int] = {}
    bad: dict[str, int] = {}


class WindowSlot(msgspec.Struct):
    """One signal's requests that ended in one second.

    Attributes:
      counts: good and bad requests to the stable version, then to the candidate.
      bad: bad requests by bucket.
    """

    counts: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0, 0])
    bad: dict[int, int] = {}


class StepLook(msgspec.Struct, frozen=True):
    """A test at the end of a step.

    Attributes:
      at: time of the test.
      seed: seed of its draws.
      p_values: by signal.
    """

    at: float
    seed: int
    p_values: dict[str, float]


class CostSums(msgspec.Struct):
    """Sums over batches of ten seconds, over all steps of the rollout.

    Attributes:
      batches: batches in which both versions worked.
      total: sum of the logarithms of their cost ratios.
      squares: sum of the squares of these.
    """

    batches: int = 0
    total: float = 0.0
    squares: float = 0.0


class RolloutEvidence(msgspec.Struct):
    """What is known about a rollout; starts with `RolloutEvidence().begin_step(plan, 0, now)`.

    Pairs of counts are of the stable version first, of the candidate second.

    Attributes:
      step: number of the current step.
      began_at: its start.
      now: time of the latest look.
      tallies: by bucket.
      first_bad: fresh buckets with a bad request, by signal.
      canary: requests to the candidate in this step, and buckets that they came from.
      warm_at: end of a user's first request; those that began earlier met a cold prefix cache.
      window: the last minute's requests, by second and signal.
      was_good: whether the stable version met the objective before this step, by signal.
      incidents: incidents in this step.
      incident_bets: logarithms of the bets on them.
      last_incident: slot of the latest incident, by worker.
      looks: tests at the end of this step.
      cost: costs since the rollout began.
      golden_difference: where the candidate's answer to a golden prompt has changed; empty if it
        has not.
      frozen_at: latest look in a freeze; 0 if there was none.
    """

    step: int = 0
    began_at: float = 0.0
    now: float = 0.0
    tallies: dict[int, BucketTally] = {}
    first_bad: dict[str, list[int]] = {}
    canary: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    warm_at: dict[int, float] = {}
    window: dict[int, dict[str, WindowSlot]] = {}
    was_good: dict[str, bool] = {}
    incidents: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    incident_bets: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(THETAS))
    last_incident: dict[str, int] = {}
    looks: list[StepLook] = []
    cost: CostSums = msgspec.field(default_factory=CostSums)
    golden_difference: str = ""
    frozen_at: float = 0.0

    @property
    def timed_from(self) -> float:
        """When the clock of the step began, which each freeze begins again: what was seen in a
        freeze is evidence, but no time in which the step could end."""
        return max(self.began_at, self.frozen_at)

    def begin_step(self, plan: RolloutPlan, step: int, now: float) -> RolloutEvidence:
        """Return the evidence of a new step, which keeps only the costs of the earlier ones.

        Args:
          plan: the plan.
          step: number of the step; 0 before the first one, lower than now for a step back.
          now: when servers had its route.
        """
        return RolloutEvidence(
            step,
            began_at=now,
            now=now,
            first_bad={name: [0, 0] for name in plan.objectives},
            was_good={
                name: not self.is_burning(name, objective, is_canary=False)
                for name, objective in plan.objectives.items()
            },
            cost=self.cost,
        )

    def add_requests(
        self, plan: RolloutPlan, requests: Iterable[FinishedRequest], now: float
    ) -> None:
        """Count the requests that have ended since the last look, given in any order."""
        self.now = now
        # A user's first request to end warms the prefix cache.
        for request in sorted(requests, key=attrgetter("ended_at")):
            tally = self._tally(plan, request)
            if tally is not None:
                self._count(plan, request, tally)
        oldest = int(now) - WINDOW_S
        self.window = {second: slot for second, slot in self.window.items() if second > oldest}

    def _tally(self, plan: RolloutPlan, request: FinishedRequest) -> BucketTally | None:
        """Return the tally of a request's bucket; None if the request does not count."""
        if request.chosen_at < self.began_at:
            return None
        bucket = request.user % NUM_BUCKETS
        known = tally = self.tallies.get(bucket)
        if tally is None:
            is_canary, was_canary = (
                plan.route(step, step).version_for("", str(bucket), 0.0) == plan.candidate
                for step in (self.step, max(0, self.step - 1))
            )
            tally = BucketTally(is_canary, not was_canary)
        if request.version != (plan.candidate if tally.is_canary else plan.stable):
            return None
        if known is None:
            self.tallies[bucket] = tally
            self.canary[1] += tally.is_canary
        self.canary[0] += tally.is_canary
        return tally

    def _count(self, plan: RolloutPlan, request: FinishedRequest, tally: BucketTally) -> None:
        second = int(min(request.ended_at, self.now))  # clocks of servers may be ahead
        if second not in self.window:
            self.window[second] = {name: WindowSlot() for name in plan.objectives}
        if len(self.warm_at) < MAX_USERS:
            self.warm_at.setdefault(request.user, request.ended_at)
        is_cold = request.chosen_at < self.warm_at.get(request.user, self.now)
        for name, objective in plan.objectives.items():
            is_bad = is_bad_request(request, name, objective, is_cold=is_cold)
            if is_bad is None:
                continue
            slot, bucket = self.window[second][name], request.user % NUM_BUCKETS
            slot.counts[2 * tally.is_canary + is_bad] += 1
            tally.requests[name] = tally.requests.get(name, 0) + 1
            if is_bad:
                slot.bad[bucket] = slot.bad.get(bucket, 0) + 1
                self.first_bad[name][tally.is_canary] += tally.is_fresh and name not in tally.bad
                tally.bad[name] = tally.bad.get(name, 0) + 1

    def add_incidents(
        self, plan: RolloutPlan, incidents: Iterable[SeenIncident], canary_share: float
    ) -> None:
        """Count the workers' incidents since the last look, given in any order.

        Args:
          plan: the plan.
          incidents: the incidents.
          canary_share: the candidate's share of workers. Without workers of both versions there is
            nothing to compare.
        """
        if not 0.0 < canary_share < 1.0:
            return
        for incident in sorted(incidents, key=astuple):
            slot = int(incident.at // INCIDENT_S)
            is_full = len(self.last_incident) >= MAX_WORKERS
            latest = self.last_incident.get(incident.worker, slot if is_full else -1)
            if incident.at < self.began_at or slot <= latest:
                continue
            self.last_incident[incident.worker] = slot
            is_canary = incident.version == plan.candidate
            self.incidents[is_canary] += 1
            moves = log_factors(canary_share)[is_canary]
            self.incident_bets = [sum(pair) for pair in zip(self.incident_bets, moves, strict=True)]

    def add_work(self, costs: StepCosts, stable: WorkDone, canary: WorkDone) -> None:
        """Compare the costs of ten seconds of work.

        Args:
          costs: of the stable version.
          stable: work of the stable version.
          canary: work of the candidate.
        """
        expected_s = [costs.expected_s(work) for work in (stable, canary)]
        if min(expected_s) < MIN_BATCH_S or min(stable.busy_s, canary.busy_s) <= 0.0:
            return
        # Only ratios of the same work: a version with few requests has small, expensive batches.
        ratio = math.log(canary.busy_s / expected_s[1] / (stable.busy_s / expected_s[0]))
        self.cost.batches += 1
        self.cost.total += ratio
        self.cost.squares += ratio**2

    def recent(self, name: str) -> tuple[int, int, int, int]:
        """Return a signal's good and bad requests to the stable version in the window, then those
        to the candidate."""
        slots = [slot[name].counts for slot in self.window.values()]
        good, bad, canary_good, canary_bad = map(sum, zip([0, 0, 0, 0], *slots, strict=True))
        return good, bad, canary_good, canary_bad

    def recent_bad(self, name: str, *, is_canary: bool) -> Counter[int]:
        """Return a version's bad requests in the window, by bucket."""
        bad: Counter[int] = Counter()
        for slot in self.window.values():
            bad.update(slot[name].bad)
        return Counter({b: n for b, n in bad.items() if self.tallies[b].is_canary == is_canary})

    def is_burning(self, name: str, objective: Objective, *, is_canary: bool) -> bool:
        """Return whether a version misses an objective by far, also without its worst bucket: one
        user may send a third of all requests."""
        good, bad = self.recent(name)[2:] if is_canary else self.recent(name)[:2]
        if not objective.is_burning(good, bad):
            return False
        worst = max(self.recent_bad(name, is_canary=is_canary).values())
        return objective.is_burning(good, bad - worst)

    def groups(self, name: str) -> dict[tuple[int, int], list[int]]:
        """Return the fresh buckets of each version, by (requests, bad requests)."""
        found: dict[tuple[int, int], list[int]] = {}
        for tally in self.tallies.values():
            if tally.is_fresh and name in tally.requests:
                key = tally.requests[name], tally.bad.get(name, 0)
                found.setdefault(key, [0, 0])[tally.is_canary] += 1
        return found
