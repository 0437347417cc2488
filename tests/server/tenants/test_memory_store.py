"""Tests of the account store of a single host: spending survives a restart and is shared by the
host's servers."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest
import trio

from server.tenants.accounts import Limit, QuotaAsk, Settlement, TenantLimits
from server.tenants.memory_store import MemoryStore, Spend, SpendFile
from tests.server.support.surface import until
from triolet.config import QuotaConfig, shown_url
from triolet.errors import ConfigError

from .fakes import RecordingObserver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMITS = TenantLimits(budget=1000)
MAY_2031 = 1_936_000_000.0
KEEP_S = 3600.0


class Host:
    """A spend file, with stores that use it one after another or concurrently."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "new" / "spend.sqlite3")
        self.day = MAY_2031
        self.files: list[SpendFile] = []
        self.observer = RecordingObserver()

    def store(self, servers: int = 1, flush_s: float = 0.001) -> MemoryStore:
        config = QuotaConfig(flush_s=flush_s, servers=servers)
        file = self.file()
        return MemoryStore(config, self.observer, file, calendar=lambda: self.day)

    def file(self) -> SpendFile:
        self.files.append(SpendFile(self.path, KEEP_S))
        return self.files[-1]

    async def spend(self, store: MemoryStore, cost: int) -> None:
        await store.reserve(QuotaAsk("1", "t", 0, cost), LIMITS)
        store.settle(Settlement("1", "t", LIMITS, 2 * cost, cost))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    for file in host.files:
        file.close()


async def run_once(host: Host, *costs: int) -> MemoryStore:
    """Run a server that ends before its first flush may have come."""
    store = host.store()
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        for cost in costs:
            await host.spend(store, cost)
        nursery.cancel_scope.cancel()
    return store


async def test_spend_survives_a_restart_exactly(host: Host) -> None:
    await run_once(host, 300, 33)
    store = await run_once(host, 7)
    account = store.last_seen("t", LIMITS)
    assert (account.spent, account.used_tokens) == (340, 680)
    assert host.observer.spends == [("t", 0, 333), ("t", 333, 340)]


async def test_servers_of_a_host_know_what_the_others_spent(host: Host) -> None:
    a, b = host.store(2), host.store(2)
    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        await nursery.start(b.run)
        await host.spend(a, 600)
        await host.spend(b, 500)
        await until(
            lambda: a.last_seen("t", LIMITS).spent == b.last_seen("t", LIMITS).spent == 1100
        )
        verdict = await a.reserve(QuotaAsk("2", "t", 0, 0), LIMITS)
        assert verdict.refused_by is Limit.BUDGET
        nursery.cancel_scope.cancel()
    steps = sorted((before, after) for _, before, after in host.observer.spends)
    assert steps in ([(0, 600), (600, 1100)], [(0, 500), (500, 1100)])


async def test_a_new_month_begins_with_nothing_spent_and_the_old_one_stays(host: Host) -> None:
    await run_once(host, 1000)
    store = host.store()
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        verdict = await store.reserve(QuotaAsk("1", "t", 0, 0), LIMITS)
        assert verdict.refused_by is Limit.BUDGET
        host.day += 31 * 86400
        await host.spend(store, 5)
        nursery.cancel_scope.cancel()
    _, totals = host.file().add({}, MAY_2031)
    assert totals == {("2031-05", "t"): Spend(1000, 2000)}
    assert store.last_seen("t", LIMITS).spent == 5


async def test_what_cannot_be_written_now_is_written_later(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = host.store()
    add, num_failures = SpendFile.add, 0

    def fail_twice(
        self: SpendFile, spend: dict[tuple[str, str], dict[str, Spend]], now: float
    ) -> object:
        nonlocal num_failures
        if spend and num_failures < 2:
            num_failures += 1
            raise sqlite3.OperationalError("disk full")
        return add(self, spend, now)

    monkeypatch.setattr(SpendFile, "add", fail_twice)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        await host.spend(store, 100)
        await until(lambda: bool(host.observer.spends))
        nursery.cancel_scope.cancel()
    assert num_failures == 2
    assert host.observer.spends == [("t", 0, 100)]


async def test_a_line_that_stops_waiting_for_its_charge_is_charged_once(host: Host) -> None:
    """Another server took over its batch, and computes and charges it again."""
    store = host.store(flush_s=3600)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        with trio.CancelScope() as lines:
            async with trio.open_nursery() as waiting:
                for number in range(16):
                    settlement = Settlement(f"{number}", "t", LIMITS, 2, 1, once_id=f"{number}")
                    store.settle(settlement)
                    waiting.start_soon(store.wait_saved)
                await trio.lowlevel.checkpoint()
                lines.cancel()
        nursery.cancel_scope.cancel()
    other = host.store(flush_s=3600)
    async with trio.open_nursery() as nursery:
        await nursery.start(other.run)
        for number in range(16):
            other.settle(Settlement(f"again-{number}", "t", LIMITS, 2, 1, once_id=f"{number}"))
        await other.wait_saved()
        nursery.cancel_scope.cancel()
    _, totals = host.file().add({}, host.day)
    assert totals["2031-05", "t"].nanos == 16


async def test_work_that_is_computed_again_is_charged_once(host: Host) -> None:
    """The first server dies before it stores the result, or before the work is complete."""

    async def compute(name: str, cost: int, once_id: str = "line") -> int:
        store = host.store(flush_s=3600)
        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            store.settle(Settlement(name, "t", LIMITS, 2 * cost, cost, once_id=once_id))
            await store.wait_saved()
            _, totals = host.file().add({}, host.day)
            spent, tokens = totals["2031-05", "t"]
            assert store.last_seen("t", LIMITS).spent == spent
            assert tokens == 2 * spent
            nursery.cancel_scope.cancel()
        return spent

    assert [await compute(f"{n}", cost) for n, cost in enumerate((30, 100, 100, 70))] == [
        *(30, 100, 100, 100)
    ]
    assert await compute("5", 100, "other") == 200
    assert host.observer.spends == [
        *(("t", 0, 30), ("t", 30, 100), ("t", 100, 100), ("t", 100, 100), ("t", 100, 200))
    ]
    host.day += KEEP_S / 2
    assert await compute("6", 100) == 200, "it is remembered from its last charge"
    host.day += KEEP_S
    assert await compute("7", 0, "") == 200
    assert await compute("8", 1) == 201, "and not for ever"


async def test_parts_of_several_servers_add_up_to_the_limit() -> None:
    limits = TenantLimits(requests=10.0, tokens=100.0)
    admitted = 0
    for _ in range(5):
        store = MemoryStore(QuotaConfig(servers=5), RecordingObserver(), clock=lambda: 0.0)
        for number in range(10):
            verdict = await store.reserve(QuotaAsk(f"{number}", "t", 1), limits)
            admitted += verdict.refused_by is None
    assert admitted == 10


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database, but long enough to be taken for one" * 99)
    for path in (tmp_path / "text", tmp_path / "text" / "below"):
        with pytest.raises(ConfigError, match=r"quotas\.spend_file"):
            SpendFile(str(path), KEEP_S)


@pytest.mark.parametrize(
    "limits",
    [
        *("redis:/h", "http://h", "redis://", "", "unix://"),
        *("redis://h:abc", "redis://h:0", "redis://h:70000", "redis://h/x", "rediss://h/1/2"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(limits: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: memory, redis://"):
        QuotaConfig(limits=limits)


def test_a_password_is_not_shown() -> None:
    url = "rediss://user:se%2Fcr@t@host:7/3?x=secret"
    config = QuotaConfig(limits="redis://user:secret@host:7/3")
    assert shown_url(url) == "rediss://host:7/3"
    assert "secret" not in repr(config)
    assert shown_url("unix://:secret@/run/redis.sock?db=1") == "unix:///run/redis.sock"
    with pytest.raises(ConfigError) as refused:
        QuotaConfig(limits="http://user:secret@host")
    assert "secret" not in str(refused.value)
