"""Tenants for tests, by their keys."""

from __future__ import annotations

from server.tenants.tenancy import Tenancy
from triolet.tenants.api_keys import digest_of
from triolet.tenants.plans import Plan, Tenant, TenantKey, TenantRole, Tenants


def tenants_of(*tenants: Tenant) -> Tenants:
    """Return what a file with these tenants says."""
    return Tenants(tenants, {tenant.plan.name: tenant.plan for tenant in tenants}, {})


def tenant(
    name: str,
    *keys: str,
    plan: Plan = Plan(),  # noqa: B008 (frozen)
    role: TenantRole = TenantRole.USER,
    is_disabled: bool = False,
) -> Tenant:
    """Return a tenant."""
    digests = tuple(TenantKey(digest_of(key)) for key in keys)
    return Tenant(name, plan, role, digests, is_disabled, f"secret of {name}".encode())


def tenancy_of(**names: str) -> Tenancy:
    """Return a tenancy of users, each with its key."""
    return Tenancy(tenants_of(*(tenant(name, key) for name, key in names.items())))
