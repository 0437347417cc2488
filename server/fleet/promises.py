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

from .bookings import SLOT_S, Bookings

if TYPE_CHECKING:
    from triolet.service_class import Claim

EARLY_S: Final = 50 * MILLISECONDS
"""Before it was told to a client is still in time: clocks and rounding."""
GRACE_S: Final = 3 * SECONDS
"""After it a client is waited for: `Retry-After` has whole seconds, and networks take their
time."""
TRUST: Final = 0.03
"""How far one client that comes, or does not, moves what is expected of the others."""
FIRST_SHARE: Final = 1.0
"""Of those told who are expected, before anything is known: a burst is over before anybody can have
come back from it, and that nobody does is learnt within a second of overload."""
LEAST_JITTER: Final = 0.8
MOST_JITTER: Final = 1.3
"""Of the predicted time, what a client is told: those refused together do not come together."""
LEAST_S: Final = 0.1
"""A shorter wait would be over before the answer has arrived."""
PATIENCE_S: Final = 120 * SECONDS
"""Official clients do not retry at all when told to wait longer; others do. So what is expected of
those who were told less says nothing of those who were told more."""
MOST_S: Final = 3600 * SECONDS
"""Nobody is told more: what a line of this length is told makes no difference to anybody."""


class Promise(NamedTuple):
    """One client that was told to come back.

    Attributes:
      due: when.
      claim: whose it is.
      num_tokens: of its prompt, as far as was known.
      is_far: it was told to wait for longer than most do.
    """

    due: float
    claim: Claim
    num_tokens: int
    is_far: bool


class Promises:
    """All of one server.

    Args:
      max_promises: that are remembered.

    Attributes:
      shown_shares: of those told who are expected to come: of those who were told to wait for at
        most `PATIENCE_S`, and of all others.
    """

    def __init__(self, max_promises: int) -> None:
        self.shown_shares = [FIRST_SHARE, FIRST_SHARE]
        self._max_promises = max_promises
        self._by_key: dict[int, Promise] = {}
        self._bookings = Bookings(MOST_S)
        self._slots: dict[int, list[list[float]]] = {}  # tokens: near and far, by class
        self._tenants: dict[str, tuple[float, float]] = {}  # tokens, weight
        self._tokens = self._weights = 0.0  # of all tenants
        self._forget_at: list[tuple[float, int]] = []  # a heap; what was redeemed is still in it

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
                self._learn(promise, 1.0)
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
          tokens_per_s: at which work is done that the critical class leaves.
          draw: between 0 and 1, at random.
          now: the time.
        """
        standing = self._by_key.get(key)
        if standing is not None and standing.due - now > EARLY_S:
            return standing.due - now  # came too early; its place is as it was
        if standing is not None:
            self._learn(standing, 1.0)
            self._drop(key, standing)
        jitter = LEAST_JITTER + (MOST_JITTER - LEAST_JITTER) * draw
        work_s = num_tokens / max(tokens_per_s, 1e-3)
        own = claim.service_class
        line_s = self._bookings.line_s(own, room_in_s, now)
        is_far = jitter * line_s > PATIENCE_S
        done_s = self._bookings.book(own, room_in_s, self.shown_shares[is_far] * work_s, now)
        wait_s = min(max(jitter * (done_s + work_s), LEAST_S), MOST_S)
        if key and len(self._by_key) < self._max_promises:
            self._keep(key, Promise(now + wait_s, claim, num_tokens, is_far))
        return wait_s

    def ahead_tokens(self, claim: Claim, within_s: float, now: float) -> float:
        """Return the tokens that a newcomer has before it because they are promised: all that will
        be there within what it may wait. Those who wait now take until then, too, so that it is let
        in where there is more room than for them both.

        Args:
          claim: the newcomer's; a critical one has no lower class before it, whoever else was let
            in before has to leave room also for those who were refused first, and other tenants
            are before it only as far as their shares are.
          within_s: how long it may wait.
          now: the time.
        """
        if not self._slots:
            return 0.0
        own = claim.service_class
        least = own if own is ServiceClass.CRITICAL else max(own, ServiceClass.SHEDDABLE)
        return self._share_before(claim) * self._due_tokens(least + 1, within_s, now)

    def above_tokens(self, claim: Claim, within_s: float, now: float) -> float:
        """Return the tokens of higher classes that will be there within some seconds, because they
        are promised too: they go before one that was let in."""
        return self._due_tokens(claim.service_class, within_s, now)

    def forget(self, now: float) -> None:
        """Drop promises to clients that did not come."""
        while self._forget_at and self._forget_at[0][0] < now:
            _, key = heapq.heappop(self._forget_at)
            promise = self._by_key.get(key)
            if promise is not None and promise.due + GRACE_S < now:
                self._learn(promise, 0.0)
                self._drop(key, promise)

    def _due_tokens(self, num_classes: int, within_s: float, now: float) -> float:
        """Return the tokens of the highest classes that are expected within some seconds."""
        slots = self._slots
        first = int(now / SLOT_S)
        last = first + within_s / SLOT_S
        if last - first < len(slots):
            found = [slots[slot] for slot in range(first, int(last) + 1) if slot in slots]
        else:
            found = [tokens for slot, tokens in slots.items() if first <= slot <= last]
        return sum(
            share * sum(tokens[:num_classes])
            for slot in found
            for share, tokens in zip(self.shown_shares, slot, strict=True)
        )

    def _keep(self, key: int, promise: Promise) -> None:
        self._by_key[key] = promise
        heapq.heappush(self._forget_at, (promise.due + GRACE_S, key))
        slot = self._slots.setdefault(
            int(promise.due / SLOT_S), [[0.0] * len(ServiceClass) for _ in self.shown_shares]
        )
        slot[promise.is_far][promise.claim.service_class] += promise.num_tokens
        tokens, weight = self._tenants.get(promise.claim.tenant, (0.0, 0.0))
        self._tenants[promise.claim.tenant] = (tokens + promise.num_tokens, promise.claim.weight)
        self._tokens += promise.num_tokens
        self._weights += promise.claim.weight - weight

    def _drop(self, key: int, promise: Promise) -> None:
        del self._by_key[key]
        number = int(promise.due / SLOT_S)
        slot = self._slots[number]
        slot[promise.is_far][promise.claim.service_class] -= promise.num_tokens
        if not any(map(any, slot)):
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

    def _learn(self, promise: Promise, came: float) -> None:
        believed = self.shown_shares[promise.is_far]
        self.shown_shares[promise.is_far] += TRUST * (came - believed)
