"""Bounds and deadlines of whatever counts what tenants use.

Knows numbers and where the accounts are kept; what they mean is server/quotas' business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, urlsplit

from .errors import ConfigError
from .units import MILLISECONDS, SECONDS

MEMORY: Final = "memory"
AT: Final = "@"
"""Before the path of a file that holds the URL: whoever may list processes sees their options."""
SCHEMES: Final = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """What tenants have used, and who keeps the account."""

    limits: str = field(default=MEMORY, repr=False)
    """`memory`, or the URL of the Redis or Valkey that several servers share, or `@` and a file
    with that URL in it. Not shown: it may hold a password."""
    spend_file: str | None = None
    """Where a server with its accounts in memory writes down what tenants have spent; None for
    nowhere: a restart then forgets it. Servers on one port may share it."""
    servers: int = 1
    """That share the limits without Redis: each of them enforces its part. The kernel, not we,
    chooses who gets a connection, so only parts add up to the limit for certain."""
    flush_s: float = 1.0 * SECONDS
    """How often spend is written down: what a killed process may forget."""
    call_timeout_s: float = 50 * MILLISECONDS
    """For one round trip to Redis, which takes under a millisecond beside a server. Whoever asks
    waits for it before its request is queued."""
    connect_timeout_s: float = 1.0 * SECONDS
    """For a new connection with its handshake. Nobody waits for it but whoever probes."""
    max_failures: int = 3
    """Calls in a row that fail before nobody is asked any more; until then each failed one is
    decided here."""
    probe_s: float = 0.5 * SECONDS
    """How often a Redis that failed is tried again."""
    heartbeat_s: float = 1.0 * SECONDS
    """How often a server renews the lease of its reservations."""
    lease_s: float = 10.0 * SECONDS
    """When nothing was heard of a server for so long its reservations are given back. Above the
    longest pause that a living process makes; one that comes back late is charged all the same."""
    max_batch: int = 128
    """Changes that travel together: Redis does nothing else meanwhile, for about a millisecond."""
    view_s: float = 1.0 * SECONDS
    """How old an account seen before may be to refuse somebody at once, without asking."""
    concurrent_retry_s: float = 1.0 * SECONDS
    """When to come again where all places are taken: nobody knows when one of them ends."""
    unknown_completion_tokens: int = 512
    """Reserved for a completion while nothing is known of its tenant's: a long answer."""
    unknown_share: float = 0.1
    """Of a minute's tokens: the most that is reserved so. A tenant with few would otherwise have
    one request at a time until it is known."""
    min_completions: int = 20
    """From which on a tenant's own lengths say more than that: the 90th of a hundred is known to
    about a tenth."""

    def __post_init__(self) -> None:
        if self.limits != MEMORY and not self.limits.startswith(AT):
            parts = urlsplit(self.limits)
            is_named = parts.path if parts.scheme == "unix" else parts.hostname
            if parts.scheme not in SCHEMES or not is_named or not _is_numbered(parts):
                raise ConfigError(
                    f"--limits is {shown_url(self.limits)!r}; allowed: {MEMORY}, "
                    "redis://HOST[:PORT][/DB], rediss://…, unix:///PATH, or @FILE with one of these"
                )
        if not self.call_timeout_s > 0:
            raise ConfigError(f"--limits-timeout is {self.call_timeout_s}; allowed: > 0")
        if self.servers < 1:
            raise ConfigError(f"servers is {self.servers}; allowed: >= 1")

    @property
    def is_shared(self) -> bool:
        """Whether the accounts are kept where other servers find them."""
        return self.limits != MEMORY


def _is_numbered(parts: SplitResult) -> bool:
    """Return whether port and database of a URL are numbers, where there are any."""
    try:
        port = parts.port
    except ValueError:
        return False
    database = parts.path[1:]
    is_database = not database or (database.isascii() and database.isdigit())
    return parts.scheme == "unix" or (port != 0 and is_database and len(database) < 10)


def shown_url(url: str) -> str:
    """Return where a URL leads, without what it says of who asks: fit for logs."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    place = url.rpartition("@")[2] if "@" in url else url.partition("://")[2]
    return f"{parts.scheme}://{place.partition('?')[0]}" if parts.scheme else "(no URL)"
