"""Settings of `server.hosts`, with which servers on several hosts share idempotency keys; each with
its reason."""

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
    """Sharing idempotency keys with servers on other hosts, through the Redis of `--limits`."""

    advertised_url: str = ""
    """URL at which other hosts reach this host: `https://HOST[:PORT]`, or http if allowed. It must
    not lead to a load balancer. Empty by default: then only servers on one port share keys, without
    Redis."""
    secret_file: str = ""
    """File with a secret of at least 32 characters, the same on every host. A request with the
    secret may state its client's address and is not proxied again."""
    ca_file: str | None = None
    """PEM file of the authority that signs the other hosts' certificates; None for the system's
    authorities."""
    allow_http: bool = False
    """Whether other hosts may be reached by http. The network in between can then read the secret
    and the clients' keys. Loopback is always allowed."""
    lease_s: Positive = 3.0 * SECONDS
    """A server that has not renewed its lease for this long counts as dead, and its answers are
    computed again elsewhere. Longer than the pauses of a live process, and shorter than clients
    keep retrying."""
    renew_s: Positive = 1.0 * SECONDS
    """Interval of lease renewals; two may be lost."""
    timeout_s: Positive = 500 * MILLISECONDS
    """Deadline of a call to Redis, and of connecting to another host with its handshake. Requests
    with a key wait for it; if Redis does not answer, they are served as if this host were alone."""

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
        """Return whether a URL names only a host, by an allowed scheme. HTTP to this machine is
        allowed if this host's own URL is of that kind."""
        try:
            parts = urlsplit(url)
            is_host = bool(parts.hostname) and parts.port != 0 and parts.username is None
        except ValueError:
            return False
        is_whole = url == f"{parts.scheme}://{parts.netloc}" and not re.search(r"[^!-~]", url)
        is_local = is_loopback(parts.hostname or "") and self.advertised_url.startswith("http:")
        is_plain = parts.scheme == "http" and (self.allow_http or is_local)
        return is_host and is_whole and (is_plain or parts.scheme == "https")
