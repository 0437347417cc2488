"""Tests of partitions and paused processes: an old attempt is fenced off, and a pause costs a
stream at most one attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from server.contract.generation import CancelReason
from tests.server.scheduling.fakes import make_request
from triolet.ids import Role

from . import house as house_module
from .house import LINK, House, Record, open_house, read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from server.contract.generation import GenerationRequest

pytestmark = pytest.mark.slow


def requests(num_tokens: int = 250) -> list[GenerationRequest]:
    return [
        make_request(number, prompt=f"Reise {number}", max_tokens=num_tokens, seed=number)
        for number in range(1, 7)
    ]


async def undisturbed() -> list[Record]:
    async with open_house() as house:
        return await read_all(house, requests())


@pytest.fixture(scope="module")
def expected() -> list[Record]:
    return trio.run(undisturbed, clock=trio.testing.MockClock(autojump_threshold=0))


async def read_disturbed(house: House, disturb: Callable[[], Awaitable[None]]) -> list[Record]:
    """Read all requests, and disturb them when all of them run."""

    async def in_time() -> None:
        await house.until(
            lambda: len(house.records) == 6 and all(r.token_ids for r in house.records.values())
        )
        await disturb()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_time)
        return await read_all(house, requests())


async def test_a_decode_worker_that_only_its_server_lost_is_not_listened_to_again(
    expected: list[Record], autojump_clock: MockClock
) -> None:
    # A window so wide that it goes on computing although no credit comes.
    async with open_house(token_window=1000) as house:
        parted = house.decodes[0]

        async def part() -> None:
            house.network.cut_all(parted.config.control_address)
            await trio.sleep(LINK.peer_timeout_s + 0.1)
            # It has not given its leases up yet, and still computes for them.
            assert house.seen.causes["decode_lost"]
            assert parted.engine.ledger.leased_blocks > 0
            house.network.heal_all(parted.config.control_address)

        records = await read_disturbed(house, part)
        assert records == expected
        assert parted.lives == 1
        # What its attempts still said was dropped, by their number.
        assert house.seen.dropped["not_greeted"] + house.seen.dropped["old_attempt"] > 0
        await house.check_idle()


async def test_stalled_kv_goes_another_way_within_its_bound(
    expected: list[Record], autojump_clock: MockClock
) -> None:
    async with open_house(prefills=2, decodes=1) as house:
        address = house.decodes[0].config.kv_address
        assert address is not None
        await house.ask(99, make_request(99, max_tokens=2))
        await house.ask(98, make_request(98, max_tokens=2))
        [*identities] = house.network.dialled[address]
        stalled = [identity for identity in identities if b"prefill-0" in identity]
        for identity in stalled:
            house.network.cut(address, identity)
        del house.records[99], house.records[98]
        began_at = trio.current_time()
        records = await read_all(house, requests(20))
        assert [record.token_ids for record in records] == [r.token_ids[:20] for r in expected]
        if stalled:
            assert house.seen.causes["prefill_peer_lost"]
            assert trio.current_time() - began_at < LINK.kv_stall_s + 2.0
        assert not house.seen.breakers, "neither of the two is at fault"
        await house.check_idle()


@pytest.mark.parametrize("seconds", [0.6, 1.0, 1.45, 1.7, 2.5, 60.0])
async def test_a_standstill_costs_nothing_or_if_long_each_stream_one_attempt(
    seconds: float, expected: list[Record], autojump_clock: MockClock
) -> None:
    is_long = seconds > 1.5
    async with open_house(**({"max_attempts": 1} if is_long else {})) as house:

        async def stand_still() -> None:
            autojump_clock.jump(seconds)
            await trio.sleep(0.2)

        records = await read_disturbed(house, stand_still)
        assert records == expected
        assert house.seen.causes == ({"server_paused": len(records)} if is_long else {})
        assert is_long or len(house.seen.pauses) == 1
        await house.check_idle()


@pytest.mark.parametrize("mover", ["a client that leaves", "a client that reads on"])
async def test_whatever_moves_first_after_a_standstill_blames_no_worker(
    mover: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(house_module, "RESTART_S", 4.0)
    async with open_house(decodes=1, max_attempts=1) as house:
        # Which task comes first after the gap is chance.
        for number in range(100, 116, 2):
            first, second = (
                house.fleet.submit(make_request(n, max_tokens=200)) for n in (number, number + 1)
            )
            for stream in (first, second):
                with trio.fail_after(60):
                    await anext(stream)
            await trio.sleep(0.5)
            # Its link breaks, and the server would notice at once; but then it stands still.
            house.decodes[0].kill()
            autojump_clock.jump(2.5)
            if mover == "a client that leaves":
                first.cancel(CancelReason.CLIENT_GONE)
            else:
                await anext(first)
            await trio.sleep(0.1)
            for stream in (first, second):
                stream.cancel(CancelReason.CLIENT_GONE)
            await trio.sleep(5.0)
        assert set(house.seen.causes) == {"server_paused"}
        await house.check_idle()


async def test_a_busy_machine_is_not_taken_for_dead_workers(
    expected: list[Record], autojump_clock: MockClock
) -> None:
    async with open_house() as house:

        async def starve() -> None:
            for _ in range(8):
                autojump_clock.jump(1.3)
                await trio.sleep(0.03)

        records = await read_disturbed(house, starve)
        assert records == expected
        assert not house.seen.causes
        await house.check_idle()


async def test_a_worker_at_the_same_address_is_a_new_worker(autojump_clock: MockClock) -> None:
    async with open_house(decodes=1) as house:
        slot = house.decodes[0]
        for life in range(1, 4):
            record = await house.ask(life, make_request(life, max_tokens=10))
            assert record.end is not None
            assert record.end[0] == "length"
            states = [w.state for w in house.fleet.status().workers if w.role is Role.DECODE]
            assert states == ["alive"]
            slot.kill()
            await trio.sleep(2.0)
        assert slot.lives == 4
        assert not house.seen.causes
        await house.check_idle()
