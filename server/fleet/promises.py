"""Who was told to come back, and when: a line outside the door, in which nobody has to stand.

Pure. A refused client is told when there will be room for it: behind what its tenant was promised
before, and behind what others were as far as their shares go. What was promised counts as load to
whoever comes anew, so that there is room when they return; they are known again by what they ask
for. How many do come is learnt, for a promise that nobody keeps would leave capacity idle. Knows no
queue.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from triolet.service_class import ServiceClass
from triolet.units import MILLISECONDS, SECONDS

from .bookings import Bookings
from .expected import Horizon
from .promised import Promise, Promised

if TYPE_CHECKING:
    from triolet.service_class import Claim

EARLY_S: Final = 50 * MILLISECONDS
"""Before it was told to a client is still in time: clocks and rounding."""
GRACE_S: Final = 3 * SECONDS
"""After it a client is still in time: `Retry-After` has whole seconds, and networks take their
time."""
TRUST: Final = 0.03
"""How far one client that comes, or does not, moves what is expected of the others."""
FIRST_SHARE: Final = 1.0
"""Of those told who are expected, before anything is known: a burst is over before anybody can have
come back from it. That nobody does is learnt when the first of them are late by `GRACE_S`: within
seconds of those who were told little, after minutes of those who were told more than
`PATIENCE_S`."""
SLACK: Final = 64
"""Notes of promises that have had their use are thrown away once they are more than this, and more
than those that stand: one told an hour ago would otherwise be noted for an hour."""
LEAST_JITTER: Final = 0.8
MOST_JITTER: Final = 1.3
"""Of the predicted time, what a client is told: those refused together do not come together."""
LEAST_S: Final = 0.1
"""A shorter wait would be over before the answer has arrived."""
PATIENCE_S: Final = 120 * SECONDS
"""Official clients do not retry at all when told to wait longer; others do. So what is expected of
those who were told less says nothing of those who were told more."""
MOST_S: Final = 3600 * SECONDS
"""Nobody is told more, nor promised anything then."""


class Promises:
    """All of one server.

    Args:
      max_promises: that are remembered; a tenant may have as many as are left, so that there is
        always room for another one's.

    Attributes:
      shown_shares: of those told who are expected to come: of those who were told to wait for at
        most `PATIENCE_S`, and of all others.
    """

    def __init__(self, max_promises: int) -> None:
        self.shown_shares = [FIRST_SHARE, FIRST_SHARE]
        self._max_promises = max_promises
        self._by_key: dict[int, Promise] = {}
        self._bookings = Bookings(MOST_S)
        self._promised = Promised()
        self._forget_at: list[tuple[float, int]] = []  # a heap; what was redeemed is still in it

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_notes(self) -> int:
        """Of times at which promises are forgotten, past ones included."""
        return len(self._forget_at)

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
        most_s: float = MOST_S,
    ) -> float:
        """Return after how many seconds a refused client should come back, and remember that. Room
        is booked only for those who are remembered.

        Args:
          key: names what it asks for; 0 for nothing that could be known again, or taken on.
          claim: whose it is.
          num_tokens: of its prompt.
          room_in_s: when those who wait now will have made room for it.
          tokens_per_s: at which work is done that the critical class leaves.
          draw: between 0 and 1, at random.
          now: the time.
          most_s: that it is told. Beyond, nothing is promised.
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
        line_s = self._bookings.begin_s(own, room_in_s, now) - room_in_s
        line_s *= self._promised.share_of_line(claim)
        done_s = room_in_s + line_s + work_s
        last_s = most_s / MOST_JITTER
        wait_s = max(jitter * min(done_s, last_s), LEAST_S)
        num_left = self._max_promises - len(self)
        if key and done_s <= last_s and self._promised.number(claim.tenant) < num_left:
            is_far = wait_s > PATIENCE_S
            # Whoever is told less than the class's line is long still takes room from all of it.
            self._bookings.book(own, room_in_s, self.shown_shares[is_far] * work_s, now)
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
        own = claim.service_class
        least = own if own is ServiceClass.CRITICAL else max(own, ServiceClass.SHEDDABLE)
        return self._promised.ahead_tokens(claim, least + 1, self._horizon(within_s, now))

    def above_tokens(self, claim: Claim, within_s: float, now: float) -> float:
        """Return the tokens of higher classes that will be there within some seconds, because they
        are promised too: they go before one that was let in."""
        return self._promised.tokens(claim.service_class, self._horizon(within_s, now))

    def forget(self, now: float) -> None:
        """Drop promises to clients that did not come."""
        while self._forget_at and self._forget_at[0][0] < now:
            _, key = heapq.heappop(self._forget_at)
            promise = self._by_key.get(key)
            if promise is not None and promise.due + GRACE_S < now:
                self._learn(promise, 0.0)
                self._drop(key, promise)

    def _horizon(self, within_s: float, now: float) -> Horizon:
        """Return who will be there within some seconds. Nothing is kept for those that are late:
        they find room all the same, and it would leave a twentieth of the capacity idle."""
        return Horizon(now, now + within_s, self.shown_shares)

    def _keep(self, key: int, promise: Promise) -> None:
        self._by_key[key] = promise
        self._promised.add(promise)
        heapq.heappush(self._forget_at, (promise.due + GRACE_S, key))
        if len(self._forget_at) > 2 * len(self._by_key) + SLACK:
            self._forget_at = [(one.due + GRACE_S, name) for name, one in self._by_key.items()]
            heapq.heapify(self._forget_at)

    def _drop(self, key: int, promise: Promise) -> None:
        del self._by_key[key]
        self._promised.remove(promise)

    def _learn(self, promise: Promise, came: float) -> None:
        believed = self.shown_shares[promise.is_far]
        self.shown_shares[promise.is_far] += TRUST * (came - believed)
