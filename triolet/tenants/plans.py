"""Data types of the tenants file: tenants, plans, prices, roles, and digests of keys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ..service_class import ANYWHERE, Placement, ServiceClass

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


class TenantRole(StrEnum):
    """What a tenant's keys give access to."""

    USER = "user"
    """The API, for the tenant itself."""
    OPERATOR = "operator"
    """Also the fleet and all tenants: metrics, audits, status, usage of others."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a model's tokens, in the operator's currency per million."""

    prompt: float = 0.0
    cached_prompt: float = 0.0
    completion: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Limits of a kind of tenant. None means no limit.

    Attributes:
      name: name of the plan.
      weight: weight of a tenant's share in the queue.
      classes: service classes that it may request; the first is the default.
      requests_per_minute: most accepted requests; as many may come at once after a quiet minute.
      tokens_per_minute: prompt and completion tokens, likewise.
      max_concurrent: requests in flight, including waiting ones.
      max_running: sequences on workers at once; the rest waits.
      max_context_tokens: prompt and completion of one request together.
      max_output_tokens: completion of one request.
      deadline_s: longest time for a request, waiting included; batch lines are exempt.
      kv_share: maximum share of all decode blocks.
      cache_share: share of each worker's prefix cache.
      budget: spend per calendar month (UTC) beyond which requests are refused.
      budget_alerts: shares of the budget at which an alert is logged and counted.
      pools: pools of workers for its requests; empty for the shared pool.
      overflow: whether its requests may use the shared pool if these have no room.
      zones: zones that its data must stay in; empty for any.
    """

    name: str = "default"
    weight: float = 1.0
    classes: tuple[ServiceClass, ...] = (
        ServiceClass.DEFAULT,
        ServiceClass.SHEDDABLE,
        ServiceClass.BATCH,
    )
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent: int | None = None
    max_running: int | None = None
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None
    deadline_s: float | None = None
    kv_share: float = 1.0
    cache_share: float = 1.0
    budget: float | None = None
    budget_alerts: tuple[float, ...] = (0.5, 0.8, 1.0)
    pools: tuple[str, ...] = ()
    overflow: bool = False
    zones: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantKey:
    """A stored key.

    Attributes:
      digest: SHA-256 of the key, in hexadecimal.
      until: when it ends, in seconds since 1970; None for never.
    """

    digest: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant.

    Attributes:
      name: up to 64 letters, digits, dots, - and _; empty without tenants.
      plan: its limits.
      role: what its keys give access to.
      keys: its keys.
      is_disabled: its keys are refused with 403.
      secret: hashed into its cache keys, so that no other tenant shares its parts of caches; empty
        without tenants.
      auto: ladder for its requests for the model `auto`; None for the configured ladder.
      placement: workers that its requests may use.
    """

    name: str
    plan: Plan
    role: TenantRole = TenantRole.USER
    keys: tuple[TenantKey, ...] = ()
    is_disabled: bool = False
    secret: bytes = field(default=b"", repr=False)
    auto: tuple[str, ...] | None = None
    placement: Placement = ANYWHERE


ANONYMOUS: Final = Tenant(
    "",
    Plan(
        "anonymous",
        classes=(
            ServiceClass.DEFAULT,
            ServiceClass.CRITICAL,
            ServiceClass.SHEDDABLE,
            ServiceClass.BATCH,
        ),
    ),
    TenantRole.OPERATOR,
)
"""The tenant of every request to a server without tenants."""


class Tenants:
    """All tenants at one moment. Immutable.

    Args:
      tenants: tenants by name.
      plans: plans by name, including unused ones.
      prices: prices by model.
    """

    def __init__(
        self,
        tenants: Iterable[Tenant],
        plans: Mapping[str, Plan],
        prices: Mapping[str, Prices],
    ) -> None:
        self.by_name: Final[Mapping[str, Tenant]] = {tenant.name: tenant for tenant in tenants}
        self.plans: Final = plans
        self.prices: Final = prices
        self._by_digest = {
            key.digest: (tenant, key) for tenant in self.by_name.values() for key in tenant.keys
        }

    def of_digest(self, digest: str) -> tuple[Tenant, TenantKey] | None:
        """Return the tenant and the key with this digest; None for an unknown one."""
        return self._by_digest.get(digest)

    def without_ladders_of(self, models: Collection[str]) -> Tenants:
        """Return the same tenants, but without their own ladder if it names one of these models."""
        tenants = (
            replace(tenant, auto=None) if {*models}.intersection(tenant.auto or ()) else tenant
            for tenant in self.by_name.values()
        )
        return Tenants(tenants, self.plans, self.prices)

    def prices_of(self, *names: str) -> Prices:
        """Return the prices of a model by the first of its names that has any: free unless the
        operator sets prices."""
        return next((self.prices[name] for name in names if name in self.prices), NO_PRICES)


NO_PRICES: Final = Prices()
