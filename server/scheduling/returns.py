"""When refused requests are told to return, and which of them are known when they do: a virtual
schedule of each tenant's refused requests, and a bounded table of due times by key."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

from triolet.service_class import ServiceClass
from triolet.units import MILLISECONDS, SECONDS

if TYPE_CHECKING:
    from triolet.config import AdmissionConfig
    from triolet.service_class import Scheduling

EARLY_S: Final = 50 * MILLISECONDS
"""A request that comes so much before its due time is in time: clocks and rounding."""
GRACE_S: Final = 3 * SECONDS
"""So much after it, too: `Retry-After` has whole seconds, and networks take their time."""
TRUST: Final = 0.03
"""How far one request that returns, or does not, moves `shown_share`."""
LEAST_S: Final = 0.1
"""Shortest time that is told: less would be over before the answer has arrived."""
PATIENCE_S: Final = 120 * SECONDS
"""Official clients do not retry at all when told to wait longer; others do."""
NEVER: Final = (-inf, "")
MOST_S: Final = 3600 * SECONDS
"""Longest time that is told; a request that would be due later is not remembered."""


class Returns:
    """The refused requests of one server.

    Args:
      config: bounds, and the pace of the schedule.

    Attributes:
      shown_share: of the requests that were told a time, how many return; 1 before any is due, as a
        burst is over before the first of it can return.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self.shown_share = 1.0
        self._config = config
        self._due: dict[int, tuple[float, str]] = {}  # and of which tenant, by key
        self._num_of: Counter[str] = Counter()
        self._schedules: dict[str, tuple[float, float]] = {}  # end and weight, by tenant
        self._weight = 0.0  # of all that have a schedule
        self._forget_at = 0.0
        self._soonest = inf  # due, or earlier until the next scan

    def __len__(self) -> int:
        return len(self._due)

    def is_due(self, key: int, now: float) -> bool:
        """Return whether a request comes when it was told to."""
        due, _ = self._due.get(key, NEVER)
        return -EARLY_S <= now - due <= GRACE_S

    def are_due_by(self, moment: float) -> bool:
        """Return whether a refused request is expected until a moment."""
        return self._soonest <= moment

    def told_s(
        self,
        key: int,
        scheduling: Scheduling,
        work_s: float,
        *,
        room_in_s: float,
        draw: float,
        now: float,
        most_s: float = MOST_S,
    ) -> float:
        """Return after how many seconds a refused request should come back, and remember that.

        Args:
          key: names what is asked for; 0 for what cannot be known again, or never be in time.
          scheduling: of its tenant, and its class: a critical request is behind no schedule.
          work_s: computing time of its prompt, at the rate that the critical class leaves.
          room_in_s: when the requests that wait now will have made room for it.
          draw: between 0 and 1, at random.
          now: the time.
          most_s: the longest time that is told.
        """
        config = self._config
        standing, _ = self._due.get(key, NEVER)
        if standing - now > EARLY_S:
            return standing - now  # came too early; its place is as it was
        self.came(key, now)
        end, weight = self._schedules.get(scheduling.tenant, (now, 0.0))
        is_behind = scheduling.service_class is not ServiceClass.CRITICAL
        weights = self._weight + scheduling.weight - weight
        step_s = (
            self.shown_share * work_s * weights / (config.return_rate_share * scheduling.weight)
        )
        begin_s = max(room_in_s, end - now) if is_behind else room_in_s
        done_s = begin_s + work_s
        last_s = most_s / config.retry_jitter_most
        spread = config.retry_jitter_most - config.retry_jitter_least
        jitter = config.retry_jitter_least + spread * draw
        wait_s = max(jitter * min(done_s, last_s), LEAST_S)
        if key and done_s <= last_s and self._has_room_for(scheduling.tenant):
            self._due[key] = now + wait_s, scheduling.tenant
            self._num_of[scheduling.tenant] += 1
            self._soonest = min(self._soonest, now + wait_s)
            if is_behind:
                self._weight = weights
                self._schedules[scheduling.tenant] = now + begin_s + step_s, scheduling.weight
        return wait_s

    def came(self, key: int, now: float) -> None:
        """Count a request that came and was decided upon: it is not expected any more."""
        if key not in self._due:
            return
        if now >= self._drop(key) - EARLY_S:
            self._learn(1.0)

    def forget(self, now: float) -> None:
        """Drop requests that did not return, as often as one can become late."""
        if now < self._forget_at:
            return
        self._forget_at = now + GRACE_S
        for key in [key for key, (due, _) in self._due.items() if due + GRACE_S < now]:
            self._drop(key)
            self._learn(0.0)
        self._soonest = min((due for due, _ in self._due.values()), default=inf)
        self._schedules = {name: one for name, one in self._schedules.items() if one[0] > now}
        self._weight = sum(weight for _, weight in self._schedules.values())

    def _has_room_for(self, tenant: str) -> bool:
        """Whether one more of a tenant's is remembered: half of what the others leave, at most."""
        return self._num_of[tenant] < self._config.max_expected_returns - len(self._due)

    def _drop(self, key: int) -> float:
        due, tenant = self._due.pop(key)
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        return due

    def _learn(self, shown: float) -> None:
        self.shown_share += TRUST * (shown - self.shown_share)
