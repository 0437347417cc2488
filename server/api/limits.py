"""The current request's service class, plan limits and quota reservations."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from triolet.errors import RequestError, invalid_request
from triolet.service_class import Scheduling, ServiceClass

from ..tenants.accounts import MINUTE_S, Account, limits_of
from ..tenants.quotas import AskedTokens, Quotas, Reservation
from ..tenants.tenancy import Tenancy, current_tenant, enter_tenant
from .gateway_hints import current_hints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

    from triolet.tenants.plans import Plan, Tenant

    from ..contract.generation import GenerationRequest
    from .request_scope import RequestEntry, RequestScope
    from .served_models import ServedModel
    from .services import Services


_LINE_ID: Final[ContextVar[str]] = ContextVar("line_id", default="")
"""Id of the batch line that the running task serves; empty for a client's request."""

_CLASS_OF: Final = {"priority": ServiceClass.CRITICAL, "flex": ServiceClass.SHEDDABLE}
_SHOWN: Final = {
    ServiceClass.CRITICAL: "priority",
    ServiceClass.DEFAULT: "default",
    ServiceClass.SHEDDABLE: "flex",
    ServiceClass.BATCH: "batch",
}


def enter_batch_line(line_id: str) -> None:
    """Mark the running task as serving a batch line, which sets its class and is charged once."""
    _LINE_ID.set(line_id)


def renew_tenant(tenancy: Tenancy) -> Tenant:
    """Update the running task's tenant and return it. Its permissions may have changed while a body
    arrived or a WebSocket was open.

    Raises:
      RequestError: 401 or 403, it may send no more requests.
    """
    tenant = tenancy.tenant_named(current_tenant().name)
    enter_tenant(tenant)
    return tenant


def current_scheduling(service_tier: str | None = None, num_servers: int = 1) -> Scheduling:
    """Return the scheduling of the current request.

    Args:
      service_tier: the tier that the client asked for.
      num_servers: number of servers that serve the tenant; each sees only its own requests.

    Raises:
      RequestError: 403, its tenant's plan does not include the class.
    """
    tenant, (objectives_class, flow) = current_tenant(), current_hints.get()
    plan = tenant.plan
    if _LINE_ID.get():
        service_class = ServiceClass.BATCH
    elif objectives_class is not None:
        service_class = objectives_class
    else:
        service_class = _CLASS_OF.get(service_tier or "auto", plan.classes[0])
    if service_class not in plan.classes:
        raise outside_plan(service_class)
    most = plan.max_running
    return Scheduling(
        tenant=tenant.name,
        weight=plan.weight,
        service_class=service_class,
        max_running=None if most is None else max(1, most // num_servers),
        kv_share=plan.kv_share / num_servers,
        cache_share=plan.cache_share,
        placement=tenant.placement,
        flow=flow,
    )


def check_output(fields: BaseModel, plan: Plan) -> None:
    """Raise RequestError for a completion that exceeds the plan's limit."""
    for name in ("max_tokens", "max_completion_tokens"):
        wanted, most = getattr(fields, name, None), plan.max_output_tokens
        if wanted is not None and most is not None and wanted > most:
            raise invalid_request(
                f"the plan {plan.name} allows {most} completion tokens; the request asks for "
                f"{wanted}",
                name,
            )


def check_input(num_tokens: int, plan: Plan, what: str, param: str) -> None:
    """Raise RequestError for an input without a completion that exceeds the plan's limit."""
    most = plan.max_context_tokens
    if most is not None and num_tokens > most:
        raise invalid_request(
            f"{what} has {num_tokens} tokens; the plan {plan.name} allows {most}",
            param,
            code="context_length_exceeded",
        )


def check_may_batch() -> None:
    """Raise RequestError (403) if the running task's tenant may not run batches."""
    if ServiceClass.BATCH not in current_tenant().plan.classes:
        raise outside_plan(ServiceClass.BATCH)


def message_tier(service_tier: str | None, scheduling: Scheduling) -> dict[str, str]:
    """Return the service tier in Anthropic's format, in which it is part of the usage."""
    tier = {ServiceClass.CRITICAL: "priority", ServiceClass.BATCH: "batch"}
    shown = tier.get(scheduling.service_class, "standard")
    return {} if service_tier is None else {"service_tier": shown}


def tier_field(service_tier: str | None, scheduling: Scheduling) -> dict[str, str]:
    """Return the service tier for a response; empty if the client sent none."""
    return {} if service_tier is None else {"service_tier": _SHOWN[scheduling.service_class]}


def outside_plan(service_class: ServiceClass) -> RequestError:
    """Return the error for a class that a tenant's plan does not include."""
    plan = current_tenant().plan
    allowed = ", ".join(one.name.lower() for one in plan.classes)
    is_of_tier = not _LINE_ID.get() and current_hints.get()[0] is None
    return RequestError(
        f"the class {service_class.name.lower()} is not in the plan {plan.name}, "
        f"which has {allowed}",
        status=403,
        code="permission_denied",
        param="service_tier" if is_of_tier else None,
    )


_ENTRY: Final[ContextVar[RequestEntry | None]] = ContextVar("entry", default=None)
"""The entry of the running task's request, until it is queued."""


def enter_request(entry: RequestEntry) -> None:
    """Set the running task's request."""
    _ENTRY.set(entry)


def enter_answer(services: Services, live: RequestScope) -> None:
    """Take the quota ticket of a WebSocket message, which has already been read.

    Raises:
      RequestError: 429.
    """
    live.entry.ticket = services.quotas.enter(current_tenant(), uses_tokens=True, is_charged=True)
    live.entry.begin_work()
    _ENTRY.set(live.entry)


async def reserved(
    requests: Sequence[GenerationRequest], model: ServedModel, services: Services
) -> Reservation:
    """Reserve quota for some completions. A prompt is counted once, however many they are.

    Args:
      requests: one per completion; empty if nothing will be started.
      model: the model, which determines the prices.
      services: provide the accounts.

    Raises:
      RequestError: 429 or 400; nothing was reserved.
    """
    asked = [
        AskedTokens(
            one.request_id,
            0 if one.origin_id else len(one.prompt_ids),
            one.sampling.max_tokens,
            model.base_name,
            "" if one.auto is None else one.auto.largest,
        )
        for one in requests
    ]
    return await reserve_for(asked, services)


async def reserve_for(asked: Sequence[AskedTokens], services: Services) -> Reservation:
    """Reserve quota for any token counts.

    Raises:
      RequestError: 429 or 400; 401 or 403 if the tenant may send no more requests.
    """
    reservation = await services.quotas.reserve(current_tenant(), asked, _LINE_ID.get())
    try:
        renew_tenant(services.tenancy)  # it may have been disabled in the meantime
    except RequestError:
        reservation.give_back()
        raise
    if (entry := _ENTRY.get()) is not None:
        entry.queue()
    return reservation


def rate_headers(quotas: Quotas) -> dict[str, str]:
    """Return the headers with the tenant's limits; empty without limits."""
    tenant = current_tenant()
    whole = limits_of(tenant.plan)
    limits = quotas.store.enforced(whole)
    if not tenant.name or (limits.requests is None and limits.tokens is None):
        return {}
    account = quotas.store.last_seen(tenant.name, whole)
    if account is None:
        account = Account(limits.requests or 0.0, limits.tokens or 0.0, 0, 0, 0)
    headers = {}
    for name, limit, left in (
        ("requests", limits.requests, account.requests),
        ("tokens", limits.tokens, account.tokens),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(math.floor(limit))
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(left)))
            headers[f"x-ratelimit-reset-{name}"] = _shown((limit - left) * MINUTE_S / limit)
    return headers


def _shown(seconds: float) -> str:
    """Return a duration in the API's format: 120ms, 7.5s, 6m0s."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
