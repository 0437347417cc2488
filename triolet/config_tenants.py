"""Where the tenants of a server are written down, and how soon it notices a change."""

from __future__ import annotations

from dataclasses import dataclass, field

from .config_quotas import QuotaConfig
from .units import MIB, SECONDS


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """The file of tenants."""

    file: str | None = None
    """None where there are no tenants: then whoever reaches the port is let in."""
    poll_s: float = 1.0 * SECONDS
    """How often somebody looks whether it has changed; a change counts when it has stood for one
    more look, because an editor may be halfway through it. So a key is shut out within 2 s."""
    max_bytes: int = 8 * MIB
    """Of the file: some 20 times what the largest number of tenants takes. Parsing it takes
    seconds of a thread."""
    quotas: QuotaConfig = field(default_factory=QuotaConfig)
    """Who keeps the account of what they use."""
