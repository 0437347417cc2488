"""Tests of embedding inputs in the server: each ends once, whatever happens to its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from server.contract.generation import CancelReason, Failed, Finished, input_request
from transport.frames import Embed, End, Ended, EndReason
from triolet.config import EmbeddingLimits
from triolet.errors import RequestError
from triolet.pooling import VectorForm

from .fakes import embedded, make_request, vector_of
from .world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.contract.generation import GenerationRequest
    from server.scheduling.request import Request

ERROR = EndReason.ERROR


def request(number: int, text: str = "Hallo", priority: int = 0) -> GenerationRequest:
    return input_request(
        number.to_bytes(16, "big"), tuple(text.encode()), VectorForm(), 600.0, priority
    )


def submit(world: World, requests: Sequence[GenerationRequest]) -> list[Request]:
    inputs = world.requests.submit(requests, world.now)
    world.collect()
    return inputs


def error_of(one: Request) -> RequestError:
    assert isinstance(one.terminal, Failed)
    return one.terminal.error


def fail_all(world: World) -> None:
    """Make the step of everything on the prefill worker raise."""
    worker = world.worker(world.prefill)
    keys, world.prefill.inputs = list(world.prefill.inputs), {}
    for key in keys:
        ended = Ended(*key, ERROR, 0, 1, "it raised", failed_step=1, failed_rows=len(keys))
        world.down[worker].append(ended)


def check_done(world: World, inputs: Sequence[Request]) -> None:
    for one in inputs:
        assert isinstance(one.terminal, Finished)
        assert one.vector == vector_of(one.spec.request_id)
    world.check_idle()


def test_each_input_gets_its_vector() -> None:
    world = World(num_prefills=2)
    inputs = submit(world, [request(n) for n in range(40)])
    world.settle()
    check_done(world, inputs)
    assert world.requests.table.accounting.ended["embedded"] == 40
    assert {fake.steps for fake in world.prefills} == {1}


def test_inputs_leave_no_lines_in_the_log_at_level_info() -> None:
    world = World()
    with capture_logs() as lines:
        submit(world, [request(n) for n in range(40)])
        world.settle()
    assert [line["log_level"] for line in lines if line["event"] == "input_ended"] == ["debug"] * 40
    assert not [line for line in lines if line["log_level"] == "info"]


@pytest.mark.parametrize(("token_credit", "num_begun"), [(None, 5), (100, 1)])
def test_only_a_part_of_the_prompt_credit_is_under_way_or_one_input_that_is_larger(
    token_credit: int | None, num_begun: int
) -> None:
    world = World()
    world.announce(world.prefill, token_credit=token_credit or world.prefill.token_credit)
    inputs = submit(world, [request(n, "x" * 500) for n in range(20)])
    world.deliver()
    assert len(world.prefill.inputs) == num_begun
    assert world.worker(world.prefill).waiting_tokens == 0
    world.settle()
    check_done(world, inputs)


def test_a_single_input_overtakes_a_request_of_many() -> None:
    world = World()
    many = submit(world, [request(n, "x" * 500) for n in range(60)])
    single = submit(world, [request(100, "x" * 500)])
    background = submit(world, [request(200, "x" * 500, priority=9)])
    order = []
    while not all(one.terminal for one in (*many, *single, *background)):
        world.deliver()
        order += [key.request_id for key in world.prefill.inputs]
        world.compute(world.worker(world.prefill))
        world.deliver()
    places = {int.from_bytes(request_id, "big"): at for at, request_id in enumerate(order)}
    assert places[100] == 16
    assert places[200] == 61
    world.check_idle()


def test_a_worker_that_dies_costs_another_attempt() -> None:
    world = World()
    inputs = submit(world, [request(n) for n in range(3)])
    world.deliver()
    worker = world.worker(world.prefill)
    world.lose(worker)
    assert not any(one.terminal for one in inputs)
    world.greet(worker)
    world.settle()
    check_done(world, inputs)
    assert {one.num_attempts for one in inputs} == {2}


@pytest.mark.parametrize("max_attempts", [2, 3])
def test_an_input_that_makes_steps_fail_ends_and_takes_nobody_with_it(max_attempts: int) -> None:
    world = World(num_prefills=1, max_attempts=max_attempts)
    bad, *good = submit(world, [request(0, "böse"), *(request(n) for n in range(1, 6))])
    for _ in range(40):
        world.deliver()
        if any(key.request_id == bad.spec.request_id for key in world.prefill.inputs):
            fail_all(world)
        else:
            world.compute(world.worker(world.prefill))
    assert error_of(bad).code == "no_worker"
    assert world.requests.recovery.num_quarantined == 0, "no process died"
    check_done(world, good)


def test_an_input_that_processes_die_of_is_refused_and_takes_nobody_with_it() -> None:
    world = World(num_prefills=1)
    bad, *good = submit(world, [request(0, "böse"), *(request(n) for n in range(1, 6))])
    for _ in range(40):
        world.deliver()
        worker = world.worker(world.prefill)
        if any(key.request_id == bad.spec.request_id for key in world.prefill.inputs):
            world.restart(worker)
        else:
            world.compute(worker)
    assert error_of(bad).code == "quarantined"
    with pytest.raises(RequestError, match="not tried again"):
        submit(world, [request(100, "böse")])
    check_done(world, good)


def test_a_vector_that_was_lost_is_asked_for_again() -> None:
    world = World()
    [one] = submit(world, [request(1)])
    world.deliver()
    worker = world.worker(world.prefill)
    [key] = world.prefill.inputs
    world.prefill.inputs.clear()
    _, ended = embedded(key)
    world.hear(worker, ended)
    assert one.num_attempts == 2
    world.settle()
    check_done(world, [one])


def test_what_comes_late_or_twice_changes_nothing() -> None:
    world = World()
    [one] = submit(world, [request(1)])
    world.deliver()
    worker = world.worker(world.prefill)
    [key] = world.prefill.inputs
    world.settle()
    check_done(world, [one])
    for frame in embedded(key):
        world.hear(worker, frame)
    world.check_idle()


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_cancel_ends_it_here_and_there(is_sent: bool) -> None:
    world = World(connect=is_sent)
    if not is_sent:
        world.sweep()
    inputs = submit(world, [request(n) for n in range(2)])
    world.deliver()
    for one in inputs:
        world.requests.cancel([one], CancelReason.CLIENT_GONE, world.now)
    world.collect()
    world.deliver()
    sent = [type(frame) for frame in world.prefill.received]
    assert sent == ([Embed, Embed, End, End] if is_sent else [])
    assert all(error_of(one).code == "cancelled" for one in inputs)
    world.check_idle()


def test_a_drain_moves_it_to_another_worker() -> None:
    world = World(num_prefills=2)
    [one] = submit(world, [request(1)])
    world.deliver()
    leaving = next(fake for fake in world.prefills if fake.inputs)
    leaving.is_draining = True
    [key] = leaving.inputs
    leaving.inputs.clear()
    worker = world.worker(leaving)
    world.hear(worker, leaving.heartbeat())
    world.hear(worker, Ended(*key, EndReason.DRAIN, 0, 1))
    assert not one.faults
    world.settle()
    check_done(world, [one])


def test_a_deadline_and_the_servers_own_drain_end_it() -> None:
    world = World()
    late = submit(world, [input_request(bytes(16), (1,), VectorForm(), deadline_s=1.0)])
    world.sweep(1.5)
    assert error_of(late[0]).code == "deadline_exceeded"
    rest = submit(world, [request(2)])
    world.requests.begin_drain(world.now)
    with pytest.raises(RequestError, match="shutting down"):
        submit(world, [request(3)])
    world.sweep(world.config.drain_timeout_s + 1)
    assert error_of(rest[0]).code == "draining"
    world.deliver()
    world.check_idle()


def test_too_many_or_too_long_is_refused_whole() -> None:
    world = World(embedding=EmbeddingLimits(max_waiting_inputs=4))
    world.announce(world.prefill, token_credit=4)
    kept = submit(world, [request(n) for n in range(3)])
    with pytest.raises(RequestError, match="wait already") as refusal:
        submit(world, [request(10 + n) for n in range(3)])
    assert refusal.value.is_crowded_out
    with pytest.raises(RequestError, match="input 1 has 5000 tokens"):
        submit(world, [request(20), request(21, "x" * 5000)])
    world.settle()
    check_done(world, kept)
    assert world.requests.table.accounting.rejected == {
        "overloaded": 3,
        "context_length_exceeded": 2,
    }


def test_without_a_prefill_worker_inputs_end_while_chats_go_on() -> None:
    world = World(num_prefills=0)
    world.sweep(world.config.worker_wait_s + 1)
    with pytest.raises(RequestError, match="no prefill worker"):
        submit(world, [request(1)])
    reader = world.submit(make_request(2))
    world.settle()
    assert reader.finished
    world.check_idle()
