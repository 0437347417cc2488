"""Settings of membership: where servers find workers, and where workers register."""

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
    """Workers found in DNS, such as Kubernetes headless Services."""

    prefill: str = ""
    """`NAME:PORT` of the prefill workers; every address of the name is a worker. A name that begins
    with `_`, such as `_control._tcp.NAME`, is looked up as SRV records, which have the ports. Empty
    for the workers at `server.prefill_addresses`."""
    decode: str = ""
    """The same for decode workers; empty for those at `server.decode_addresses`."""
    nameserver: str = ""
    """`ADDRESS:PORT` of the DNS server; empty for those in /etc/resolv.conf."""
    resolve_s: Positive = 2.0 * SECONDS
    """Interval of look-ups: shorter than a new worker takes to start."""
    timeout_s: Positive = 1.0 * SECONDS
    """Deadline of one look-up of one name. A nearby DNS server takes milliseconds; later answers
    are not used."""
    absent_answers: Count = 3
    """A worker is dropped after this many answers in a row without its address: a single answer may
    be wrong or cached. For a live worker it takes more if earlier answers were found to be
    partial."""

    def __post_init__(self) -> None:
        for name, value, form, allowed in (
            ("prefill", self.prefill, _NAME, "NAME:PORT, or _SERVICE._PROTOCOL.NAME"),
            ("decode", self.decode, _NAME, "NAME:PORT, or _SERVICE._PROTOCOL.NAME"),
            ("nameserver", self.nameserver, _SERVER, "IP-ADDRESS:PORT"),
        ):
            require(form.fullmatch(value) is not None, name, value, allowed)

    @property
    def is_on(self) -> bool:
        """Whether a name is set."""
        return bool(self.prefill or self.decode)


@dataclass(frozen=True, slots=True)
class RedisMembersConfig:
    """The Redis or Valkey in which workers register and servers find them."""

    url: str = field(default="", repr=False)
    """URL of the Redis, or `@` and a file with the URL; empty for none. Never shown, because it may
    contain a password."""
    fleet: str = "triolet"
    """Name of the fleet. Servers find only workers that register under the same name."""
    timeout_s: Positive = 1.0 * SECONDS
    """Deadline of connecting with the handshake, and of each round trip. No request waits for
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
    """Where a server finds its workers, unless it uses addresses or a file."""

    dns: DnsConfig = field(default_factory=DnsConfig)
    redis: RedisMembersConfig = field(default_factory=RedisMembersConfig)
    redis_poll_s: Positive = 1.0 * SECONDS
    """Interval at which registrations are read. With the workers' `renew_s`, a new worker is used
    within two seconds."""


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """Where a server reads the desired numbers of workers set by `triolet scale`."""

    redis: RedisMembersConfig = field(default_factory=RedisMembersConfig)
    """The Redis, unless it is that of `membership.redis`."""
    poll_s: Positive = 2.0 * SECONDS
    """Interval at which they are read: shorter than autoscalers' intervals of 15 to 30 s."""


@dataclass(frozen=True, slots=True)
class RegistrationConfig:
    """How a worker registers, so that servers find it."""

    redis: RedisMembersConfig = field(default_factory=RedisMembersConfig)
    address: str = ""
    """Address at which servers reach this worker, if not its `control_address`: behind NAT, or in a
    container with published ports."""
    model: str = ""
    """Name of its model in the servers' settings; empty for their first model."""
    renew_s: Positive = 1.0 * SECONDS
    """Interval of renewals."""
    ttl_s: Positive = 5.0 * SECONDS
    """A registration expires when not renewed for this long; four renewals may be lost."""

    def __post_init__(self) -> None:
        require(
            self.renew_s < self.ttl_s,
            "renew_s",
            self.renew_s,
            f"below {self.ttl_s:g} s, after which a registration ends",
        )
