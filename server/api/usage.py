"""GET /v1/usage and /fleet/usage: what tenants may use, and what they have used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import trio

from ..quotas.amounts import NANOS, limits_of
from ..tenancy import current_tenant
from .generate import json_response

if TYPE_CHECKING:
    from quart import Response

    from triolet.tenants import Tenant

    from .ports import Services

FLEET_USAGE: Final = "/fleet/usage"
"""For operators."""


async def own_usage(services: Services) -> Response:
    """Show a tenant its own."""
    return json_response({"object": "usage", **await _usage(current_tenant(), services)})


async def fleet_usage(services: Services) -> Response:
    """Show an operator everybody's."""
    found = []
    for tenant in services.tenancy.everybody:
        found.append(await _usage(tenant, services))
        await trio.lowlevel.checkpoint()
    return json_response({"object": "list", "data": found})


async def _usage(tenant: Tenant, services: Services) -> dict[str, Any]:
    store, plan, limits = services.quotas.store, tenant.plan, limits_of(tenant.plan)
    account = await store.account(tenant.name, limits)
    enforced = store.enforced(limits)
    return {
        "tenant": tenant.name,
        "plan": plan.name,
        "limits": {
            "requests_per_minute": enforced.requests,
            "tokens_per_minute": enforced.tokens,
            "max_concurrent": enforced.concurrent,
            "budget": plan.budget,
        },
        "remaining": {
            "requests": None if limits.requests is None else math.floor(account.requests),
            "tokens": None if limits.tokens is None else math.floor(account.tokens),
        },
        "in_flight": account.in_flight,
        "this_month": {"tokens": account.used_tokens, "spent": account.spent / NANOS},
        "is_shared": services.config.tenants.quotas.is_shared and store.is_well,
    }
