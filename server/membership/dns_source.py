"""`DnsSource`: finds workers by polling DNS, as all addresses of a name or its SRV records."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import dns.asyncbackend
import dns.asyncresolver
import trio
from dns.exception import DNSException

from triolet.config.members import Member
from triolet.errors import said_by
from triolet.ids import Role
from triolet.store_health import StoreHealth

if TYPE_CHECKING:
    from collections.abc import Callable

    from dns.name import Name

    from triolet.config.members import Members
    from triolet.config.membership import DnsConfig

    from .member_table import MemberTable


class DnsSource:
    """The addresses of one name per role. See `MemberSource`.

    Args:
      config: names, DNS server and intervals.
      table: decides who stays a member.
    """

    def __init__(self, config: DnsConfig, table: MemberTable) -> None:
        self.health = StoreHealth("dns", trio.current_time())
        self._config = config
        self._table = table

    async def run(self, use: Callable[[Members], None]) -> None:
        """Look up the names at an interval, until cancelled."""
        names = {Role.PREFILL: self._config.prefill, Role.DECODE: self._config.decode}
        while True:
            told = [await self._look_up(role, name, use) for role, name in names.items() if name]
            self.health.note("; ".join(filter(None, told)), trio.current_time())
            await trio.sleep(self._config.resolve_s)

    async def _look_up(self, role: Role, name: str, use: Callable[[Members], None]) -> str:
        """Apply the answer for one name; return why it is not used, or an empty text."""
        try:
            with trio.fail_after(self._config.timeout_s):
                places = await places_of(name, self._config)
        except (DNSException, OSError, ValueError, trio.TooSlowError) as error:
            return f"{name}: {said_by(error)}"
        trouble = self._table.take(
            [Member(role, f"tcp://{place}") for place in sorted(places)], (role,), use
        )
        return trouble and f"{name}: {trouble}"


async def places_of(name: str, config: DnsConfig) -> set[str]:
    """Look up a name and return HOST:PORT of every worker. SRV priorities and weights are ignored.

    Raises:
      DNSException: DNS gave no answer, or an error.
      OSError: no DNS server can be reached.
      ValueError: the address of the configured DNS server is invalid.
    """
    resolver = dns.asyncresolver.Resolver(configure=not config.nameserver)
    resolver.lifetime = config.timeout_s
    if config.nameserver:
        address, _, port = config.nameserver.rpartition(":")
        resolver.nameservers, resolver.port = [address.strip("[]")], int(port)
    ask = partial(
        resolver.resolve,
        raise_on_no_answer=False,
        search=True,
        backend=dns.asyncbackend.get_backend("trio"),
    )
    hosts: list[tuple[Name | str, str]] = [(name.rpartition(":")[0], name.rpartition(":")[2])]
    if name.startswith("_"):
        hosts = [(record.target, record.port) for record in await ask(name, "SRV")]
    found: set[str] = set()
    for host, port in hosts:
        # Either IPv4 or IPv6: a worker with an address of each kind is one worker.
        found |= {f"{record.address}:{port}" for record in await ask(host, "A")} or {
            f"[{record.address}]:{port}" for record in await ask(host, "AAAA")
        }
    return found
