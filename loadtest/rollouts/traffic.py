"""Generated traffic of a rollout: users, requests, incidents of workers, and work, from a seed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy
from msgspec.structs import replace

from transport.rollout_protocol import FinishedRequest, SeenIncident, WorkDone
from triolet.config.routes import NUM_BUCKETS, user_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ops.rollouts.plan import RolloutPlan
    from triolet.config.routes import Route

BASE_ERRORS: Final = 0.01
TTFT_S: Final = 0.3
TTFT_SIGMA: Final = 0.5
TTFT_LIMIT_S: Final = 0.768
"""3 % of the stable version's first tokens are later."""
COLD_S: Final = 0.6
"""Further time of a user's first prompt."""
REQUEST_S: Final = 0.7
"""A request lasts so much longer than its first token."""
TIMEOUT_S: Final = 10.0
OUTAGE_S: Final = 600.0
"""Time in which the largest user's requests end by a timeout."""
BURST_SHARE: Final = 0.05
"""A user has bursts in this share of all half minutes; half of its requests fail then."""
BURST_S: Final = 30.0
WORKERS: Final = 10
INCIDENTS_PER_S: Final = 1 / 600
"""Rate of a worker's crashes; half of the restarts fail once."""
BROKEN_S: Final = 20
"""Time between two crashes of a broken worker."""
BATCH_S: Final = 10
BATCH_STEPS: Final = 400


class Scenario(NamedTuple):
    """What happens in a rollout.

    Attributes:
      name: name for people.
      users: number of users.
      is_skewed: whether users are Zipf-distributed and the largest sends a third of all requests;
        else all send alike.
      rate: requests per second.
      errors: share of the candidate's requests that fail.
      stable_errors: the same of the stable version.
      slower: factor of the candidate's times to first token.
      dearer: factor of the candidate's device time.
      crashes: factor of the rate at which the candidate's workers crash.
      broken_s: time in which one worker, drawn by chance, crashes every 20 s whatever its version.
      noise: relative noise of device times, of each version.
      has_bursts: whether users have bursts of failures.
      is_shifting: whether rate, users and times change during the rollout, for both versions.
      has_timeouts: whether all requests of the largest user time out for ten minutes.
      outage_step: step from which on half of all requests fail, of both versions; 0 for none.
      errors_from: first step in which `errors` apply.
      golden_step: step in which a golden prompt gets another answer; 0 for none.
      shares: steps.
      bake_s: bake time.
      max_step_s: longest step.
    """

    name: str
    users: int = 400
    is_skewed: bool = False
    rate: float = 20.0
    errors: float = BASE_ERRORS
    stable_errors: float = BASE_ERRORS
    slower: float = 1.0
    dearer: float = 1.0
    crashes: float = 1.0
    broken_s: float = 0.0
    noise: float = 0.07
    has_bursts: bool = False
    is_shifting: bool = False
    has_timeouts: bool = False
    outage_step: int = 0
    errors_from: int = 1
    golden_step: int = 0
    shares: tuple[float, ...] = (0.1, 0.5, 1.0)
    bake_s: float = 60.0
    max_step_s: float = 3600.0


class Traffic:
    """The traffic of one rollout.

    Args:
      scenario: what happens.
      plan: the plan, which names the versions.
      seed: seed of all random numbers.

    Attributes:
      route: the production route that assigns requests.
      step: the rollout's step.
    """

    def __init__(self, scenario: Scenario, plan: RolloutPlan, seed: int) -> None:
        self.route: Route = plan.route(0, 0)
        self.step = 0
        self._scenario = scenario
        self._plan = plan
        self._rng = numpy.random.default_rng(seed)
        weights = numpy.ones(scenario.users)
        if scenario.is_skewed:
            weights = 1 / numpy.arange(1, scenario.users + 1) ** 1.1
            weights[0] = weights[1:].sum() / 2
        self._shares = numpy.cumsum(weights / weights.sum())
        self._users = [user_hash("tenant", f"user {user}") for user in range(scenario.users)]
        self._warm: set[tuple[int, bool]] = set()
        self._bursts: dict[int, NDArray[numpy.bool_]] = {}
        self._versions: dict[int, str] = {}
        self._running: list[FinishedRequest] = []
        self._outage_from = self._rng.uniform(-OUTAGE_S / 2, OUTAGE_S / 2)
        self._broken_from = self._rng.uniform(0, 4 * scenario.bake_s)
        self._broken_worker = int(self._rng.integers(WORKERS))

    def begin_step(self, step: int) -> None:
        """Assign requests by a step's route from now on."""
        self.step = step
        self.route = self._plan.route(step, step)
        self._versions.clear()

    def finished(self, since: float, now: float) -> list[FinishedRequest]:
        """Return the requests that end in a time."""
        self._running += self.arrivals(since, now)
        ended = [request for request in self._running if request.ended_at <= now]
        self._running = [request for request in self._running if request.ended_at > now]
        return ended

    @property
    def on_canary(self) -> int:
        """Number of the candidate's workers."""
        return math.ceil(self._plan.share(self.step) * WORKERS)

    def incidents(self, since: float, now: float) -> list[SeenIncident]:
        """Return the workers' incidents in a time."""
        on_canary, found = self.on_canary, []
        is_broken = 0 < now - self._broken_from <= self._scenario.broken_s
        for worker in range(WORKERS):
            is_due = is_broken and worker == self._broken_worker and now % BROKEN_S == 0
            factor = self._scenario.crashes if worker < on_canary else 1.0
            if self._rng.random() >= INCIDENTS_PER_S * factor * (now - since) and not is_due:
                continue
            version = self._plan.candidate if worker < on_canary else self._plan.stable
            first = SeenIncident(f"worker {worker}", now, version)
            found += [first] * int(self._rng.integers(1, 3))
        return found

    def work(self) -> tuple[WorkDone, WorkDone]:
        """Return ten seconds of work of the stable version and of the candidate."""
        share = self._plan.share(self.step)
        rows = self._scenario.rate
        stable = self._work(rows * (1.0 - share), 1.0)
        return stable, self._work(rows * share, self._scenario.dearer)

    def _work(self, rows: float, factor: float) -> WorkDone:
        """Return the work of a version whose steps have this many rows on average."""
        all_rows = int(self._rng.poisson(rows * BATCH_STEPS))
        work = WorkDone(0.0, BATCH_STEPS, all_rows, all_rows * 500, all_rows // 4)
        costs = self._plan.costs
        assert costs is not None, "the campaign compares costs"
        noise = self._rng.lognormal(sigma=self._scenario.noise)
        return replace(work, busy_s=costs.expected_s(work) * factor * noise)

    def arrivals(self, since: float, now: float) -> Iterator[FinishedRequest]:
        """Generate the requests that begin in a time, in any order."""
        scenario, rng = self._scenario, self._rng
        # A slow wave of load: more requests, longer queues, slower first tokens.
        wave = 1.0 + 0.6 * math.sin(now / 90.0) if scenario.is_shifting else 1.0
        count = rng.poisson(scenario.rate * wave * (now - since))
        users = numpy.searchsorted(self._shares, rng.random(count))
        if scenario.is_shifting:  # other users become active
            users = (users + int(now / 120.0) * 37) % scenario.users
        times = rng.uniform(since, now, count)
        chances = rng.random(count)
        ttfts_s = rng.lognormal(math.log(TTFT_S * wave**0.5), TTFT_SIGMA, count)
        queues_s = rng.exponential(0.2 * wave, count)
        for user, at, chance, ttft_s, queue_s in zip(
            users.tolist(), times.tolist(), chances, ttfts_s.tolist(), queues_s, strict=True
        ):
            version = self._versions.get(user)
            if version is None:
                bucket = self._users[user] % NUM_BUCKETS
                version = self.route.version_for("tenant", str(bucket), at)
                self._versions[user] = version
            yield self._request(user, version, at, chance, ttft_s, float(queue_s))

    def _request(
        self, user: int, version: str, at: float, chance: float, ttft_s: float, queue_s: float
    ) -> FinishedRequest:
        scenario, is_canary = self._scenario, version == self._plan.candidate
        if (user, is_canary) not in self._warm:
            self._warm.add((user, is_canary))
            ttft_s += COLD_S
        if is_canary:
            ttft_s *= scenario.slower
        errors = scenario.stable_errors
        if is_canary and self.step >= scenario.errors_from:
            errors = scenario.errors
        if scenario.has_bursts and self._is_in_burst(user, at):
            errors = 0.5
        if scenario.outage_step and self.step >= scenario.outage_step:
            errors = 0.5
        ended_at = at + queue_s + ttft_s + REQUEST_S
        is_lost = scenario.has_timeouts and user == 0 and 0 < at - self._outage_from < OUTAGE_S
        if is_lost:
            ended_at = at + TIMEOUT_S
        is_bad = is_lost or chance < errors
        missed = frozenset({"errors"}) if is_bad else frozenset[str]()
        seconds = {} if is_bad else {"ttft": ttft_s}
        return FinishedRequest(self._users[user], version, at, ended_at, missed, seconds)

    def _is_in_burst(self, user: int, at: float) -> bool:
        slot = int(at / BURST_S)
        if slot not in self._bursts:
            self._bursts[slot] = self._rng.random(self._scenario.users) < BURST_SHARE
        return bool(self._bursts[slot][user])
