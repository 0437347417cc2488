"""Settings of servers on several hosts that share idempotency keys, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import SettingError
from ..loopback import is_loopback
from ..units import MILLISECONDS, SECONDS
from .limits import Positive, require


@dataclass(frozen=True, slots=True)
class HostsConfig:
    """Servers on other hosts, which know through the Redis of `--limits` who holds the answer of an
    idempotency key."""

    advertised_url: str = ""
    """Where servers of other hosts reach the servers of this one: `https://HOST[:PORT]`, or http if
    that is allowed. Not the load balancer's: it must lead to this host. Empty by default: keys are
    then known to the servers of one port only, and Redis is not asked."""
    secret_file: str = ""
    """File with a secret of at least 32 characters, the same on every host. A request that carries
    it may name its client's address and is not proxied again."""
    ca_file: str | None = None
    """PEM file of the authority that signs the other hosts' certificates; None for the system's."""
    allow_http: bool = False
    """Whether other hosts may be reached by http. It shows the secret and the clients' keys to the
    network in between, so only loopback needs no permission."""
    lease_s: Positive = 3.0 * SECONDS
    """A server that has not renewed its lease for this long counts as dead, and its answers are
    computed again elsewhere. Longer than pauses of a living process, shorter than clients retry."""
    renew_s: Positive = 1.0 * SECONDS
    """Interval at which the lease is renewed: two renewals may be lost."""
    timeout_s: Positive = 500 * MILLISECONDS
    """For one call of Redis, and for a connection to another host with its handshake. Requests with
    a key wait for it; without an answer of Redis they are served as if this host were alone."""

    def __post_init__(self) -> None:
        require(
            self.renew_s < self.lease_s,
            "renew_s",
            self.renew_s,
            f"below {self.lease_s:g} s, after which a lease ends",
        )
        if self.advertised_url and not self.secret_file:
            raise SettingError(
                "secret_file is needed with advertised_url: the same secret on every host"
            )
        if self.advertised_url and not self.may_reach(self.advertised_url):
            raise SettingError(
                f"advertised_url is {self.advertised_url!r}; allowed: https://HOST[:PORT], or with "
                "a loopback host or allow_http also http://HOST[:PORT]"
            )

    def may_reach(self, url: str) -> bool:
        """Return whether a URL names a host and nothing else, by a scheme that is allowed. Plain
        HTTP to this machine is allowed if this host is reached in the same way."""
        try:
            parts = urlsplit(url)
            is_host = bool(parts.hostname) and parts.port != 0 and parts.username is None
        except ValueError:
            return False
        is_whole = url == f"{parts.scheme}://{parts.netloc}" and not re.search(r"[^!-~]", url)
        is_local = is_loopback(parts.hostname or "") and self.advertised_url.startswith("http:")
        is_plain = parts.scheme == "http" and (self.allow_http or is_local)
        return is_host and is_whole and (is_plain or parts.scheme == "https")
