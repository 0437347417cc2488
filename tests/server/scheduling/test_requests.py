"""Tests of one request from submission to its end: its output, its usage, and its line in the
access log."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from server.contract.generation import AutoChoice, CancelReason, FinishReason, RequestCost, Usage
from server.contract.request_events import no_price
from server.scheduling.attempt import due_at
from server.scheduling.request import Phase
from tests.server.tiny_text import EOS_ID
from transport.frames import (
    End,
    EndReason,
    TokenCredit,
)
from triolet.errors import RequestError
from triolet.ids import Role
from triolet.service_class import Scheduling
from triolet.units import NANOS

from .fakes import LINK, completion_ids, make_request
from .stages import UNFINISHED, brought_to, text_of
from .world import World

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from server.contract.generation import GenerationRequest


def line_of(world: World, request: GenerationRequest) -> MutableMapping[str, Any]:
    """Answer a request and return its line in the access log."""
    with capture_logs() as logs:
        world.submit(request)
        world.settle()
    [line] = [one for one in logs if one["event"] == "request_ended"]
    return line


def test_its_line_in_the_log_names_the_version_of_its_model() -> None:
    for digest, shown in (("sha256:1", "sha256:1"), ("", None)):
        world = World(model_name="chat", model_digest=digest)
        line = line_of(world, make_request(max_tokens=3))
        assert (line["model"], line["model_digest"]) == ("chat", shown)


def test_its_line_in_the_log_names_its_tenant() -> None:
    world = World()
    for number, tenant in enumerate(("alice", "")):
        request = make_request(number, max_tokens=3, scheduling=Scheduling(tenant))
        line = line_of(world, request)
        assert line["tenant"] == tenant


def test_its_line_in_the_log_names_its_adapter() -> None:
    """The log distinguishes the answers of two adapters and of the base model."""
    world = World()
    for worker in world.workers:
        worker.adapters = frozenset({b"\xab" * 32})
    for number, (adapter, shown) in enumerate(((b"", None), (b"\xab" * 32, "sha256:" + "ab" * 32))):
        line = line_of(world, replace(make_request(number, max_tokens=3), adapter=adapter))
        assert line.get("adapter_digest") == shown


def a_quarter(request_id: bytes, usage: Usage, *, is_begun: bool) -> RequestCost:
    """Charge every request the same."""
    del request_id, usage, is_begun
    return RequestCost(NANOS // 4, 3 * NANOS // 2)


def test_its_line_in_the_log_says_how_its_model_was_chosen_and_what_that_saved() -> None:
    world = World()
    for number, (choice, cost, shown) in enumerate(
        (
            (AutoChoice("context", "large"), True, ("context", "large", 0.25, 1.5)),
            (AutoChoice("context", "large"), False, ("context", "large", None, None)),
            (None, True, (None, None, 0.25, None)),
        )
    ):
        world.events.price = a_quarter if cost else no_price
        line = line_of(world, replace(make_request(number, max_tokens=3), auto=choice))
        names = ("auto", "auto_largest", "cost", "auto_largest_cost")
        assert tuple(line.get(name) for name in names) == shown


def test_a_request_streams_the_whole_completion_and_its_usage() -> None:
    world = World()
    reader = world.submit(make_request(max_tokens=150, seed=3))
    world.settle()
    expected = completion_ids(3, 150)
    assert reader.token_ids == expected
    assert reader.text == text_of(expected)
    assert reader.finished.reason is FinishReason.LENGTH
    assert reader.finished.usage.prompt_tokens == 5
    assert reader.finished.usage.completion_tokens == 150
    assert reader.finished.usage.cached_tokens == 2
    world.check_idle()


def test_cached_tokens_are_known_where_decode_is_faster_than_prefill() -> None:
    world = World()
    world.decode.held_blocks = 1
    reader = world.submit(make_request(max_tokens=1))
    prefill, decode = world.worker(world.prefill), world.worker(world.decode)
    world.deliver()
    world.compute(prefill)  # its first token is still in transit
    world.compute(decode)
    world.deliver_down(decode)
    world.read(reader)
    assert not reader.terminals
    world.deliver_down(prefill)
    world.read(reader)
    assert reader.finished.usage.cached_tokens == 2
    world.end()


def test_the_end_token_ends_with_stop_and_is_counted_but_not_shown() -> None:
    world = World()
    world.decode.end_at = 10
    reader = world.submit(make_request(max_tokens=100))
    world.settle()
    assert reader.finished.reason is FinishReason.STOP
    assert reader.token_ids == [*completion_ids(0, 10), EOS_ID]
    assert reader.text == text_of(completion_ids(0, 10))
    assert reader.finished.usage.completion_tokens == 11
    world.check_idle()


def test_an_end_token_from_prefill_ends_at_once() -> None:
    world = World()
    world.prefill.end_at = world.decode.end_at = 0
    reader = world.submit(make_request(max_tokens=100))
    world.deliver()
    world.compute(world.worker(world.prefill))
    world.deliver()
    world.read(reader)
    assert (reader.text, reader.token_ids) == ("", [EOS_ID])
    assert reader.finished.reason is FinishReason.STOP
    world.end()


def test_a_stop_string_ends_the_request_and_its_worker() -> None:
    world = World()
    reader = world.submit(make_request(max_tokens=200, stop=("Brücke", "nie")))
    world.settle()
    assert reader.text == "Der Zug fährt über die "
    assert reader.finished.reason is FinishReason.STOP
    assert reader.finished.stop_string == "Brücke"
    ends = [f.reason for f in world.decode.received if isinstance(f, End)]
    assert ends == [EndReason.STOP_STRING]
    world.check_idle()


def test_a_completion_that_a_client_s_stop_token_ended_is_cut() -> None:
    for stops, is_cut in (((completion_ids(0, 9)[8],), True), ((EOS_ID,), False)):
        world = World()
        world.decode.end_at = world.prefill.end_at = None if is_cut else 5
        request = make_request(max_tokens=100)
        sampling = replace(request.sampling, stop_token_ids=stops)
        reader = world.submit(replace(request, sampling=sampling))
        world.settle()
        assert reader.finished.reason is FinishReason.STOP
        assert reader.finished.is_cut is is_cut


def test_a_reader_that_does_not_read_pauses_decode_at_the_window() -> None:
    world = World(token_window=8)
    reader = world.submit(make_request(max_tokens=100))
    world.settle(read=False)
    assert len(reader.request.relay.token_ids) == 8
    world.read(reader)
    assert reader.token_ids == completion_ids(0, 8)
    world.settle(read=False)
    assert len(reader.request.relay.token_ids) == 16
    world.complete(reader, 100)


def test_credit_goes_out_in_quarters_of_the_window() -> None:
    world = World(token_window=64)
    world.submit(make_request(max_tokens=640))
    world.settle()
    credits = [f for f in world.decode.received if isinstance(f, TokenCredit)]
    assert 30 <= len(credits) <= 45


def test_credit_that_was_lost_is_given_again() -> None:
    world = World(token_window=4)
    reader = world.submit(make_request(max_tokens=100))
    world.settle(read=False)
    world.read(reader)
    decode = world.worker(world.decode)
    assert [type(frame) for frame in world.up[decode]] == [TokenCredit]
    world.up[decode].clear()
    world.settle()
    assert not reader.terminals, "decode waits for credit and the server for tokens"
    for _ in range(3):
        world.sweep(LINK.heartbeat_interval_s)
    world.complete(reader, 100)


def test_no_credit_is_repeated_to_a_stream_that_its_reader_holds_up() -> None:
    world = World(token_window=4, stall_timeout_s=60.0)
    world.submit(make_request(max_tokens=100))
    world.settle(read=False)
    for _ in range(10):
        world.sweep(LINK.heartbeat_interval_s)
    assert not world.up[world.worker(world.decode)]


def test_credit_of_many_streams_shares_a_frame() -> None:
    world = World(token_window=4)
    readers = [world.submit(make_request(n, max_tokens=40)) for n in range(1, 5)]
    world.settle(read=False)
    for reader in readers:
        reader.take(reader.request.output.take(now=9.0))
        world.requests.taken(reader.request)
    [outgoing] = world.requests.outbox.drain_credit()
    assert isinstance(outgoing.frame, TokenCredit)
    assert len(outgoing.frame.rows) == 4


@pytest.mark.parametrize("phase", UNFINISHED)
@pytest.mark.parametrize("reason", CancelReason)
def test_cancel_in_every_phase_ends_once_and_frees_both_workers(
    phase: Phase, reason: CancelReason
) -> None:
    world = World()
    reader = brought_to(world, phase)
    attempt = reader.request.attempt
    world.cancel(reader, reason)
    world.cancel(reader, reason)
    world.read(reader)
    assert reader.failed.error.code in (
        "cancelled",
        "request_timeout",
        "draining",
        "permission_denied",
    )
    ended = {
        worker.role
        for worker in world.workers
        for frame in world.up[worker]
        if isinstance(frame, End) and attempt is not None and frame.key == attempt.key
    }
    expected = {
        Phase.QUEUED: set(),
        Phase.RESERVING: {Role.DECODE},
        Phase.PREFILLING: {Role.DECODE, Role.PREFILL},
        Phase.DECODING: {Role.DECODE},  # prefill is done
        Phase.FINISHING: set(),  # both are done
    }
    assert ended == expected[phase]
    world.end()


@pytest.mark.parametrize("phase", UNFINISHED)
def test_the_deadline_ends_every_phase_with_504(phase: Phase) -> None:
    world = World()
    reader = brought_to(world, phase)
    assert due_at(reader.request, world.config) <= reader.request.deadline
    world.sweep(reader.request.deadline - world.now)
    assert reader.request.phase is Phase.FINISHED
    world.read(reader)
    assert (reader.failed.error.status, reader.failed.error.code) == (504, "deadline_exceeded")
    world.end()


def test_a_client_that_stops_reading_is_ended_and_others_are_not() -> None:
    world = World(token_window=8)
    stalled = world.submit(make_request(1, max_tokens=100))
    steady = world.submit(make_request(2, max_tokens=100))
    for _ in range(12):
        world.settle(read=False)
        world.read(steady)
        world.sweep(1.0)
    world.read(stalled)
    assert stalled.failed.error.code == "request_timeout"
    assert stalled.token_ids == completion_ids(0, 8)
    world.complete(steady, 100)
    ends = [f.reason for f in world.decode.received if isinstance(f, End)]
    assert EndReason.STALLED in ends
    world.check_idle()


def test_draining_refuses_the_new_and_lets_the_running_finish() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    world.requests.begin_drain(world.now)
    with pytest.raises(RequestError) as refusal:
        world.submit(make_request(2))
    assert refusal.value.code == "draining"
    world.complete(reader, 200)


def test_what_still_runs_at_the_drain_timeout_gets_its_terminal_event() -> None:
    world = World(token_window=4)
    reader = brought_to(world, Phase.DECODING)
    world.requests.begin_drain(world.now)
    world.read(reader)
    world.sweep(30.0)
    world.read(reader)
    assert reader.failed.error.code == "draining"
    world.end()


def test_a_request_id_in_use_is_refused() -> None:
    world = World()
    world.submit(make_request(1))
    with pytest.raises(RequestError) as refusal:
        world.submit(make_request(1))
    assert refusal.value.code == "server_error"
    world.check_accounting()


def test_a_prompt_that_no_worker_was_told_to_compute_costs_nothing() -> None:
    for is_granted in (False, True):
        world = World()
        reader = world.submit(make_request())
        assert reader.request.phase is Phase.RESERVING
        if is_granted:
            world.deliver()
        world.cancel(reader, CancelReason.CLIENT_GONE)
        assert world.charges.of[reader.request.spec.request_id].is_begun is is_granted
        world.end()
