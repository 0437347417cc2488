"""Tests of waiting in virtual time: the simulator's waits behave like Trio's own, without cancel
scopes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import trio

from simulation.campaign import keep_quiet
from simulation.clock import NEVER, ClockAlarm, Timer, VirtualClock
from simulation.deterministic import run
from simulation.network import Weather
from simulation.scenario import simulate
from transport.memory_pipe import Alarm, ScopeAlarm

SEEDS = (9, 23, 134, 203)
"""Seeds of the corpus with deaths, drains, pauses and partitions."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_tells_the_same_story_with_trios_own_waits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_quiet()
    trace = simulate(seed).trace
    num_alarms = 0

    def make_alarm(_: Weather) -> ScopeAlarm:
        nonlocal num_alarms
        num_alarms += 1
        return ScopeAlarm()

    monkeypatch.setattr(Weather, "make_alarm", make_alarm)
    monkeypatch.setattr(VirtualClock, "rules", lambda _: nullcontext())
    assert simulate(seed).trace == trace
    assert num_alarms


def test_who_is_cancelled_in_the_turn_in_which_the_wait_ends_is_cancelled() -> None:
    async def main() -> list[str]:
        did: list[str] = []

        async def wait(scope: trio.CancelScope) -> None:
            with scope:
                await trio.sleep(1.0)
                did.append("slept")

        scopes = [trio.CancelScope() for _ in range(20)]
        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(wait, scope)
            await trio.lowlevel.checkpoint()
            await trio.sleep(1.0)  # ends in the same turn as the others, after some of them
            num_before = len(did)
            for scope in scopes:
                scope.cancel()
        assert len(did) == num_before
        return did

    assert 0 < len(run(main, 0)) < 20


def test_a_wait_that_has_been_cancelled_ends_nobody_elses() -> None:
    async def main() -> float:
        with trio.move_on_after(1.0):
            await trio.sleep(2.0)
        began_at = trio.current_time()
        await trio.sleep(5.0)  # longer than the rest of the cancelled one
        return trio.current_time() - began_at

    assert run(main, 0) == pytest.approx(5.0)


def test_a_wait_for_the_past_is_a_checkpoint() -> None:
    async def main() -> None:
        before = trio.current_time()
        await trio.sleep(0.0 * before)
        await trio.sleep_until(before - 1.0)
        assert trio.current_time() == before
        with pytest.raises(ValueError, match="non-negative"):
            await trio.sleep(-1.0)

    run(main, 0)


async def woken_at(alarm: Alarm, due: float) -> float:
    """Wait for an alarm that other tasks may bring forward or ring; return how long it took."""
    began_at = trio.current_time()
    await alarm.wait(due)
    return trio.current_time() - began_at


@pytest.mark.parametrize("make_alarm", [ClockAlarm, ScopeAlarm])
def test_an_alarm_goes_off_at_the_earliest_time_that_anybody_said(
    make_alarm: type[ClockAlarm | ScopeAlarm],
) -> None:
    async def main() -> None:
        alarm = make_alarm()
        alarm.expect(1.0)  # has no effect: no task waits
        lasted: list[float] = []

        async def wait(due: float) -> None:
            lasted.append(await woken_at(alarm, due))

        async with trio.open_nursery() as nursery:
            now = trio.current_time()
            nursery.start_soon(wait, now + 9.0)
            nursery.start_soon(wait, NEVER)
            await trio.sleep(1.0)
            alarm.expect(now + 20.0)
            alarm.expect(now + 5.0)
            alarm.expect(now + 3.0)
            alarm.expect(now + 4.0)
        assert lasted == pytest.approx([3.0, 3.0])  # both waits end at the earliest time
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, NEVER)
            await trio.sleep(2.0)
            alarm.ring()
        assert lasted[2] == pytest.approx(2.0)

    run(main, 0)


def test_a_timer_that_is_brought_forward_to_now_ends_at_once() -> None:
    async def main() -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, VirtualClock)
        began_at = trio.current_time()
        timer = Timer(clock, began_at + 9.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timer.wait)
            await trio.sleep(1.0)
            timer.bring_forward(began_at)
        assert trio.current_time() == began_at + 1.0
        timer.fire()  # has no effect: the timer has ended
        timer.bring_forward(began_at)

    run(main, 0)


def test_trio_has_its_own_waits_again_after_a_run() -> None:
    functions = trio.sleep, trio.sleep_until, trio.current_time
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True, allow_unwrapped=True):
        run(divide, 0)
    assert (trio.sleep, trio.sleep_until, trio.current_time) == functions


async def divide() -> float:
    assert trio.sleep.__name__ == "sleep"
    await trio.sleep(1.0)
    return 1 / 0
