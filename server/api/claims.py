"""What a request claims of the service: for whom, how early, with which share.

Knows the tenant that the running task serves, and whether this process made the request itself;
knows no queue.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from triolet.errors import RequestError
from triolet.service_class import Scheduling, ServiceClass

from ..tenants.tenancy import current_tenant, enter_tenant

if TYPE_CHECKING:
    from triolet.tenants import Tenant

    from ..tenants.tenancy import Tenancy

_IS_BATCH: Final[ContextVar[bool]] = ContextVar("is_batch", default=False)

_CLASS_OF: Final = {"priority": ServiceClass.CRITICAL, "flex": ServiceClass.SHEDDABLE}
_SHOWN: Final = {
    ServiceClass.CRITICAL: "priority",
    ServiceClass.DEFAULT: "default",
    ServiceClass.SHEDDABLE: "flex",
    ServiceClass.BATCH: "batch",
}


def enter_batch() -> None:
    """Let the running task serve a line of a batch, whatever class it may ask for."""
    _IS_BATCH.set(True)


def renew_tenant(tenancy: Tenancy) -> Tenant:
    """Return the running task's tenant as it is now, and go on as that: what it may do may have
    changed while a body came, or while a WebSocket was open.

    Raises:
      RequestError: 401 or 403, it may ask no more.
    """
    tenant = tenancy.tenant_named(current_tenant().name)
    enter_tenant(tenant)
    return tenant


def current_scheduling(service_tier: str | None = None, num_servers: int = 1) -> Scheduling:
    """Return what the request that the running task serves claims.

    Args:
      service_tier: as its client wishes.
      num_servers: that serve the tenant: none sees what it has with the others.

    Raises:
      RequestError: 403, its tenant's plan has no such class.
    """
    tenant = current_tenant()
    plan = tenant.plan
    if _IS_BATCH.get():
        service_class = ServiceClass.BATCH
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
    )


def check_may_batch() -> None:
    """Raise the RequestError, 403, if the running task's tenant may run no batches."""
    if ServiceClass.BATCH not in current_tenant().plan.classes:
        raise outside_plan(ServiceClass.BATCH)


def message_tier(service_tier: str | None, scheduling: Scheduling) -> dict[str, str]:
    """Return the same in Anthropic's words, where it belongs to the usage."""
    tier = {ServiceClass.CRITICAL: "priority", ServiceClass.BATCH: "batch"}
    shown = tier.get(scheduling.service_class, "standard")
    return {} if service_tier is None else {"service_tier": shown}


def tier_field(service_tier: str | None, scheduling: Scheduling) -> dict[str, str]:
    """Return what an answer says of its request's class; nothing unless the client spoke of it."""
    return {} if service_tier is None else {"service_tier": _SHOWN[scheduling.service_class]}


def outside_plan(service_class: ServiceClass) -> RequestError:
    """Return the error for a class that a tenant's plan does not have."""
    plan = current_tenant().plan
    allowed = ", ".join(one.name.lower() for one in plan.classes)
    is_batch = service_class is ServiceClass.BATCH
    return RequestError(
        f"requests of the class {service_class.name.lower()} are not in the plan {plan.name}, "
        f"which has {allowed}",
        status=403,
        code="permission_denied",
        param=None if is_batch else "service_tier",
    )
