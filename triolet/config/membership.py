"""Settings of membership: where servers look for workers, and where workers register."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from ..units import SECONDS
from .limits import LABEL, Count, Positive, require
from .redis_url import require_redis_url

_NAME: Final = re.compile(r"(_[\w-]+\._[\w-]+\.[\w.-]+|[^\W_][\w.-]*:\d{1,5})?", re.ASCII)
_SERVER: Final = re.compile(r"(([\d.]+|\[[0-9A-Fa-f:.]+\]):\d{1,5})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class DnsConfig:
    """Workers that a server finds by names in DNS, such as headless services of Kubernetes."""

    prefill: str = ""
    """Name and port of the prefill workers, `NAME:PORT`; every address of the name is a worker. A
    name that begins with `_`, such as `_control._tcp.NAME`, has SRV records, which hold the ports.
    Empty for the workers at `server.prefill_addresses`."""
    decode: str = ""
    """The same for decode workers. Empty for those at `server.decode_addresses`."""
    nameserver: str = ""
    """`ADDRESS:PORT` of the DNS server; empty for those in /etc/resolv.conf."""
    resolve_s: Positive = 2.0 * SECONDS
    """Interval between two look-ups: a new worker takes longer to start."""
    timeout_s: Positive = 1.0 * SECONDS
    """For one look-up of one name. A nearby server takes milliseconds; a later answer is not
    used."""
    absent_answers: Count = 3
    """A worker is dropped when so many answers in a row lack its address: one answer may be wrong
    or from a cache. While heartbeats reach it, it needs more of them if earlier answers turned out
    to hold only a part of the addresses."""

    def __post_init__(self) -> None:
        for name, value, form, allowed in (
            ("prefill", self.prefill, _NAME, "NAME:PORT, or _SERVICE._PROTOCOL.NAME"),
            ("decode", self.decode, _NAME, "NAME:PORT, or _SERVICE._PROTOCOL.NAME"),
            ("nameserver", self.nameserver, _SERVER, "IP-ADDRESS:PORT"),
        ):
            require(form.fullmatch(value) is not None, name, value, allowed)

    @property
    def is_on(self) -> bool:
        """Whether a name is given."""
        return bool(self.prefill or self.decode)


@dataclass(frozen=True, slots=True)
class RedisMembersConfig:
    """The Redis or Valkey in which workers register and servers look for them."""

    url: str = field(default="", repr=False)
    """URL of the Redis, or `@` and a file that holds the URL; empty for none. Never shown: it may
    contain a password."""
    fleet: str = "triolet"
    """Servers find only workers that register under the same name."""
    timeout_s: Positive = 1.0 * SECONDS
    """For a new connection with its handshake, and for each round trip. No request waits for
    it."""

    def __post_init__(self) -> None:
        if self.url:
            require_redis_url("url", self.url)
        require(
            LABEL.fullmatch(self.fleet) is not None,
            "fleet",
            self.fleet,
            "1 to 63 letters, digits, -, _ and .",
        )


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """Where a server learns which workers it has, if neither from addresses nor from a file."""

    dns: DnsConfig = field(default_factory=DnsConfig)
    redis: RedisMembersConfig = field(default_factory=RedisMembersConfig)
    redis_poll_s: Positive = 1.0 * SECONDS
    """Interval at which registrations are read: with `renew_s` of workers, a new one is used within
    two seconds."""


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """Where a server reads the desired numbers of workers that `triolet scale` sets."""

    redis: RedisMembersConfig = field(default_factory=RedisMembersConfig)
    """The Redis, if it is not that of `membership.redis`."""
    poll_s: Positive = 2.0 * SECONDS
    """Interval at which they are read: autoscalers ask every 15 to 30 s."""


@dataclass(frozen=True, slots=True)
class RegistrationConfig:
    """How a worker registers itself, so that servers find it."""

    redis: RedisMembersConfig = field(default_factory=RedisMembersConfig)
    address: str = ""
    """Where servers reach this worker, if not at its `control_address`: behind NAT, or in a
    container with published ports."""
    model: str = ""
    """Name of its model in the servers; empty for their first one."""
    renew_s: Positive = 1.0 * SECONDS
    """Interval of registrations."""
    ttl_s: Positive = 5.0 * SECONDS
    """A registration that is not renewed for this long ends: four renewals may be lost."""

    def __post_init__(self) -> None:
        require(
            self.renew_s < self.ttl_s,
            "renew_s",
            self.renew_s,
            f"below {self.ttl_s:g} s, after which a registration ends",
        )
