"""Who was told to come back, and when: a line outside the door, in which nobody has to stand.

Pure. A refused client is told when there will be room for it: behind all who were told before. What
was promised counts as load to whoever comes anew, so that there is room when they return; they are
known again by what they ask for. How many do come is learnt, for a promise that nobody keeps would
leave capacity idle. Knows no queue.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.service_class import ServiceClass
from triolet.units import MILLISECONDS, SECONDS

if TYPE_CHECKING:
    from triolet.service_class import Claim

SLOT_S: Final = 250 * MILLISECONDS
"""How finely promised work is laid out in time."""
EARLY_S: Final = 50 * MILLISECONDS
"""Before it was told to a client is still in time: clocks and rounding."""
GRACE_S: Final = 3 * SECONDS
"""After it a client is waited for: `Retry-After` has whole seconds, and networks take their
time."""
TRUST: Final = 0.03
"""How far one client that comes, or does not, moves what is expected of the others."""
FIRST_SHARE: Final = 0.5
"""Of those told who are expected, before anything is known."""
LEAST_JITTER: Final = 0.8
MOST_JITTER: Final = 1.3
"""Of the predicted time, what a client is told: those refused together do not come together."""
FILL: Final = 0.9
"""Of the measured rate, up to which it is promised: what arrives at random needs some room."""
LEAST_S: Final = 0.1
"""A shorter wait would be over before the answer has arrived."""
MOST_S: Final = 120 * SECONDS
"""Official clients do not retry at all when told to wait longer."""


class Promise(NamedTuple):
    """One client that was told to come back.

    Attributes:
      due: when.
      claim: whose it is.
      num_tokens: of its prompt, as far as was known.
    """

    due: float
    claim: Claim
    num_tokens: int


class Promises:
    """All of one server.

    Args:
      max_promises: that are remembered.

    Attributes:
      shown_share: of those told who are expected to come.
    """

    def __init__(self, max_promises: int) -> None:
        self.shown_share = FIRST_SHARE
        self._max_promises = max_promises
        self._by_key: dict[int, Promise] = {}
        self._slots: dict[int, list[float]] = {}
        self._tenants: dict[str, tuple[float, float]] = {}  # tokens, weight
        self._tokens = self._weights = 0.0  # of all tenants
        self._forget_at: list[tuple[float, int]] = []  # a heap; what was redeemed is still in it
        self._full_until = [0.0] * len(ServiceClass)

    def __len__(self) -> int:
        return len(self._by_key)

    def kept_by(self, key: int, now: float) -> Promise | None:
        """Return the promise to a client that comes when it was told to; None for any other."""
        promise = self._by_key.get(key)
        if promise is None or not -EARLY_S <= now - promise.due <= GRACE_S:
            return None
        return promise

    def redeem(self, key: int, now: float) -> None:
        """Take in that a request was taken on; a promise to it has had its use."""
        promise = self._by_key.get(key)
        if promise is not None:
            if now >= promise.due - EARLY_S:
                self._learn(1.0)
            self._drop(key, promise)

    def promise(
        self,
        key: int,
        claim: Claim,
        num_tokens: int,
        *,
        room_in_s: float,
        tokens_per_s: float,
        draw: float,
        now: float,
    ) -> float:
        """Return after how many seconds a refused client should come back, and remember that.

        Args:
          key: names what it asks for; 0 for nothing that could be known again.
          claim: whose it is.
          num_tokens: of its prompt.
          room_in_s: when those who wait now will have made room for it.
          tokens_per_s: at which what is promised can be taken on.
          draw: between 0 and 1, at random.
          now: the time.
        """
        standing = self._by_key.get(key)
        if standing is not None and standing.due - now > EARLY_S:
            return standing.due - now  # came too early; its place is as it was
        if standing is not None:
            self._learn(1.0)
            self._drop(key, standing)
        own = claim.service_class
        begin = max(now + room_in_s, *self._full_until[: own + 1])
        work_s = self.shown_share * num_tokens / max(FILL * tokens_per_s, 1e-3)
        self._full_until[own] = min(begin + work_s, now + MOST_S)
        jitter = LEAST_JITTER + (MOST_JITTER - LEAST_JITTER) * draw
        wait_s = min(max((begin - now + work_s) * jitter, LEAST_S), MOST_S)
        if key and len(self._by_key) < self._max_promises:
            self._keep(key, Promise(now + wait_s, claim, num_tokens))
        return wait_s

    def ahead_tokens(self, claim: Claim, within_s: float, tokens_per_s: float, now: float) -> float:
        """Return the tokens that a newcomer has before it because they are promised: the most that
        will be there at once, beyond what is worked off until then.

        Args:
          claim: the newcomer's; lower classes are not before it, and other tenants only as far as
            their shares are.
          within_s: how long it may wait.
          tokens_per_s: at which work is done.
          now: the time.
        """
        if not self._slots:
            return 0.0
        own = claim.service_class
        share = self.shown_share * self._share_before(claim)
        first = int(now / SLOT_S)
        last = first + within_s / SLOT_S
        done = FILL * tokens_per_s * SLOT_S
        promised = most = 0.0
        for slot in sorted(slot for slot in self._slots if first <= slot <= last):
            promised += share * sum(self._slots[slot][: own + 1])
            most = max(most, promised - done * (slot - first))
        return most

    def forget(self, now: float) -> None:
        """Drop promises to clients that did not come."""
        while self._forget_at and self._forget_at[0][0] < now:
            _, key = heapq.heappop(self._forget_at)
            promise = self._by_key.get(key)
            if promise is not None and promise.due + GRACE_S < now:
                self._learn(0.0)
                self._drop(key, promise)

    def _keep(self, key: int, promise: Promise) -> None:
        self._by_key[key] = promise
        heapq.heappush(self._forget_at, (promise.due + GRACE_S, key))
        slot = self._slots.setdefault(int(promise.due / SLOT_S), [0.0] * len(ServiceClass))
        slot[promise.claim.service_class] += promise.num_tokens
        tokens, weight = self._tenants.get(promise.claim.tenant, (0.0, 0.0))
        self._tenants[promise.claim.tenant] = (tokens + promise.num_tokens, promise.claim.weight)
        self._tokens += promise.num_tokens
        self._weights += promise.claim.weight - weight

    def _drop(self, key: int, promise: Promise) -> None:
        del self._by_key[key]
        number = int(promise.due / SLOT_S)
        slot = self._slots[number]
        slot[promise.claim.service_class] -= promise.num_tokens
        if not any(slot):
            del self._slots[number]
        tenant = promise.claim.tenant
        tokens, weight = self._tenants[tenant]
        self._tokens -= promise.num_tokens
        if tokens <= promise.num_tokens:
            del self._tenants[tenant]
            self._weights = self._weights - weight if self._tenants else 0.0
        else:
            self._tenants[tenant] = (tokens - promise.num_tokens, weight)

    def _share_before(self, claim: Claim) -> float:
        """Return which part of what is promised goes before a newcomer's tenant: all of it, unless
        others were promised more than their weights give them beside it."""
        own, weight = self._tenants.get(claim.tenant, (0.0, claim.weight))
        others, weights = self._tokens - own, self._weights
        if claim.tenant not in self._tenants:
            weights += weight
        if others <= 0.0:
            return 1.0
        before = min(others, own * (weights - weight) / weight)
        return (own + before) / (own + others)

    def _learn(self, came: float) -> None:
        self.shown_share += TRUST * (came - self.shown_share)
