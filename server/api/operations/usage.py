"""GET /v1/usage and /fleet/usage: what tenants may use, and what they have used.

Servers on one port that count each by itself have a part of each account: what they say is added
up. What they count together any of them knows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio
from quart import request

from ...tenants.amounts import NANOS, limits_of
from ...tenants.tenancy import current_tenant
from ..generate import json_response

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from quart import Response

    from triolet.tenants import Tenant

    from ..services import Services

FLEET_USAGE: Final = "/fleet/usage"
"""For operators."""
OWN_USAGE: Final = "/fleet/usage/own"
"""Where servers on one port ask one another."""
DIVIDED: Final = {
    "limits": ("requests_per_minute", "tokens_per_minute", "max_concurrent"),
    "remaining": ("requests", "tokens"),
}
"""What each of several servers has a part of."""
WRITTEN: Final = ("tokens", "spent")
"""What one learns of another by the file that they share: who knows most is right."""


async def own_usage(services: Services) -> Response:
    """Show a tenant its own."""
    tenant = current_tenant()
    usage = await _usage(tenant, services)
    if not usage["is_shared"]:
        # Names are letters, digits, dots, - and _.
        for others in await _asked_of_siblings(f"{OWN_USAGE}?tenant={tenant.name}", services):
            _add(usage, others.get(tenant.name))
    return json_response({"object": "usage", **usage})


async def fleet_usage(services: Services) -> Response:
    """Show an operator everybody's."""
    found = await _usages(services.tenancy.everybody, services)
    if not all(usage["is_shared"] for usage in found):
        for others in await _asked_of_siblings(OWN_USAGE, services):
            for usage in found:
                _add(usage, others.get(usage["tenant"]))
    return json_response({"object": "list", "data": found})


async def server_usage(services: Services) -> Response:
    """Show a sibling what this server alone says of everybody, or of the tenant that is named."""
    name = request.args.get("tenant")
    tenants = [one for one in services.tenancy.everybody if name is None or one.name == name]
    return json_response({"object": "list", "data": await _usages(tenants, services)})


async def _usages(tenants: Iterable[Tenant], services: Services) -> list[dict[str, Any]]:
    found = []
    for tenant in tenants:
        found.append(await _usage(tenant, services))
        await trio.lowlevel.checkpoint()
    return found


async def _usage(tenant: Tenant, services: Services) -> dict[str, Any]:
    store, plan, limits = services.quotas.store, tenant.plan, limits_of(tenant.plan)
    account = await store.account(tenant.name, limits)
    enforced = store.enforced(limits)
    is_shared = services.config.tenants.quotas.is_shared and store.is_well
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
        "is_shared": is_shared,
        "servers": {"counted": store.num_servers if is_shared else 1, "all": store.num_servers},
    }


async def _asked_of_siblings(target: str, services: Services) -> list[dict[str, dict[str, Any]]]:
    """Return what each of the others on this port says, by tenant."""
    if services.peers is None:
        return []
    bodies = (await services.peers.ask(target)).values()
    lists = [msgspec.json.decode(body)["data"] for body in bodies if body is not None]
    return [{usage["tenant"]: usage for usage in one} for one in lists]


def _add(usage: dict[str, Any], other: Mapping[str, Any] | None) -> None:
    """Add another server's part. One that counts together with others just now has none."""
    if other is None or usage["is_shared"] or other["is_shared"]:
        return
    for group, names in DIVIDED.items():
        for name in names:
            values = (usage[group][name], other[group][name])
            usage[group][name] = None if None in values else sum(values)
    usage["in_flight"] += other["in_flight"]
    for name in WRITTEN:
        usage["this_month"][name] = max(usage["this_month"][name], other["this_month"][name])
    usage["servers"]["counted"] += 1
