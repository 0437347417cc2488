"""Tests of losing exactly one frame, drawn at random, in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import trio

from simulation.faults import LOSABLE, Fault, Loss, draw_loss
from simulation.network import control_address, make_network
from simulation.trace import Trace
from transport.codec import decode, encode
from transport.frames import Drain, End, EndReason
from transport.memory_pipe import Inbox, Pipe

if TYPE_CHECKING:
    from transport.frames import AnyFrame

MAX_BYTES = 1 << 20
REQUEST_ID = bytes(16)


async def test_the_second_frame_of_a_kind_is_lost_and_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    del autojump_clock
    _, weather = make_network(1, Trace())
    inbox = Inbox(weather.make_alarm())
    link = (control_address("decode-0"), b"server:server-0:1")
    pipe = inbox.pipes[b""] = Pipe(weather, link, "up", 10, inbox)
    ends: list[AnyFrame] = [End(REQUEST_ID, number, EndReason.CANCEL) for number in range(3)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(weather.lose, Loss(End, 1, 0.0, 0.0, 0))
        await trio.testing.wait_all_tasks_blocked()
        for frame in (Drain(1.0), *ends):
            pipe.put([encode(frame)])
    arrived = []
    while (parcel := pipe.peek()) is not None:
        arrived.append(decode(parcel.parts[0], MAX_BYTES))
        pipe.pop()
    assert arrived == [Drain(1.0), ends[0], ends[2]]
    happened: Counter[Fault] = Counter()
    weather.count(happened)
    assert (happened[Fault.LOSS], happened[Fault.PARTITION]) == (1, 0)


def test_every_kind_of_frame_is_drawn_with_standstills_on_both_sides_of_each_bound() -> None:
    drawn = [draw_loss(random.Random(seed)) for seed in range(1000)]
    assert {loss.kind for loss in drawn} == set(LOSABLE)
    stops = {loss.stops_s for loss in drawn}
    for bound_s in (0.5, 1.0, 1.5, 2.0):  # heartbeat interval, late, silent, lease
        assert any(bound_s - 0.2 <= stop <= bound_s for stop in stops)
        assert any(bound_s <= stop <= bound_s + 0.2 for stop in stops)
