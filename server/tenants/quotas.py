"""Limits of all tenants, seen from one server: tickets, reservations, charges, budget alerts."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Protocol

import structlog
import trio

from triolet.errors import RequestError, invalid_request

from ..contract.generation import Charges
from .accounts import MINUTE_S, NANOS, Account, Ask, Limit, Limits, Settlement, cost_of, limits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from triolet.config import QuotaConfig
    from triolet.tenants import Plan, Prices, Tenant

    from ..contract.generation import Usage
    from .accounts import Verdict
    from .memory_store import MemoryStore
    from .redis_store import RedisStore


log = structlog.get_logger(__name__)


class QuotaMetricsPort(Protocol):
    """What is counted."""

    def refused(self, limit: str) -> None:
        """A request met a limit."""
        ...

    def reserved(self, elapsed_s: float) -> None:
        """The store was asked, and took so long."""
        ...

    def unreserved(self, tenant: str) -> None:
        """A request was counted for which nothing was reserved."""
        ...

    def cost(self, tenant: str, amount: float) -> None:
        """A tenant was charged so much, in the operator's currency."""
        ...

    def budget_watched(self, tenant: str, share: float) -> None:
        """From now on it is noted when a tenant's spend crosses a share of its budget."""
        ...

    def budget_alert(self, tenant: str, share: float) -> None:
        """A tenant's spend crossed a share of its budget."""
        ...

    def store_failed(self) -> None:
        """The shared store did not do what it was asked."""
        ...


class SpendWatch:
    """Told by the store of what is spent, and of calls that failed.

    Args:
      metrics: told what there is to count.
    """

    def __init__(self, metrics: QuotaMetricsPort) -> None:
        self._metrics = metrics
        self._plans: dict[str, Plan] = {}

    def note(self, tenant: str, plan: Plan) -> None:
        """Learn what a tenant may spend."""
        if self._plans.get(tenant) == plan:
            return
        self._plans[tenant] = plan
        if plan.budget is not None:
            for share in plan.budget_alerts:
                self._metrics.budget_watched(tenant, share)

    def spent(self, tenant: str, before: int, after: int) -> None:
        """Log if a share of the budget lies between a tenant's spend before and after [nanos].

        Of all servers one is told of each change, and spend only grows: so each is logged once.
        """
        plan = self._plans.get(tenant)
        if plan is None or plan.budget is None:
            return
        for share in plan.budget_alerts:
            if before < share * plan.budget * NANOS <= after:
                log.warning(
                    "budget_alert",
                    tenant=tenant,
                    share=share,
                    spent=round(after / NANOS, 6),
                    budget=plan.budget,
                )
                self._metrics.budget_alert(tenant, share)

    def call_failed(self, reason: str) -> None:
        """Count that the shared store did not do what it was asked; the store logs what follows."""
        del reason
        self._metrics.store_failed()


GROWTH: Final = 1.2
"""Between two bounds: how much too long an estimate may be."""
NUM_BINS: Final = 80
"""Up to 1.2 ** 80, two million tokens."""
MAX_COUNT: Final = 1000.0
QUANTILE: Final = 0.9


class CompletionLengths:
    """Lengths of one tenant's completions."""

    def __init__(self) -> None:
        self._counts = [0.0] * NUM_BINS
        self._total = 0.0
        self.num_seen = 0

    def add(self, num_tokens: int) -> None:
        """Take one in."""
        self.num_seen += 1
        position = math.ceil(math.log(max(num_tokens, 1), GROWTH))
        self._counts[min(position, NUM_BINS - 1)] += 1
        self._total += 1
        if self._total >= MAX_COUNT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def p90(self) -> int:
        """Return a length that nine of ten do not exceed; 1 if there were none."""
        wanted = QUANTILE * self._total
        seen = 0.0
        for position, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return math.ceil(GROWTH**position)
        return 1


def refusal(plan: Plan, limit: Limit, wait_s: float) -> RequestError:
    """Return the error for a limit that is met: 429.

    Args:
      plan: with the limit.
      limit: which.
      wait_s: after which it is not met any more.
    """
    code, retry_after_s = "rate_limit_exceeded", wait_s if wait_s > 0 else None
    match limit:
        case Limit.BUDGET:
            # No wait that a client makes is long enough.
            code, retry_after_s = "insufficient_quota", None
            what = f"the budget of the plan {plan.name} for this month (UTC) is spent"
        case Limit.CONCURRENT:
            what = f"the plan {plan.name} allows {plan.max_concurrent} requests at once"
        case Limit.REQUESTS:
            what = f"the plan {plan.name} allows {plan.requests_per_minute:g} requests a minute"
        case Limit.TOKENS:
            what = f"the plan {plan.name} allows {plan.tokens_per_minute:g} tokens a minute"
    return RequestError(what, status=429, code=code, retry_after_s=retry_after_s)


def refused(plan: Plan, verdict: Verdict, concurrent_retry_s: float) -> RequestError | None:
    """Return the error that a verdict is to its client; None if it may go on."""
    if verdict.refused_by is None:
        return None
    wait_s = concurrent_retry_s if verdict.refused_by is Limit.CONCURRENT else verdict.wait_s
    return refusal(plan, verdict.refused_by, wait_s)


def too_large(plan: Plan, prompt_tokens: int) -> RequestError:
    """Return the error for a prompt for which no wait is long enough: 400."""
    return invalid_request(
        f"the plan {plan.name} allows {plan.tokens_per_minute:g} tokens a minute; the prompt alone "
        f"has {prompt_tokens}",
        code="context_length_exceeded",
    )


class Asked(NamedTuple):
    """One sequence, or one input.

    Attributes:
      request_id: its own.
      prompt_tokens: that it is charged for: none for another completion of the same prompt.
      max_tokens: of its completion.
    """

    request_id: bytes
    prompt_tokens: int
    max_tokens: int


class Reservation:
    """What one request of a client's has reserved. Leaving it without having begun gives it back.

    Args:
      ask: what was reserved.
      limits: of the tenant.
      asked: its sequences.
      settle: told once what became of all of it.

    Attributes:
      is_counted: it counts as a request, whatever tokens it used.
    """

    def __init__(
        self,
        ask: Ask,
        limits: Limits,
        asked: Sequence[Asked],
        settle: Callable[[Reservation, Settlement], None],
    ) -> None:
        self.ask = ask
        self.limits = limits
        self.open = {one.request_id: one for one in asked}
        self.is_accepted = False
        self._settle = settle
        self._tokens = self._cost = 0
        self.is_counted = False

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
        """Take nothing of it, unless something was begun. Idempotent."""
        if not self.is_accepted:
            self.is_accepted = True
            self._end()

    def take(self, request_id: bytes, tokens: int, cost: int, *, is_begun: bool) -> None:
        """Add what one sequence used; the last one settles."""
        del self.open[request_id]
        self._tokens += tokens
        self._cost += cost
        self.is_counted |= is_begun
        if not self.open:
            self._end()

    def _end(self) -> None:
        self._settle(
            self,
            Settlement(
                self.ask.id,
                self.ask.tenant,
                self.limits,
                self._tokens,
                self._cost,
                self.is_counted,
            ),
        )


class NoReservation:
    """Of a request that needs none."""

    def __enter__(self) -> NoReservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing to give back."""

    def give_back(self) -> None:
        """Nothing to give back."""


class Ticket:
    """One request of a client's between the door and its reservation. While it is there it counts
    as one that is under way.

    Args:
      close: told once that it is over, and whether it counts as a request by itself.

    Attributes:
      has_cost: work was spent on it, such as reading its body. Then it counts as a request unless
        it is reserved, or spared.
    """

    def __init__(self, close: Callable[[bool], None]) -> None:
        self._close = close
        self._is_open = True
        self.has_cost = False

    def spare(self) -> None:
        """Count it no longer, and never as a request: something else does that, or the server is
        at fault. Idempotent."""
        self.has_cost = False
        self.end()

    def end(self) -> None:
        """Count it no longer as under way. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._close(self.has_cost)


class Quotas(Charges):
    """All tenants' limits, seen from one server.

    Args:
      config: bounds.
      store: keeps the accounts.
      watch: is told of plans, for alerts.
      metrics: told what there is to count.
      prices: returns those of the served model, as they are now.
    """

    def __init__(
        self,
        config: QuotaConfig,
        store: MemoryStore | RedisStore,
        watch: SpendWatch,
        metrics: QuotaMetricsPort,
        prices: Callable[[], Prices],
    ) -> None:
        self.store = store
        self._config = config
        self._watch = watch
        self._metrics = metrics
        self._prices = prices
        self._running: dict[bytes, Reservation] = {}
        self._lengths: dict[str, CompletionLengths] = {}
        self._limits: dict[str, Limits] = {}
        self._tickets: dict[str, int] = {}
        self._reservations: dict[str, int] = {}

    @property
    def num_open(self) -> int:
        """Sequences that are not charged yet."""
        return len(self._running)

    def num_under_way(self, tenant: str) -> int:
        """Return how many requests of a tenant are between the door and their end, here."""
        return self._tickets.get(tenant, 0) + self._reservations.get(tenant, 0)

    def check(self, tenant: Tenant) -> None:
        """Refuse a tenant with nothing left, before anything is worked on. Costs no round trip; a
        tenant with a little left passes.

        Raises:
          RequestError: 429.
        """
        if tenant.name:
            self._check(tenant, limits_of(tenant.plan), uses_tokens=True)

    def enter(self, tenant: Tenant, *, uses_tokens: bool, is_charged: bool) -> Ticket:
        """Let a request in, or refuse it before its body is read.

        Args:
          tenant: that it is of.
          uses_tokens: it asks for tokens, not only for work on text.
          is_charged: it may count as a request although nothing is reserved for it.

        Raises:
          RequestError: 429, its tenant has nothing left, or as much under way as it may.
        """
        name = tenant.name
        if name:
            self._check(tenant, limits_of(tenant.plan), uses_tokens=uses_tokens, has_to_enter=True)
        self._tickets[name] = self._tickets.get(name, 0) + 1

        def close(has_cost: bool) -> None:
            self._tickets[name] -= 1
            if has_cost and is_charged:
                self.count_request(tenant)

        return Ticket(close)

    async def reserve(self, tenant: Tenant, asked: Sequence[Asked]) -> Reservation | NoReservation:
        """Take what a request will probably use.

        Args:
          tenant: of the request.
          asked: its sequences; none where nothing is to be begun.

        Returns:
          To be entered while the request is submitted.

        Raises:
          RequestError: 429, a limit is met; 400, the prompts alone are more than a minute's tokens.
        """
        if not tenant.name or not asked:
            return NoReservation()
        limits, prices = limits_of(tenant.plan), self._prices()
        self._limits[tenant.name], part = limits, self.store.enforced(limits)
        prompt_tokens = sum(one.prompt_tokens for one in asked)
        completion_tokens = sum(self._estimate(tenant.name, one.max_tokens, part) for one in asked)
        ask = Ask(
            secrets.token_hex(16),
            tenant.name,
            prompt_tokens + completion_tokens,
            cost_of(prices, prompt_tokens, 0, completion_tokens),
        )
        self._watch.note(tenant.name, tenant.plan)
        if limits.tokens is not None and prompt_tokens > limits.tokens:
            raise too_large(tenant.plan, prompt_tokens)
        if limits.are_any:
            await self._ask(tenant, ask, limits)
        reservation = Reservation(ask, limits, asked, self._settle)
        for one in asked:
            self._running[one.request_id] = reservation
        self._reservations[tenant.name] = self._reservations.get(tenant.name, 0) + 1
        return reservation

    def accepted(self, request_id: bytes) -> None:
        """Note that a sequence will have an end. See `Charges`."""
        reservation = self._running.get(request_id)
        if reservation is not None:
            reservation.is_accepted = True

    def repeated(self, request_id: bytes) -> None:
        """Count a request that is answered from memory. See `Charges`."""
        reservation = self._running.get(request_id)
        if reservation is not None:
            reservation.is_counted = True

    def ended(self, request_id: bytes, usage: Usage, *, is_begun: bool) -> float | None:
        """Charge what a sequence used. See `Charges`."""
        reservation = self._running.pop(request_id, None)
        if reservation is None:
            return None
        asked, tenant = reservation.open[request_id], reservation.ask.tenant
        tokens = cost = 0
        if is_begun:
            prompt, completion = asked.prompt_tokens, usage.completion_tokens
            tokens = prompt + completion
            cost = cost_of(self._prices(), prompt, min(usage.cached_tokens, prompt), completion)
            if completion:
                self._lengths.setdefault(tenant, CompletionLengths()).add(completion)
        reservation.take(request_id, tokens, cost, is_begun=is_begun)
        if cost:
            self._metrics.cost(tenant, cost / NANOS)
        return cost / NANOS

    def _estimate(self, tenant: str, max_tokens: int, limits: Limits) -> int:
        lengths, config = self._lengths.get(tenant), self._config
        if lengths is not None and lengths.num_seen >= config.min_completions:
            return min(max_tokens, lengths.p90())
        guess = config.unknown_completion_tokens
        if limits.tokens is not None:
            guess = min(guess, max(1, int(limits.tokens * config.unknown_share)))
        return min(max_tokens, guess)

    async def _ask(self, tenant: Tenant, ask: Ask, limits: Limits) -> None:
        began_at = trio.current_time()
        verdict = await self.store.reserve(ask, limits)
        self._metrics.reserved(trio.current_time() - began_at)
        error = refused(tenant.plan, verdict, self._config.concurrent_retry_s)
        if error is not None and verdict.refused_by is not None:
            self._metrics.refused(verdict.refused_by)
            raise error

    def _check(
        self, tenant: Tenant, limits: Limits, *, uses_tokens: bool, has_to_enter: bool = False
    ) -> None:
        if not limits.are_any:
            return
        name, part = tenant.name, self.store.enforced(limits)
        account = self.store.last_seen(name, limits, self._config.view_s)
        if account is not None:
            # Each ticket will be a request of the account's.
            asked = part if uses_tokens else Limits(requests=part.requests)
            met = _met(account, asked, self._tickets.get(name, 0))
            if met is not None:
                self._refuse(tenant, *met)
        most = part.concurrent if has_to_enter else None
        if most is not None and self.num_under_way(name) >= most:
            self._refuse(tenant, Limit.CONCURRENT, self._config.concurrent_retry_s)

    def _refuse(self, tenant: Tenant, limit: Limit, wait_s: float) -> NoReturn:
        self._metrics.refused(limit)
        raise refusal(tenant.plan, limit, wait_s)

    def count_request(self, tenant: Tenant) -> None:
        """Count one request, without tokens, for which nothing was reserved."""
        if not tenant.name:
            return
        limits = limits_of(tenant.plan)
        self._metrics.unreserved(tenant.name)
        if limits.are_any:
            self.store.settle(Settlement(secrets.token_hex(16), tenant.name, limits, 0, 0))

    def _settle(self, reservation: Reservation, settlement: Settlement) -> None:
        self._reservations[settlement.tenant] -= 1
        for request_id in reservation.open:
            del self._running[request_id]
        # The plan may have changed meanwhile; what is charged by an old limit would undo the new.
        present = self._limits.get(settlement.tenant, settlement.limits)
        self.store.settle(replace(settlement, limits=present))


def _met(account: Account, limits: Limits, num_entered: int) -> tuple[Limit, float] | None:
    """Return the limit of which nothing at all is left, and for how long.

    Args:
      account: as it is.
      limits: that count.
      num_entered: requests that it will be charged for.
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
