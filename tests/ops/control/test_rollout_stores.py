"""Tests of the stores of rollouts: control's journal, and a real Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from structlog.testing import capture_logs

from ops.control.journal import opened_journal
from ops.control.rollout_stores import KEEP_RELEASE, RedisRollouts, RolloutStolen, RolloutStoreAway
from ops.rollouts.evidence import RolloutEvidence
from ops.rollouts.rollout import Rollout, RolloutOrder, RolloutSettings
from tests.ops.rollouts.rollout_cases import plan, request
from tests.server.tenants.redis_server import running_redis
from triolet.config.membership import RedisMembersConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ops.control.rollout_stores import RolloutStore

    Open = Callable[[], RolloutStore]


def rollout(model: str = "chat", number: str = "1") -> Rollout:
    settings = RolloutSettings(model=model, ref="chat:v2")
    evidence = RolloutEvidence().begin_step(plan(), 0, 5.0)
    return Rollout(id=number, settings=settings, plan=plan(), evidence=evidence)


@pytest.fixture(autouse=True)
def private_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)


@pytest.fixture(params=["sqlite", "redis"])
def opens(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens the same store once more, as another control does."""
    if request.param == "sqlite":
        with opened_journal(tmp_path) as journal:
            yield journal.rollouts
        return
    with running_redis(tmp_path) as server:
        yield lambda: RedisRollouts(RedisMembersConfig(server.url, timeout_s=60.0))


async def test_a_store_returns_what_was_written(opens: Open) -> None:
    store, one, other = opens(), rollout(), rollout("code", "2")
    assert await store.read() == []
    assert await store.write(one, 0, 10.0) == 1
    await store.write(other, 0, 11.0)
    one.order(RolloutOrder.ROLLBACK, "user:ada", 12.0)
    assert await store.write(one, 1, 12.0) == 2
    await store.renew(other, 1, 13.5)
    kept = {found.rollout.settings.model: found for found in await opens().read()}
    assert kept == {"chat": (one, 2, 12.0), "code": (other, 1, 13.5)}


async def test_a_store_keeps_the_evidence_without_the_users(opens: Open) -> None:
    store, one = opens(), rollout()
    one.evidence.add_requests(one.plan, [request(user, "old", 6.0) for user in range(1000)], 8.0)
    assert len(one.evidence.warm_at) > 500
    await store.write(one, 0, 10.0)
    [kept] = await store.read()
    assert kept.rollout.evidence.warm_at == {}
    assert (kept.rollout.evidence.tallies, kept.rollout.evidence.window) == (
        one.evidence.tallies,
        one.evidence.window,
    )


async def test_of_two_controls_one_is_refused(opens: Open) -> None:
    first, second = opens(), opens()
    await first.write(rollout(), 0, 10.0)
    [kept] = await second.read()
    assert await second.write(kept.rollout, kept.number, 11.0) == 2
    for work in (lambda: first.write(rollout(), 1, 12.0), lambda: first.renew(rollout(), 1, 12.0)):
        with pytest.raises(RolloutStolen, match="another control has changed the rollout of chat"):
            await work()
    with pytest.raises(RolloutStolen):
        await first.write(rollout(number="2"), 0, 13.0)
    [kept] = await first.read()
    assert (kept.rollout.id, kept.number, kept.renewed_at) == ("1", 2, 11.0)


async def test_of_many_first_writes_at_once_one_counts(opens: Open) -> None:
    won: list[int] = []

    async def write(number: int) -> None:
        try:
            await opens().write(rollout(number=str(number)), 0, 10.0)
        except RolloutStolen:
            return
        won.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(write, number)
    [kept] = await opens().read()
    assert [kept.rollout.id] == [str(number) for number in won]


async def test_a_control_whose_answer_was_lost_goes_on_at_redis(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        store = RedisRollouts(RedisMembersConfig(server.url, timeout_s=60.0))
        await store.write(rollout(), 0, 10.0)
        assert await store.write(rollout(), 0, 11.0) == 2, "it does not know of its first write"
        await store.renew(rollout(), 1, 12.0)
        server.stop()
        with pytest.raises(RolloutStoreAway, match="Redis does not answer"):
            await store.write(rollout(), 2, 13.0)
        server.start()
        assert await store.write(rollout(), 2, 14.0) == 3


async def test_a_journal_that_cannot_be_written_is_said_to_be_away(tmp_path: Path) -> None:
    with opened_journal(tmp_path) as journal:
        store = journal.rollouts()
        await store.write(rollout(), 0, 10.0)
        journal._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(RolloutStoreAway, match="the journal cannot be written"):
            await store.write(rollout(), 1, 11.0)
        with pytest.raises(RolloutStoreAway):
            await store.renew(rollout(), 1, 11.0)
        journal._connection.execute("PRAGMA query_only = OFF")
        await store.renew(rollout(), 1, 12.0)


async def test_a_redis_that_lost_its_data_gets_the_rollout_again(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        store, other = (
            RedisRollouts(RedisMembersConfig(server.url, timeout_s=60.0)) for _ in range(2)
        )
        one = rollout()
        assert [await store.write(one, number, 10.0) for number in range(3)] == [1, 2, 3]
        server.command("FLUSHALL")
        await store.renew(one, 3, 11.0)
        assert await other.read() == [(one, 4, 11.0)]
        server.command("FLUSHALL")
        assert await store.write(one, 3, 12.0) == 4
        server.command("FLUSHALL")
        await other.write(rollout(number="2"), 0, 13.0)
        assert await store.write(one, 4, 14.0) == 5, "the other one began after the loss"
        with pytest.raises(RolloutStolen):
            await other.renew(rollout(number="2"), 1, 15.0)


async def test_rollouts_of_another_release_block_no_others(opens: Open) -> None:
    store, over, live = opens(), rollout("over"), rollout("live")
    over.is_over = True
    for one in (over, live):
        one.phase = "unheard of"  # type: ignore[assignment]
        await store.write(one, 0, 10.0)
    await store.write(rollout(), 0, 10.0)
    store = opens()
    with capture_logs() as lines:
        assert [kept.rollout.settings.model for kept in await store.read()] == ["chat"]
    said = sorted(line["reason"] for line in lines if line["event"] == "rollout_not_read")
    assert [one.rpartition("; ")[2] for one in said] == [KEEP_RELEASE, "nothing need be done"]
    assert await store.write(rollout("over"), 0, 11.0) == 2, "in place of the one that is over"
    expected = "the last rollout of live cannot be read: .*; run the release that wrote it"
    with pytest.raises(RolloutStoreAway, match=expected):
        await store.write(rollout("live"), 0, 11.0)
