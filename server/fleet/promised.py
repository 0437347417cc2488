"""What was promised to whom, and how much of that goes before a tenant.

Pure. What others were promised beyond their shares is their own line: it keeps nobody else waiting.
Knows promises and weights; decides no times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.service_class import ServiceClass

from .expected import Expected

if TYPE_CHECKING:
    from triolet.service_class import Claim

    from .expected import Horizon


class Promise(NamedTuple):
    """One client that was told to come back.

    Attributes:
      due: when.
      claim: whose it is.
      num_tokens: of its prompt, as far as was known; above 0.
      is_far: it was told to wait for longer than most do.
    """

    due: float
    claim: Claim
    num_tokens: int
    is_far: bool


class _Group:
    """Promises to one tenant, or to all.

    Attributes:
      weight: of the tenant, as it said last; of all, the sum of theirs.
      number: of promises.
      tokens: by class.
      expected: the same by when they are due.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self.number = 0
        self.tokens = [0] * len(ServiceClass)
        self.expected = Expected()

    def add(self, promise: Promise) -> None:
        own = promise.claim.service_class
        self.number += 1
        self.tokens[own] += promise.num_tokens
        self.expected.add(promise.due, own, promise.num_tokens, is_far=promise.is_far)

    def remove(self, promise: Promise) -> None:
        own = promise.claim.service_class
        self.number -= 1
        self.tokens[own] -= promise.num_tokens
        self.expected.remove(promise.due, own, promise.num_tokens, is_far=promise.is_far)


_NOTHING: Final = _Group()
"""To whom nothing is promised."""


class Promised:
    """All that one server has promised."""

    def __init__(self) -> None:
        self._all = _Group()
        self._tenants: dict[str, _Group] = {}

    def number(self, tenant: str) -> int:
        """Return how many promises a tenant has."""
        return self._tenants.get(tenant, _NOTHING).number

    def add(self, promise: Promise) -> None:
        """Count a promise."""
        claim = promise.claim
        tenant = self._tenants.setdefault(claim.tenant, _Group())
        self._all.weight += claim.weight - tenant.weight
        tenant.weight = claim.weight
        for group in (self._all, tenant):
            group.add(promise)

    def remove(self, promise: Promise) -> None:
        """Count out one that was counted."""
        tenant = self._tenants[promise.claim.tenant]
        for group in (self._all, tenant):
            group.remove(promise)
        if not tenant.number:
            del self._tenants[promise.claim.tenant]
            self._all.weight = self._all.weight - tenant.weight if self._tenants else 0.0

    def share_of_line(self, claim: Claim) -> float:
        """Return which part of its class's line goes before a newcomer: all that higher classes
        were promised, and of its own class what its tenant was, and others as far as their shares
        go."""
        own = claim.service_class
        above = sum(self._all.tokens[:own])
        mine, tokens = self._tenants.get(claim.tenant, _NOTHING).tokens[own], self._all.tokens[own]
        before = above + self._before(claim, mine, tokens)
        return before / (above + tokens) if tokens > mine else 1.0

    def ahead_tokens(self, claim: Claim, num_classes: int, horizon: Horizon) -> float:
        """Return the tokens of the highest classes that come and go before a newcomer's tenant: its
        own, and those of others as far as their shares go."""
        tenant = self._tenants.get(claim.tenant)
        if tenant is None:
            return 0.0
        mine = tenant.expected.tokens(num_classes, horizon)
        if tenant.number == self._all.number:
            return mine
        return self._before(claim, mine, self._all.expected.tokens(num_classes, horizon))

    def tokens(self, num_classes: int, horizon: Horizon) -> float:
        """Return the tokens of the highest classes that come."""
        return self._all.expected.tokens(num_classes, horizon)

    def _before(self, claim: Claim, mine: float, tokens: float) -> float:
        """Return how much of what all were promised goes before a tenant that was promised some."""
        tenant = self._tenants.get(claim.tenant, _NOTHING)
        others = (self._all.weight - tenant.weight) / claim.weight
        return mine + min(tokens - mine, mine * others)
