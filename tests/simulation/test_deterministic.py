"""Tests of deterministic Trio runs: a seed decides the order of tasks, and a gate pauses a process.
They rely on undocumented behaviour of Trio."""

from __future__ import annotations

import time
from functools import partial

import pytest
import trio

from simulation.deterministic import ProcessGate, behind, run


async def order_of_tasks(num_tasks: int = 40) -> list[int]:
    """Run tasks that are ready at the same moment, three times; return the order of their runs."""
    order: list[int] = []

    async def work(number: int) -> None:
        for _ in range(3):
            await trio.sleep(1.0)
            order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(num_tasks):
            nursery.start_soon(work, number)
    return order


def test_a_seed_decides_the_order_of_tasks() -> None:
    orders = [run(order_of_tasks, seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_hours_pass_at_once() -> None:
    async def sleep() -> float:
        began_at = trio.current_time()
        await trio.sleep(80_000)
        return trio.current_time() - began_at

    began_at = time.monotonic()
    assert run(sleep, 0) == pytest.approx(80_000)
    assert time.monotonic() - began_at < 60


def test_the_scheduler_is_left_as_it_was() -> None:
    from trio._core import _run as scheduler

    generator, state = scheduler._r, scheduler._r.getstate()
    was_deterministic = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True, allow_unwrapped=True):
        run(divide, 3)
    assert scheduler._r is generator
    assert generator.getstate() == state
    assert was_deterministic == scheduler._ALLOW_DETERMINISTIC_SCHEDULING


async def divide() -> float:
    await trio.lowlevel.checkpoint()
    return 1 / 0


class Ticker:
    """A simulated process that records the time every second, with a child task that does too."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.child_ticks: list[float] = []
        self.began_at = trio.current_time()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick, self.child_ticks)
            await self._tick(self.ticks)

    async def _tick(self, ticks: list[float]) -> None:
        while True:
            await trio.sleep(1.0)
            ticks.append(round(trio.current_time() - self.began_at, 3))


def test_who_is_stopped_does_nothing_until_it_goes_on() -> None:
    async def main() -> Ticker:
        gate, ticker = ProcessGate(), Ticker()
        async with trio.open_nursery() as nursery:
            with behind(gate):
                nursery.start_soon(ticker.run)
            await trio.sleep(2.5)
            gate.close()
            await trio.sleep(4.0)
            gate.open()
            await trio.sleep(1.9)
            nursery.cancel_scope.cancel()
        return ticker

    ticker = run(main, 0)
    # The tick that was due during the pause comes at its end, the next one a second later.
    assert ticker.ticks == ticker.child_ticks == [1.0, 2.0, 6.5, 7.5]


def test_who_is_stopped_learns_of_its_cancellation_when_it_goes_on() -> None:
    async def main() -> list[float]:
        gate, left_at = ProcessGate(), []
        began_at = trio.current_time()

        async def wait(scope: trio.CancelScope) -> None:
            with scope:
                await trio.sleep_forever()
            left_at.append(trio.current_time() - began_at)

        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            with behind(gate):
                nursery.start_soon(wait, scope)
            await trio.sleep(1.0)
            gate.close()
            scope.cancel()
            await trio.sleep(3.0)
            assert not left_at
            gate.open()
        return left_at

    assert run(main, 0) == [4.0]


def test_what_a_stopped_task_was_given_is_not_lost() -> None:
    async def main() -> list[int]:
        gate, taken = ProcessGate(), []
        send, receive = trio.open_memory_channel[int](0)

        async def take() -> None:
            async for number in receive:
                taken.append(number)

        async with trio.open_nursery() as nursery:
            with behind(gate):
                nursery.start_soon(take)
            await trio.sleep(1.0)
            gate.close()
            await send.send(1)  # wakes the reader, which is still paused
            with trio.move_on_after(5.0):
                await send.send(2)
            assert taken == []
            gate.open()
            await send.send(3)
            await send.aclose()
        return taken

    assert run(main, 0) == [1, 3]


def test_tasks_outside_of_the_gate_go_on() -> None:
    async def main() -> int:
        gate, ticker = ProcessGate(), Ticker()
        gate.close()
        with trio.move_on_after(3.5):
            await ticker.run()
        return len(ticker.ticks)

    assert run(partial(main), 0) == 3
