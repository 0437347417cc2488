"""Tests of `DnsSource` with a real DNS server that is late, empty, wrong or away."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from dns.rcode import NOERROR, NXDOMAIN, REFUSED, SERVFAIL
from structlog.testing import capture_logs

from server.membership.dns_source import DnsSource, places_of
from server.membership.member_table import MemberTable
from tests.server.support.surface import until
from triolet.config.members import MAX_MEMBERS, Members
from triolet.config.membership import DnsConfig

from .dns_server import DnsServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dns.rcode import Rcode

NAME = "decode.test"
WELL = {"event": "membership_store_answers", "store": "dns", "reason": ""}


class Followed:
    """A source that polls a DNS server at a short interval.

    Attributes:
      server: the DNS server.
      source: the source.
      changes: the addresses after each change.
      alive: addresses of live workers.
    """

    def __init__(self, server: DnsServer, timeout_s: float) -> None:
        self.server = server
        self.changes: list[list[str]] = []
        self.alive: set[str] = set()
        config = DnsConfig(
            decode=f"{NAME}:7001",
            nameserver=server.address,
            resolve_s=0.01,
            timeout_s=timeout_s,
        )
        self.source = DnsSource(config, MemberTable((), lambda: self.alive, config.absent_answers))

    def use(self, members: Members) -> None:
        self.changes.append(sorted(one.address for one in members.members))

    async def rounds(self, count: int = 8) -> None:
        """Wait for this many look-ups."""
        before = self.server.num_asked
        await until(lambda: self.server.num_asked >= before + count)


@asynccontextmanager
async def following(*addresses: str, timeout_s: float = 30.0) -> AsyncIterator[Followed]:
    server = DnsServer()
    server.addresses(NAME, *addresses)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        followed = Followed(server, timeout_s)
        nursery.start_soon(followed.source.run, followed.use)
        yield followed
        nursery.cancel_scope.cancel()


def at(*hosts: str) -> list[str]:
    return [f"tcp://{host}:7001" for host in hosts]


async def test_workers_join_when_dns_names_them_and_leave_when_it_does_not() -> None:
    async with following("127.0.0.2", "127.0.0.3") as one:
        one.alive.update(at("127.0.0.2", "127.0.0.3", "127.0.0.4"))
        await until(lambda: one.changes == [at("127.0.0.2", "127.0.0.3")])
        one.server.addresses(NAME, "127.0.0.2", "127.0.0.4")
        await until(lambda: one.changes[-1] == at("127.0.0.2", "127.0.0.4"))
        assert one.changes[1] == at("127.0.0.2", "127.0.0.3", "127.0.0.4")


@pytest.mark.parametrize("rcode", [SERVFAIL, REFUSED, NXDOMAIN])
async def test_an_error_keeps_the_last_members_and_is_logged_once(rcode: Rcode) -> None:
    async with following("127.0.0.2") as one:
        await until(lambda: bool(one.changes))
        one.alive.update(at("127.0.0.2"))
        with capture_logs() as lines:
            one.server.rcode = rcode
            await one.rounds()
            age_s = trio.current_time() - one.source.health.answered_at
            one.server.rcode = NOERROR
            await until(lambda: len(lines) == 2)
        await one.rounds()
        assert one.changes == [at("127.0.0.2")]
        assert lines[0]["event"] == "membership_store_failed"
        assert NAME in lines[0]["reason"]
        assert lines[1].items() >= WELL.items()
        assert lines[1]["silent_s"] >= round(age_s, 3)


async def test_an_empty_answer_keeps_the_last_members() -> None:
    async with following("127.0.0.2") as one:
        await until(lambda: bool(one.changes))
        with capture_logs() as lines:
            one.server.addresses(NAME)
            await one.rounds()
        assert one.changes == [at("127.0.0.2")]
        assert [line["reason"] for line in lines] == [
            f"{NAME}:7001: no workers are named; the last known members stay"
        ]


async def test_a_late_answer_is_not_used() -> None:
    async with following("127.0.0.2", timeout_s=0.05) as one:
        await until(lambda: bool(one.changes))
        with capture_logs() as lines:
            one.server.is_silent = True
            one.server.addresses(NAME, "127.0.0.9")
            await one.rounds()
            one.server.addresses(NAME, "127.0.0.2")
            await one.server.send_late()
            one.server.is_silent = False
            await until(lambda: len(lines) >= 2)
        assert one.changes[0] == at("127.0.0.2")
        assert at("127.0.0.9")[0] not in str(one.changes)


async def test_nothing_listens_at_the_server_and_later_it_does() -> None:
    server = DnsServer()
    server.addresses(NAME, "127.0.0.2")
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as first:
            await first.start(server.run)
            first.cancel_scope.cancel()
        one = Followed(server, 0.2)
        with capture_logs() as lines:
            nursery.start_soon(one.source.run, one.use)
            await until(lambda: bool(lines))
            await nursery.start(server.run)
            await until(lambda: one.changes == [at("127.0.0.2")])
        assert lines[0]["event"] == "membership_store_failed"
        nursery.cancel_scope.cancel()


async def test_a_server_that_answers_nonsense_keeps_the_last_members() -> None:
    async with following("127.0.0.2", timeout_s=0.2) as one:
        await until(lambda: bool(one.changes))

        def nonsense(content: bytes) -> Any:  # noqa: ANN401 (stands for a message)
            class Nonsense:
                def to_wire(self) -> bytes:
                    return content[:2] + b"\xff" * 40

            return Nonsense()

        with capture_logs() as lines:
            one.server._answer = nonsense  # type: ignore[method-assign]
            await until(lambda: bool(lines))
        assert one.changes == [at("127.0.0.2")]


def config_of(server: DnsServer) -> DnsConfig:
    return DnsConfig(nameserver=server.address, timeout_s=30.0)


@pytest.fixture
async def server(nursery: trio.Nursery) -> DnsServer:
    server = DnsServer()
    await nursery.start(server.run)
    return server


async def test_srv_records_hold_the_ports(server: DnsServer) -> None:
    server.records[("_control._tcp.w.test", "SRV")] = ["0 0 7001 a.test.", "0 0 7002 b.test."]
    server.addresses("a.test", "127.0.0.2")
    server.records[("b.test", "AAAA")] = ["::1"]
    found = await places_of("_control._tcp.w.test", config_of(server))
    assert found == {"127.0.0.2:7001", "[::1]:7002"}


async def test_a_worker_with_addresses_of_both_kinds_is_one_worker(server: DnsServer) -> None:
    server.records = {("w.test", "A"): ["127.0.0.2"], ("w.test", "AAAA"): ["::1"]}
    assert await places_of("w.test:7", config_of(server)) == {"127.0.0.2:7"}
    del server.records[("w.test", "A")]
    assert await places_of("w.test:7", config_of(server)) == {"[::1]:7"}


async def test_an_answer_that_is_too_long_for_a_datagram_comes_whole(server: DnsServer) -> None:
    server.addresses("w.test", *(f"10.0.{n // 250}.{n % 250}" for n in range(MAX_MEMBERS)))
    assert len(await places_of("w.test:7", config_of(server))) == MAX_MEMBERS


async def test_an_impossible_address_of_the_server_is_logged_and_ends_nothing() -> None:
    config = DnsConfig(decode=f"{NAME}:7", nameserver="999.0.0.1:53", resolve_s=0.01)
    source = DnsSource(config, MemberTable((), set, 3))
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.run, lambda _: None)
            await until(lambda: bool(lines))
            nursery.cancel_scope.cancel()
    assert "999.0.0.1" in lines[0]["reason"]
