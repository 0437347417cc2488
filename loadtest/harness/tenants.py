"""Write tenants files for servers that benchmarks start on loopback."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def key_of(tenant: str) -> str:
    """Return a tenant's API key."""
    return f"key-of-{tenant}-for-this-benchmark-only"


def tenants_file(plans: Mapping[str, str], operator: str = "") -> str:
    """Return a tenants file with one plan per tenant.

    Args:
      plans: TOML of each tenant's plan.
      operator: name of an additional tenant with the operator role; empty for none.
    """
    lines = [f'cache_secret = "{"0" * 64}"']
    for name in (*plans, *filter(None, [operator])):
        digest = hashlib.sha256(key_of(name).encode()).hexdigest()
        lines += [f"[plans.{name}]", plans[name]] if name in plans else []
        lines += [f"[tenants.{name}]", f'keys = ["sha256:{digest}"]']
        lines += [f'plan = "{name}"' if name in plans else 'role = "operator"']
    return "\n".join(lines) + "\n"


def write_tenants(folder: Path, plans: Mapping[str, str], operator: str = "") -> Path:
    """Write `tenants_file` into a folder, and return its path."""
    path = folder / "tenants.toml"
    path.write_text(tenants_file(plans, operator), encoding="utf-8")
    path.chmod(0o600)
    return path
