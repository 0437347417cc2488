"""Tenants for tests, looked up by API key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.tenants.accounts import limits_of
from server.tenants.tenancy import Tenancy
from triolet.tenants.api_keys import digest_of
from triolet.tenants.plans import Plan, Tenant, TenantKey, TenantRole, Tenants

if TYPE_CHECKING:
    from server.tenants.accounts import Account
    from server.tenants.quotas import Quotas
    from tests.server.support.surface import Surface


class LimitedServer:
    """A server with the tenant alice, by a plan."""

    def __init__(self, server: Surface, quotas: Quotas, plan: Plan) -> None:
        self.server = server
        self.quotas = quotas
        self.plan = plan

    @property
    def account(self) -> Account:
        """Alice's."""
        account = self.quotas.store.last_seen("alice", limits_of(self.plan))
        assert account is not None
        return account


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
