"""How many retries this server can afford, so that a sick fleet is not buried under them.

A bucket of tokens. Every accepted request pays in a tenth of a retry, time pays in a little, so
that a small fleet can recover at all, and the bucket holds a burst. What is taken out:

* Attempts that fail by one event are one fault and cost one token together: the loss of a worker's
  life, one device step that raised, one broken path between two workers, one silence for which a
  worker gave up leases. However many streams a worker had, its death costs one token: they have to
  be moved once, and a life can be lost once only.
* Everything else (a RESERVE without an answer, tokens that never came, an attempt that a worker
  ended with an error of its own) costs one token for each attempt. These are the faults that
  retries can multiply.

Being refused for want of room, preemption and drain are no faults and cost nothing. A request whose
retry cannot be paid for ends with an error. Knows faults by their names only; the clock is the
caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.units import SECONDS

if TYPE_CHECKING:
    from collections.abc import Hashable

    from triolet.config_recovery import RecoveryConfig

ONE_FAULT_S: Final = 2 * SECONDS
"""Attempts that fail by the same event within this time fail together. What one event brings about
arrives within moments; a path or a lease breaks a second time after two seconds at the earliest
(`kv_stall_s`, `lease_ttl_s`)."""


class RetryBudget:
    """One server's bucket.

    Args:
      config: what is paid in, and how much it holds.
      now: the time of the start; the bucket is full then.
    """

    def __init__(self, config: RecoveryConfig, now: float) -> None:
        self._config = config
        self._tokens = config.retry_burst
        self._filled_at = now
        # In the order of time: what was decided for each fault that several attempts share.
        self._decided: dict[Hashable, tuple[float, bool]] = {}

    @property
    def tokens(self) -> float:
        """Retries that can be afforded, as of the last call."""
        return self._tokens

    def earn(self) -> None:
        """Note an accepted request."""
        self._add(self._config.retry_share)

    def advance(self, now: float) -> None:
        """Let time pay in."""
        self._add((now - self._filled_at) * self._config.retry_floor_per_s)
        self._filled_at = now

    def is_new(self, fault: Hashable, now: float) -> bool:
        """Return whether nothing was paid for this fault lately."""
        self._forget(now)
        return fault not in self._decided

    def take(self, fault: Hashable, now: float) -> bool:
        """Pay for a retry; return False if it cannot be afforded.

        Args:
          fault: names the event; attempts that fail by the same one get the same answer.
          now: the time.
        """
        if not self.is_new(fault, now):
            return self._decided[fault][1]
        self.advance(now)
        is_affordable = self._tokens >= 1
        if is_affordable:
            self._tokens -= 1
        self._decided[fault] = (now, is_affordable)
        return is_affordable

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._tokens + tokens, self._config.retry_burst)

    def _forget(self, now: float) -> None:
        while self._decided:
            fault = next(iter(self._decided))
            if now - self._decided[fault][0] <= ONE_FAULT_S:
                return
            del self._decided[fault]
