"""Tests of the thread that runs device work: jobs run one at a time, are waited for even if
cancelled, and are reported if they hang."""

from __future__ import annotations

import math
import os
import threading

import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked

from engine.device_thread import DeviceThread
from triolet.errors import DeviceWedged, LocalProtocolError


def open_thread(max_waiting: int = 2, num_threads: int | None = None) -> DeviceThread:
    return DeviceThread(max_waiting, num_threads, close_timeout_s=5.0)


class Gate:
    """A job that starts, notifies Trio, and waits to be released."""

    def __init__(self) -> None:
        self.entered = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._may_leave = threading.Event()

    def __call__(self) -> str:
        self._token.run_sync_soon(self.entered.set)
        assert self._may_leave.wait(60.0)
        return "through"

    def open(self) -> None:
        self._may_leave.set()


async def test_results_and_errors_come_back() -> None:
    async with open_thread() as device:
        assert await device.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await device.run(divmod, 7, 0)
        assert await device.run(threading.current_thread) is not threading.current_thread()
        assert device.statistics().steps == 3


async def test_every_job_runs_on_the_same_thread_with_its_own_kernel_threads() -> None:
    before = torch.get_num_threads()
    async with open_thread(num_threads=2) as device:
        names = {(await device.run(threading.current_thread)).name for _ in range(3)}
        assert names == {"device"}
        assert await device.run(torch.get_num_threads) == 2
    torch.set_num_threads(before)


async def test_the_thread_stands_back_for_others() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = niceness()
    async with DeviceThread(2, None, close_timeout_s=5.0, niceness=3) as device:
        assert await device.run(niceness) == min(19, own + 3)
    assert niceness() == own


async def test_jobs_run_in_order_and_one_at_a_time() -> None:
    order: list[int] = []
    running = 0

    def job(index: int) -> None:
        nonlocal running
        running += 1
        assert running == 1
        order.append(index)
        running -= 1

    gate = Gate()
    async with open_thread(max_waiting=10) as device, trio.open_nursery() as nursery:
        nursery.start_soon(device.run, gate)
        await gate.entered.wait()
        for index in range(8):
            nursery.start_soon(device.run, job, index)
            await wait_all_tasks_blocked()
        assert device.statistics().waiting == 8
        gate.open()
    assert order == list(range(8))


async def test_a_running_job_is_waited_for_although_its_caller_is_cancelled() -> None:
    gate = Gate()
    results: list[str] = []

    async def call(device: DeviceThread, scope: trio.CancelScope) -> None:
        with scope:
            results.append(await device.run(gate))

    async with open_thread() as device, trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(call, device, scope)
        await gate.entered.wait()
        scope.cancel()
        await wait_all_tasks_blocked()
        assert not scope.cancelled_caught
        assert device.statistics().busy_since is not None
        gate.open()
    assert scope.cancelled_caught
    assert results == []
    assert device.statistics().steps == 1


async def test_a_cancelled_caller_of_a_wedged_job_leaves_at_the_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gate = Gate()
    device = open_thread()
    await device.__aenter__()
    began_at = trio.current_time()
    with pytest.RaisesGroup(DeviceWedged):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(device.run, gate)
            await gate.entered.wait()
            nursery.cancel_scope.cancel()
    assert trio.current_time() - began_at == 5.0
    # The thread runs in real time: a clock that still jumped would reach the deadline first.
    autojump_clock.autojump_threshold = math.inf
    gate.open()
    await device.aclose(5.0)


async def test_a_caller_that_waits_for_room_can_be_cancelled() -> None:
    ran: list[str] = []
    gate = Gate()
    async with open_thread(max_waiting=1) as device, trio.open_nursery() as nursery:
        nursery.start_soon(device.run, gate)
        await gate.entered.wait()
        nursery.start_soon(device.run, ran.append, "accepted")
        await wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await device.run(ran.append, "refused")
        assert scope.cancelled_caught
        gate.open()
    assert ran == ["accepted"]


async def test_busy_since_is_in_the_time_of_trio() -> None:
    gate = Gate()
    async with open_thread() as device, trio.open_nursery() as nursery:
        assert device.statistics().busy_since is None
        before = trio.current_time()
        nursery.start_soon(device.run, gate)
        await gate.entered.wait()
        busy_since = device.statistics().busy_since
        assert busy_since is not None
        assert before <= busy_since <= trio.current_time()
        gate.open()


async def test_closing_runs_what_was_accepted_and_takes_no_more() -> None:
    ran: list[str] = []
    gate = Gate()
    device = open_thread()
    async with trio.open_nursery() as nursery:
        async with device:
            nursery.start_soon(device.run, gate)
            await gate.entered.wait()
            nursery.start_soon(device.run, ran.append, "accepted")
            await wait_all_tasks_blocked()
            gate.open()
        assert ran == ["accepted"]
    with pytest.raises(LocalProtocolError, match="the device thread is closed"):
        await device.run(ran.append, "late")
    await device.aclose(1.0)


async def test_a_wedged_job_is_reported_at_the_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gate = Gate()
    device = open_thread()
    await device.__aenter__()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, gate)
        await gate.entered.wait()
        with pytest.raises(DeviceWedged, match=r"has not returned within 5\.0 s"):
            await device.__aexit__(None, None, None)
        gate.open()
    assert device.statistics().steps == 1
