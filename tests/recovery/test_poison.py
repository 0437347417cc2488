"""Tests of a poison request, which crashes every worker that computes it: it is ended, and requests
beside it stay exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from simulation.engine import ScriptedEngine
from tests.server.scheduling.fakes import make_request
from triolet.errors import RequestError
from triolet.ids import Role

from .house import RESTART_S, House, Record, Slot, open_house, read_all
from .story import POISON, Deadly, dying_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from server.contract.generation import GenerationRequest
    from worker.engine_port import EnginePort

pytestmark = pytest.mark.slow

NUM_INNOCENT = 9
POISONED = chr(POISON)


def innocent() -> list[GenerationRequest]:
    return [
        make_request(number, prompt=f"Frage {number}", max_tokens=60, seed=number)
        for number in range(1, NUM_INNOCENT + 1)
    ]


def poisoned(number: int = 99) -> GenerationRequest:
    return make_request(number, prompt=f"Gift {POISONED}", max_tokens=60)


def failing_on(role: Role, kind: type[Exception] = Deadly) -> Callable[[Slot, EnginePort], None]:
    def prepare(slot: Slot, engine: EnginePort) -> None:
        assert isinstance(engine, ScriptedEngine)
        if slot.role is role:
            engine.before_step = dying_of(POISON, kind)

    return prepare


async def undisturbed() -> list[Record]:
    async with open_house() as house:
        return await read_all(house, innocent())


@pytest.fixture(scope="module")
def expected() -> list[Record]:
    return trio.run(undisturbed, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
@pytest.mark.parametrize("kind", [Deadly, RuntimeError])
@pytest.mark.parametrize("counts", [(1, 1), (2, 2)])
async def test_the_culprit_ends_and_its_neighbours_are_exact(
    role: Role,
    kind: type[Exception],
    counts: tuple[int, int],
    expected: list[Record],
    autojump_clock: MockClock,
) -> None:
    async with open_house(*counts, prepare=failing_on(role, kind)) as house:
        *records, culprit = await read_all(house, [*innocent(), poisoned()])
        assert culprit.end is not None
        assert records == expected
        if kind is Deadly:
            assert culprit.end[0] == "quarantined"
            assert house.seen.poisonous == [poisoned().request_id.hex()]
            await _check_quarantine(house)
        else:  # a process that lives convicts nothing
            assert culprit.end[0] == "no_worker"
            assert house.seen.poisonous == []
        await house.check_idle()


async def test_a_culprit_that_is_alone_kills_two_workers_and_no_more(
    autojump_clock: MockClock,
) -> None:
    async with open_house(1, 2, prepare=failing_on(Role.DECODE)) as house:
        [culprit] = await read_all(house, [poisoned()])
        assert culprit.end is not None
        assert culprit.end[0] == "quarantined"
        assert house.seen.causes["decode_lost"] == 2
        await trio.sleep(5.0)
        assert sum(slot.lives for slot in house.decodes) == 4


async def test_its_choices_end_with_it(autojump_clock: MockClock) -> None:
    async with open_house(1, 2, prepare=failing_on(Role.DECODE)) as house:
        records = await read_all(house, [poisoned(number) for number in range(1, 5)])
        assert {record.end and record.end[0] for record in records} <= {"quarantined", "no_worker"}
        assert len(house.seen.poisonous) >= 1
        await _check_quarantine(house)


async def _check_quarantine(house: House) -> None:
    """The prompt is refused at once, and another prompt is not; after a while it may try again."""
    await trio.sleep(2 * RESTART_S)  # the workers that it killed are back
    lives = [slot.lives for slot in (*house.prefills, *house.decodes)]
    with pytest.raises(RequestError) as refusal:
        house.fleet.submit(poisoned(100))
    assert (refusal.value.status, refusal.value.code) == (500, "quarantined")
    record = await house.ask(101, make_request(101, prompt="Frage", max_tokens=5))
    assert record.end is not None
    assert record.end[0] == "length"
    assert [slot.lives for slot in (*house.prefills, *house.decodes)] == lives
