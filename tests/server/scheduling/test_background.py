"""Tests of pausing batch requests while interactive requests wait."""

from __future__ import annotations

import math
import sys
from typing import Any, cast

from server.contract.generation import input_request
from server.scheduling.delivery import Delivery, EmbeddingRun, RequestOutput
from triolet.config import BACKGROUND_HOLD_S
from triolet.pooling import VectorForm
from triolet.service_class import Scheduling, ServiceClass

from .fakes import make_request
from .world import World


def test_who_waits_by_its_own_limit_is_in_no_hurry() -> None:
    world = World()
    background = world.requests.background
    limited = Scheduling("limited", max_running=1)
    assert (background.is_urgent(), background.hold_s()) == (False, 0.0)
    reader = world.submit(make_request(1, scheduling=limited))
    assert (background.is_urgent(), background.hold_s()) == (True, BACKGROUND_HOLD_S)
    world.submit(make_request(2, scheduling=limited))
    for _ in range(10):
        world.deliver()
        for worker in world.workers:
            world.compute(worker)
        if reader.request.relay.token_ids:
            break
    assert reader.request.relay.token_ids
    assert len(world.requests.queues[0]) == 1
    assert not background.is_urgent()
    world.submit(make_request(3, scheduling=Scheduling("other")))
    assert background.is_urgent()
    world.end()


def test_while_batches_are_paused_none_begins() -> None:
    world = World()
    line, background = world.requests.queues[0], world.requests.background
    line.pause({ServiceClass.BATCH})
    assert background.hold_s() == math.inf
    line.pause(())
    assert background.hold_s() == 0.0


async def test_what_waits_in_a_paused_class_has_not_begun() -> None:
    world = World()
    scheduling = Scheduling(service_class=ServiceClass.BATCH)
    for queue in world.requests.queues:
        queue.pause({ServiceClass.BATCH})
    request = world.submit(make_request(1, scheduling=scheduling)).request
    delivery = Delivery(world.requests, cast("Any", None))
    stream = RequestOutput(request, delivery)
    asked = input_request(bytes(16), (1, 2), VectorForm(), 600.0, scheduling=scheduling)
    run = EmbeddingRun(
        [asked],
        lambda some, first: world.requests.submit(some, world.now, first=first),
        delivery,
    )
    world.collect()
    world.deliver()
    assert (stream.has_begun, run.has_begun) == (False, False)
    world.sweep(1.0)  # without brownout
    world.settle()
    assert (stream.has_begun, run.has_begun) == (True, True), "even after it is over"
    world.check_idle()


def test_inputs_that_wait_cost_the_streams_of_batches_nothing() -> None:
    world = World()
    world.announce(world.prefill, token_credit=0)
    world.requests.submit(
        [input_request(bytes([n]) * 16, (1, 2), VectorForm(), 600.0) for n in range(200)], world.now
    )
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    is_urgent = world.requests.background.is_urgent()
    sys.setprofile(before)
    assert len(world.requests.queues[1]) > 190
    assert not is_urgent
    assert calls < 50
