"""Enforces tenants' limits on one server: reserves quota before a request runs, and charges what it
used."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import trio

from triolet.errors import RequestError, invalid_request
from triolet.units import NANOS

from ..contract.generation import RequestCost
from ..contract.request_events import AnswerRepeated, RequestAccepted, RequestEnded
from .accounts import (
    MINUTE_S,
    Account,
    Limit,
    QuotaAsk,
    Settlement,
    TenantLimits,
    cost_of,
    limits_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from triolet.tenants.plans import Plan, Prices, Tenant

    from ..contract.generation import Usage
    from ..contract.request_events import RequestEvents
    from .memory_store import MemoryStore, QuotaObserver, SpendWatch
    from .redis_store import RedisStore


GROWTH: Final = 1.2
"""Ratio of neighbouring bin bounds: the most by which an estimate is too long."""
NUM_BINS: Final = 80
"""Covers up to 1.2 ** 80, two million tokens."""
MAX_COUNT: Final = 1000.0
QUANTILE: Final = 0.9
MIN_COMPLETIONS: Final = 20
"""Completions after which a tenant's own lengths are used instead of the defaults below: the 90th
percentile of a hundred is known to about a tenth."""
UNKNOWN_COMPLETION_TOKENS: Final = 512
"""Reserved for a completion of a tenant that is not known yet: a long answer."""
UNKNOWN_SHARE: Final = 0.1
"""Maximum share of a minute's tokens reserved that way. A tenant with a small limit could otherwise
run one request at a time until it is known."""
VIEW_S: Final = 1.0
"""Maximum age of a known account to refuse a request from it without asking the store."""
CONCURRENT_RETRY_S: Final = 1.0
"""Retry-After when all concurrent requests are taken: it is unknown when one ends."""


class CompletionLengths:
    """A histogram of one tenant's completion lengths."""

    def __init__(self) -> None:
        self._counts = [0.0] * NUM_BINS
        self._total = 0.0
        self.num_seen = 0

    def add(self, num_tokens: int) -> None:
        """Count a completion."""
        self.num_seen += 1
        position = math.ceil(math.log(max(num_tokens, 1), GROWTH))
        self._counts[min(position, NUM_BINS - 1)] += 1
        self._total += 1
        if self._total >= MAX_COUNT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def p90(self) -> int:
        """Return the 90th percentile of the lengths; 1 if there were none."""
        wanted = QUANTILE * self._total
        seen = 0.0
        for position, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return math.ceil(GROWTH**position)
        return 1


def refusal(plan: Plan, limit: Limit, wait_s: float) -> RequestError:
    """Return the 429 error for a limit that refuses a request.

    Args:
      plan: the plan with the limit.
      limit: the limit that refuses.
      wait_s: time until it accepts again; 0 if unknown.
    """
    code, retry_after_s = "rate_limit_exceeded", wait_s if wait_s > 0 else None
    match limit:
        case Limit.BUDGET:
            # No client waits until the next month.
            code, retry_after_s = "insufficient_quota", None
            what = f"the budget of the plan {plan.name} for this month (UTC) is spent"
        case Limit.CONCURRENT:
            what = f"the plan {plan.name} allows {plan.max_concurrent} requests at once"
        case Limit.REQUESTS:
            what = f"the plan {plan.name} allows {plan.requests_per_minute:g} requests a minute"
        case Limit.TOKENS:
            what = f"the plan {plan.name} allows {plan.tokens_per_minute:g} tokens a minute"
    return RequestError(what, status=429, code=code, retry_after_s=retry_after_s)


class AskedTokens(NamedTuple):
    """One sequence or embedding input of a request.

    Attributes:
      request_id: its id.
      prompt_tokens: prompt tokens charged; 0 for another completion of the same prompt.
      max_tokens: maximum completion tokens.
      model: the model that computes it, with its own prices.
      largest: the last model of the ladder that `auto` chose from; empty if the client named the
        model.
    """

    request_id: bytes
    prompt_tokens: int
    max_tokens: int
    model: str = ""
    largest: str = ""


class Reservation:
    """The reservation of one client request. Leaving the context before anything is accepted
    releases it.

    Args:
      ask: the reservation.
      asked: its sequences; empty if nothing is reserved.
      settle: called once, when all sequences have ended.

    Attributes:
      open: sequences that have not ended, by id.
      tokens: tokens used by ended sequences.
      cost: cost of these tokens [nanos].
      is_counted: it counts as a request, whatever tokens it used.
    """

    def __init__(
        self, ask: QuotaAsk, asked: Sequence[AskedTokens], settle: Callable[[Reservation], None]
    ) -> None:
        self.ask = ask
        self.open = {one.request_id: one for one in asked}
        self.is_accepted = not asked
        self.tokens = self.cost = 0
        self.is_counted = False
        self._settle = settle

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Release the whole reservation, unless a sequence was accepted. Idempotent."""
        if not self.is_accepted:
            self.is_accepted = True
            self._settle(self)

    def take(self, request_id: bytes, tokens: int, cost: int, *, is_begun: bool) -> None:
        """Add the use of one ended sequence; the last one settles the reservation."""
        del self.open[request_id]
        self.tokens += tokens
        self.cost += cost
        self.is_counted |= is_begun
        if not self.open:
            self._settle(self)


class Ticket:
    """One client request between its arrival and its reservation; it counts as in flight.

    Args:
      close: called once at its end, with whether it counts as a request by itself.

    Attributes:
      has_cost: work was spent on it, such as reading its body. It then counts as a request unless
        it is reserved or spared.
    """

    def __init__(self, close: Callable[[bool], None]) -> None:
        self._close = close
        self._is_open = True
        self.has_cost = False

    def spare(self) -> None:
        """End it without counting it as a request: the reservation counts it, or the server failed.
        Idempotent."""
        self.has_cost = False
        self.end()

    def end(self) -> None:
        """End it. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._close(self.has_cost)


class Quotas:
    """All tenants' limits, as enforced by one server.

    Args:
      store: the store of accounts.
      watch: receives the plans, for alerts.
      metrics: counts refusals and costs.
      prices: returns the current prices of a model by its name.
    """

    def __init__(
        self,
        store: MemoryStore | RedisStore,
        watch: SpendWatch,
        metrics: QuotaObserver,
        prices: Callable[[str], Prices],
    ) -> None:
        self.store = store
        self._watch = watch
        self._metrics = metrics
        self._prices = prices
        self._running: dict[bytes, Reservation] = {}
        self._lengths: dict[str, CompletionLengths] = {}
        self._limits: dict[str, TenantLimits] = {}
        self._tickets: dict[str, int] = {}
        self._reservations: dict[str, int] = {}

    @property
    def num_open(self) -> int:
        """Number of sequences that are not charged yet."""
        return len(self._running)

    def num_under_way(self, tenant: str) -> int:
        """Return the number of a tenant's requests here that have arrived and not ended."""
        return self._tickets.get(tenant, 0) + self._reservations.get(tenant, 0)

    def check(self, tenant: Tenant) -> None:
        """Refuse a tenant with an exhausted limit, without a round trip. A tenant with a little
        left passes.

        Raises:
          RequestError: 429.
        """
        self._check(tenant, uses_tokens=True)

    def enter(self, tenant: Tenant, *, uses_tokens: bool, is_charged: bool) -> Ticket:
        """Accept a request, or refuse it before its body is read.

        Args:
          tenant: the request's tenant.
          uses_tokens: it needs tokens, not only text processing.
          is_charged: it may count as a request even without a reservation.

        Raises:
          RequestError: 429; a limit of the tenant is exhausted, or too many of its requests are in
          flight.
        """
        name = tenant.name
        self._check(tenant, uses_tokens=uses_tokens, has_to_enter=True)
        self._tickets[name] = self._tickets.get(name, 0) + 1

        def close(has_cost: bool) -> None:
            self._tickets[name] -= 1
            if has_cost and is_charged:
                self.count_request(tenant)

        return Ticket(close)

    async def reserve(
        self, tenant: Tenant, asked: Sequence[AskedTokens], once_id: str = ""
    ) -> Reservation:
        """Reserve the expected use of a request.

        Args:
            tenant: the request's tenant.
            asked: its sequences, all of one model; empty if nothing is computed.
            once_id: see `Settlement`.

          Returns:
            A context manager for the submission of the request.

          Raises:
            RequestError: 429 for a limit; 400 if the prompts alone exceed a minute's tokens.
        """
        if not tenant.name or not asked:
            return Reservation(QuotaAsk("", tenant.name, 0), (), self._settle)
        limits, prices = limits_of(tenant.plan), self._prices(asked[0].model)
        self._limits[tenant.name], part = limits, self.store.enforced(limits)
        prompt_tokens = sum(one.prompt_tokens for one in asked)
        completion_tokens = sum(self._estimate(tenant.name, one.max_tokens, part) for one in asked)
        ask = QuotaAsk(
            secrets.token_hex(16),
            tenant.name,
            prompt_tokens + completion_tokens,
            cost_of(prices, prompt_tokens, 0, completion_tokens),
            once_id,
        )
        self._watch.note(tenant.name, tenant.plan)
        if limits.tokens is not None and prompt_tokens > limits.tokens:
            # No wait would be long enough.
            raise invalid_request(
                f"the plan {tenant.plan.name} allows {limits.tokens:g} tokens a minute; the prompt "
                f"alone has {prompt_tokens}",
                code="context_length_exceeded",
            )
        if limits.are_any:
            await self._ask(tenant, ask, limits)
        reservation = Reservation(ask, asked, self._settle)
        for one in asked:
            self._running[one.request_id] = reservation
        self._reservations[tenant.name] = self._reservations.get(tenant.name, 0) + 1
        return reservation

    def subscribe_to(self, events: RequestEvents) -> None:
        """Charge requests from now on."""
        events.subscribe(RequestAccepted, self._accept)
        events.subscribe(AnswerRepeated, self._count_repeated)
        events.subscribe(RequestEnded, self._charge)

    def price(self, request_id: bytes, usage: Usage, *, is_begun: bool) -> RequestCost | None:
        """Return the cost of a sequence that ends; None if it has no reservation."""
        reservation = self._running.get(request_id)
        if reservation is None:
            return None
        asked = reservation.open[request_id]
        if not is_begun:
            return RequestCost(0, 0 if asked.largest else None)
        prompt = asked.prompt_tokens
        tokens = prompt, min(usage.cached_tokens, prompt), usage.completion_tokens
        on_largest = cost_of(self._prices(asked.largest), *tokens) if asked.largest else None
        return RequestCost(cost_of(self._prices(asked.model), *tokens), on_largest)

    def _accept(self, event: RequestAccepted) -> None:
        reservation = self._running.get(event.facts.request_id)
        if reservation is not None:
            reservation.is_accepted = True

    def _count_repeated(self, event: AnswerRepeated) -> None:
        """Count a request answered from the response cache: without tokens."""
        reservation = self._running.get(event.request_id)
        if reservation is not None:
            reservation.is_counted = True

    def _charge(self, event: RequestEnded) -> None:
        """Charge an ended sequence."""
        reservation = self._running.pop(event.facts.request_id, None)
        if reservation is None:
            return
        asked, tenant = reservation.open[event.facts.request_id], reservation.ask.tenant
        nanos, on_largest = event.cost or RequestCost(0)
        completion = event.usage.completion_tokens
        tokens = asked.prompt_tokens + completion if event.is_begun else 0
        if event.is_begun and completion:
            self._lengths.setdefault(tenant, CompletionLengths()).add(completion)
        reservation.take(asked.request_id, tokens, nanos, is_begun=event.is_begun)
        if nanos:
            self._metrics.cost(tenant, nanos / NANOS)
        if on_largest is not None:
            self._metrics.auto_cost(asked.model, nanos / NANOS, on_largest / NANOS)

    def discard(self, request_id: bytes) -> None:
        """Charge nothing for a sequence that was never accepted although others of its request
        were."""
        reservation = self._running.pop(request_id, None)
        if reservation is not None:
            reservation.take(request_id, 0, 0, is_begun=False)

    def _estimate(self, tenant: str, max_tokens: int, limits: TenantLimits) -> int:
        lengths = self._lengths.get(tenant)
        if lengths is not None and lengths.num_seen >= MIN_COMPLETIONS:
            return min(max_tokens, lengths.p90())
        guess = UNKNOWN_COMPLETION_TOKENS
        if limits.tokens is not None:
            guess = min(guess, max(1, int(limits.tokens * UNKNOWN_SHARE)))
        return min(max_tokens, guess)

    async def _ask(self, tenant: Tenant, ask: QuotaAsk, limits: TenantLimits) -> None:
        began_at = trio.current_time()
        verdict = await self.store.reserve(ask, limits)
        self._metrics.reserved(trio.current_time() - began_at)
        if verdict.refused_by is not None:
            self._refuse(tenant, verdict.refused_by, verdict.wait_s)

    def _check(self, tenant: Tenant, *, uses_tokens: bool, has_to_enter: bool = False) -> None:
        name = tenant.name
        if not name or not (limits := limits_of(tenant.plan)).are_any:
            return
        part = self.store.enforced(limits)
        account = self.store.last_seen(name, limits, VIEW_S)
        if account is not None:
            # Each ticket will become a request of the account.
            asked = part if uses_tokens else TenantLimits(requests=part.requests)
            met = _met(account, asked, self._tickets.get(name, 0))
            if met is not None:
                self._refuse(tenant, *met)
        most = part.concurrent if has_to_enter else None
        if most is not None and self.num_under_way(name) >= most:
            self._refuse(tenant, Limit.CONCURRENT)

    def _refuse(self, tenant: Tenant, limit: Limit, wait_s: float = 0.0) -> NoReturn:
        self._metrics.refused(limit)
        if limit is Limit.CONCURRENT:
            wait_s = CONCURRENT_RETRY_S
        raise refusal(tenant.plan, limit, wait_s)

    def count_request(self, tenant: Tenant) -> None:
        """Count one request without tokens and without a reservation."""
        if not tenant.name:
            return
        limits = limits_of(tenant.plan)
        self._metrics.unreserved(tenant.name)
        if limits.are_any:
            self.store.settle(Settlement(secrets.token_hex(16), tenant.name, limits, 0, 0))

    def _settle(self, reservation: Reservation) -> None:
        ask = reservation.ask
        self._reservations[ask.tenant] -= 1
        for request_id in reservation.open:
            del self._running[request_id]
        # Use the current plan's limits: it may have changed since the reservation.
        present = self._limits[ask.tenant]
        tokens, cost, is_begun = reservation.tokens, reservation.cost, reservation.is_counted
        self.store.settle(
            Settlement(ask.id, ask.tenant, present, tokens, cost, is_begun, ask.once_id)
        )


def _met(account: Account, limits: TenantLimits, num_entered: int) -> tuple[Limit, float] | None:
    """Return the exhausted limit and the wait [s], or None.

    Args:
      account: the tenant's account.
      limits: the limits to check.
      num_entered: requests in flight that are not charged yet.
    """
    if limits.budget is not None and account.spent >= limits.budget:
        return Limit.BUDGET, 0.0
    for limit, most, left in (
        (Limit.REQUESTS, limits.requests, account.requests - num_entered),
        (Limit.TOKENS, limits.tokens, account.tokens),
    ):
        if most is not None and left < min(1.0, most) - 0.001:
            return limit, (min(1.0, most) - left) * MINUTE_S / most
    return None
