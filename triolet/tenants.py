"""Tenants as the operator writes them down: plans, prices, roles, and digests of keys.

Pure data with its bounds. Knows neither the file that it stands in nor what of it is used up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .service_class import ServiceClass


class TenantRole(StrEnum):
    """What a tenant's keys open."""

    USER = "user"
    """The API, for itself."""
    OPERATOR = "operator"
    """Also what concerns the fleet and all tenants: metrics, audits, status, usage of others."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What tokens of a model cost, in the operator's currency per million."""

    prompt: float = 0.0
    cached_prompt: float = 0.0
    completion: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What tenants of one kind may use. None means no limit.

    Attributes:
      name: as the operator calls it.
      weight: of a tenant's share in the queue.
      classes: service classes that it may ask for; the first is what it gets unasked.
      requests_per_minute: accepted at most; as many may come at once after a quiet minute.
      tokens_per_minute: prompt and completion tokens, likewise.
      max_concurrent: requests that it may have in flight, waiting ones included.
      max_running: sequences on workers at once; the rest waits.
      max_context_tokens: prompt and completion of one request together.
      max_output_tokens: completion of one request.
      kv_share: of all decode blocks, at once.
      cache_share: of each worker's prefix cache.
      budget: spend per calendar month (UTC) beyond which requests are refused.
      budget_alerts: shares of the budget at which an alert is logged and counted.
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
    kv_share: float = 1.0
    cache_share: float = 1.0
    budget: float | None = None
    budget_alerts: tuple[float, ...] = (0.5, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant.

    Attributes:
      name: up to 64 letters, digits, dots, - and _.
      plan: its limits.
      role: what its keys open.
      digests: SHA-256 of each of its keys, in hexadecimal.
      is_disabled: its keys are known and refused with 403.
    """

    name: str
    plan: Plan
    role: TenantRole = TenantRole.USER
    digests: tuple[str, ...] = ()
    is_disabled: bool = False
