"""One request through every phase, and everything that can happen to it there."""

from __future__ import annotations

import pytest

from server.fleet.phases import Phase
from server.generation import CancelReason, FinishReason
from tests.server.tiny_text import EOS_ID
from transport.frames import (
    End,
    Ended,
    EndReason,
    FirstToken,
    Grant,
    Hello,
    Peer,
    Prefill,
    Refuse,
    RefuseReason,
    Reserve,
    TokenCredit,
    TokenRow,
    Tokens,
)
from triolet.errors import RequestError
from triolet.ids import AttemptKey, Role

from .fakes import completion_ids, make_request, replay_of
from .world import Reader, World


def text_of(token_ids: list[int]) -> str:
    return bytes(i for i in token_ids if i < 256).decode(errors="replace")


def brought_to(world: World, phase: Phase, *, max_tokens: int = 200) -> Reader:
    """Submit a request and bring it into a phase, with no frame under way."""
    decode, prefill = world.worker(world.decode), world.worker(world.prefill)
    if phase is Phase.QUEUED:
        world.decode.row_credit = 0
        world.beat(decode)
        world.deliver()
    reader = world.submit(make_request(max_tokens=max_tokens))
    if phase in (Phase.QUEUED, Phase.RESERVING):
        world.up[decode].clear()
    else:
        world.deliver()
    if phase in (Phase.DECODING, Phase.FINISHING):
        world.compute(prefill)
        for _ in range(5):
            world.compute(decode)
        world.deliver()
    if phase is Phase.FINISHING:
        [key] = world.decode.rows
        world.decode.rows.clear()
        world.down[decode].append(Ended(*key, EndReason.STOP, num_tokens=9, freed_blocks=2))
        world.deliver()
    assert reader.sequence.phase is phase
    return reader


UNFINISHED = [phase for phase in Phase if phase is not Phase.FINISHED]


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
    world.settle()
    world.check_idle()


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


def test_a_reader_that_does_not_read_pauses_decode_at_the_window() -> None:
    world = World(token_window=8)
    reader = world.submit(make_request(max_tokens=100))
    world.settle(read=False)
    assert len(reader.sequence.relay.token_ids) == 8
    world.read(reader)
    assert reader.token_ids == completion_ids(0, 8)
    world.settle(read=False)
    assert len(reader.sequence.relay.token_ids) == 16
    world.settle()
    assert reader.token_ids == completion_ids(0, 100)
    world.check_idle()


def test_credit_goes_out_in_quarters_of_the_window() -> None:
    world = World(token_window=64)
    world.submit(make_request(max_tokens=640))
    world.settle()
    credits = [f for f in world.decode.received if isinstance(f, TokenCredit)]
    assert 30 <= len(credits) <= 45


def test_credit_of_many_streams_shares_a_frame() -> None:
    world = World(token_window=4)
    readers = [world.submit(make_request(n, max_tokens=40)) for n in range(1, 5)]
    world.settle(read=False)
    for reader in readers:
        reader.take(reader.sequence.relay.mailbox.take())
        world.conductor.taken(reader.sequence)
    [outgoing] = world.conductor.outbox.drain_credit()
    assert isinstance(outgoing.frame, TokenCredit)
    assert len(outgoing.frame.rows) == 4


@pytest.mark.parametrize("phase", UNFINISHED)
@pytest.mark.parametrize("reason", CancelReason)
def test_cancel_in_every_phase_ends_once_and_frees_both_workers(
    phase: Phase, reason: CancelReason
) -> None:
    world = World()
    reader = brought_to(world, phase)
    attempt = reader.sequence.attempt
    world.cancel(reader, reason)
    world.cancel(reader, reason)
    world.read(reader)
    assert reader.failed.error.code in ("cancelled", "request_timeout", "draining")
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
    world.settle()
    world.check_idle()


@pytest.mark.parametrize("phase", [p for p in UNFINISHED if p is not Phase.QUEUED])
def test_a_lost_decode_worker_costs_no_token_in_any_phase(phase: Phase) -> None:
    world = World(num_decodes=2)
    reader = brought_to(world, phase)
    world.lose(world.worker(world.decode))
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)
    assert reader.text == text_of(completion_ids(0, 200))
    [replay] = [f for f in world.decodes[1].received if isinstance(f, Reserve)]
    assert replay.attempt == 1
    assert replay_of(replay) == completion_ids(0, 200)[: len(replay_of(replay))]
    world.check_idle()


@pytest.mark.parametrize("cut", range(1, 70))
def test_a_new_attempt_continues_within_any_character(cut: int) -> None:
    world = World(num_decodes=2)
    reader = world.submit(make_request(max_tokens=100, stop=("日本 hört «es»",)))
    world.deliver()
    world.compute(world.worker(world.prefill))
    for _ in range(cut):
        world.compute(world.worker(world.decode))
        world.deliver()
        world.read(reader)
    world.lose(world.worker(world.decode))
    world.settle()
    assert reader.text == "Der Zug fährt über die Brücke 🚂 und "
    assert reader.finished.stop_string == "日本 hört «es»"
    world.check_idle()


def test_a_lost_prefill_worker_before_the_hand_over_begins_again() -> None:
    world = World(num_prefills=2)
    reader = brought_to(world, Phase.PREFILLING)
    world.lose(world.worker(world.prefill))
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)
    assert reader.sequence.num_attempts == 2
    world.check_idle()


def test_a_lost_prefill_worker_after_the_hand_over_does_not_matter() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    world.lose(world.worker(world.prefill))
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)
    assert reader.sequence.num_attempts == 1


def test_a_prefill_worker_lost_while_it_ships_begins_again_with_the_token_it_gave() -> None:
    world = World(num_prefills=2)
    reader = brought_to(world, Phase.PREFILLING)
    prefill = world.worker(world.prefill)
    world.compute(prefill)
    first = world.down[prefill].popleft()
    world.decode.rows[AttemptKey(*first_key(first))].is_ready = False  # its KV never arrived
    world.hear(prefill, first)
    world.lose(prefill)
    world.settle()
    [_, again] = [f for f in world.decode.received if isinstance(f, Reserve)]
    assert replay_of(again) == completion_ids(0, 1)
    assert reader.token_ids == completion_ids(0, 200)
    world.check_idle()


def first_key(frame: object) -> tuple[bytes, int]:
    assert isinstance(frame, FirstToken)
    return frame.key


def test_preemption_does_not_count_as_a_failure() -> None:
    world = World(max_attempts=1)
    reader = brought_to(world, Phase.DECODING)
    for _ in range(4):
        [key] = world.decode.rows
        ended = world.decode.end(key, EndReason.PREEMPTED)
        world.down[world.worker(world.decode)].append(ended)
        world.deliver()
        world.compute(world.worker(world.prefill))
        world.compute(world.worker(world.decode))
        world.deliver()
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)
    assert reader.sequence.num_attempts == 5
    world.check_idle()


def test_attempts_that_fail_are_bounded() -> None:
    world = World(max_attempts=3)
    reader = world.submit(make_request())
    for _ in range(3):
        world.deliver()
        [key] = world.decode.rows
        ended = world.decode.end(key, EndReason.ERROR)
        world.down[world.worker(world.decode)].append(ended)
    world.settle()
    assert reader.failed.error.code == "no_worker"
    assert reader.failed.error.status == 503
    assert reader.sequence.num_attempts == 3
    world.check_idle()


@pytest.mark.parametrize(
    "reason", [RefuseReason.NO_BLOCKS, RefuseReason.NO_ROWS, RefuseReason.DRAINING]
)
def test_a_refusal_waits_a_moment_and_counts_for_nothing(reason: RefuseReason) -> None:
    world = World(max_attempts=1)
    world.decode.refusal = reason
    reader = world.submit(make_request())
    for _ in range(5):
        world.deliver()
        assert reader.sequence.phase is Phase.QUEUED
        world.sweep(0.25)
    world.decode.refusal = None
    world.settle()
    assert reader.token_ids == completion_ids(0, 16)
    world.check_idle()


def test_a_refused_request_goes_to_another_worker_at_once() -> None:
    world = World(num_decodes=2)
    world.decode.refusal = RefuseReason.NO_BLOCKS
    reader = world.submit(make_request())
    world.settle()
    assert reader.token_ids == completion_ids(0, 16)
    assert [f for f in world.decodes[1].received if isinstance(f, Reserve)]


def test_a_request_that_a_worker_finds_too_long_is_refused_with_400() -> None:
    world = World()
    world.decode.refusal = RefuseReason.TOO_LONG
    reader = world.submit(make_request())
    world.settle()
    assert (reader.failed.error.status, reader.failed.error.code) == (
        400,
        "context_length_exceeded",
    )
    world.check_idle()


def test_doubled_rows_are_shown_once() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    decode = world.worker(world.decode)
    key = reader.sequence.attempt.key if reader.sequence.attempt else None
    assert key is not None
    rows = [TokenRow(*key, p, i) for p, i in enumerate(completion_ids(0, 4))]
    world.hear(decode, Tokens(9, tuple(rows)))
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)


def test_rows_out_of_order_are_shown_in_order() -> None:
    world = World()
    reader = brought_to(world, Phase.PREFILLING, max_tokens=6)
    decode = world.worker(world.decode)
    [key] = world.decode.rows
    ids = completion_ids(0, 6)
    for position in (3, 1, 0, 5, 4, 2):
        row = TokenRow(*key, position, ids[position])
        world.hear(decode, Tokens(1, (row,)))
    world.read(reader)
    assert reader.token_ids == ids
    assert reader.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("position", [2, 7])
def test_two_answers_for_one_position_are_an_error(position: int) -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    attempt = reader.sequence.attempt
    assert attempt is not None
    right = completion_ids(0, 200)[position]
    for token_id in (right, right + 1):
        row = TokenRow(*attempt.key, position, token_id)
        world.hear(attempt.pair.decode, Tokens(1, (row,)))
    world.settle()
    assert reader.failed.error.code == "server_error"
    world.check_idle()


def test_the_end_waits_for_tokens_that_ended_overtook() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING, max_tokens=200)
    attempt = reader.sequence.attempt
    assert attempt is not None
    have = len(reader.sequence.relay.token_ids)
    ids = completion_ids(0, have + 2)
    world.decode.rows.clear()
    ended = Ended(*attempt.key, EndReason.STOP, num_tokens=have + 2, freed_blocks=1)
    world.hear(attempt.pair.decode, ended)
    assert reader.sequence.phase is Phase.FINISHING
    for position in (have, have + 1):
        assert reader.sequence.phase is Phase.FINISHING
        row = TokenRow(*attempt.key, position, ids[position])
        world.hear(attempt.pair.decode, Tokens(1, (row,)))
    world.read(reader)
    assert reader.token_ids == ids
    assert reader.finished.usage.completion_tokens == have + 2
    world.check_idle()


def test_tokens_that_never_come_lead_to_a_new_attempt() -> None:
    world = World()
    reader = brought_to(world, Phase.FINISHING)
    world.sweep(1.0)
    assert reader.sequence.phase is Phase.FINISHING
    world.sweep(1.0)
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)
    world.check_idle()


def test_a_lost_reserve_leads_to_a_new_attempt() -> None:
    world = World()
    reader = brought_to(world, Phase.RESERVING)
    world.sweep(2.0)
    world.settle()
    assert reader.sequence.num_attempts == 2
    assert reader.token_ids == completion_ids(0, 200)


def test_more_tokens_than_credit_end_the_attempt() -> None:
    world = World(token_window=4, max_attempts=1)
    reader = brought_to(world, Phase.PREFILLING)
    [key] = world.decode.rows
    row = TokenRow(*key, 4, completion_ids(0, 5)[4])
    world.hear(world.worker(world.decode), Tokens(1, (row,)))
    world.settle()
    assert reader.failed.error.code == "no_worker"
    world.check_idle()


@pytest.mark.parametrize("phase", UNFINISHED)
def test_the_deadline_ends_every_phase_with_504(phase: Phase) -> None:
    world = World()
    reader = brought_to(world, phase)
    world.sweep(600.0)
    world.read(reader)
    assert (reader.failed.error.status, reader.failed.error.code) == (504, "deadline_exceeded")
    world.settle()
    world.check_idle()


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
    world.settle()
    assert steady.token_ids == completion_ids(0, 100)
    ends = [f.reason for f in world.decode.received if isinstance(f, End)]
    assert EndReason.STALLED in ends
    world.check_idle()


def test_draining_refuses_the_new_and_lets_the_running_finish() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    world.conductor.begin_drain(world.now)
    with pytest.raises(RequestError) as refusal:
        world.submit(make_request(2))
    assert refusal.value.code == "draining"
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)
    world.check_idle()


def test_what_still_runs_at_the_drain_timeout_gets_its_terminal_event() -> None:
    world = World(token_window=4)
    reader = brought_to(world, Phase.DECODING)
    world.conductor.begin_drain(world.now)
    world.read(reader)
    world.sweep(30.0)
    world.read(reader)
    assert reader.failed.error.code == "draining"
    world.settle()
    world.check_idle()


def test_requests_wait_for_a_worker_that_restarts() -> None:
    world = World(connect=False)
    reader = world.submit(make_request())
    world.sweep(20.0)
    for worker in world.workers:
        world.greet(worker)
    world.settle()
    assert reader.token_ids == completion_ids(0, 16)


def test_requests_do_not_wait_for_a_worker_that_stays_away() -> None:
    world = World(connect=False)
    reader = world.submit(make_request())
    world.sweep(30.0)
    world.read(reader)
    assert reader.failed.error.code == "no_worker"
    with pytest.raises(RequestError) as refusal:
        world.submit(make_request(2))
    assert refusal.value.code == "no_worker"
    assert refusal.value.retry_after_s is not None
    world.check_idle()


def test_another_model_does_not_continue_what_one_began() -> None:
    world = World(num_prefills=2, num_decodes=2)
    for fake in (world.prefills[1], world.decodes[1]):
        fake.fingerprint = "other/f32"
        world.greet(world.worker(fake))
    reader = brought_to(world, Phase.DECODING)
    assert reader.sequence.fingerprint == "tiny/f32"
    world.lose(world.worker(world.decode))
    world.settle()
    assert reader.failed.error.code == "no_worker"
    assert "replaced" in reader.failed.error.message
    assert not world.decodes[1].received
    world.check_idle()


def test_a_request_that_has_begun_nothing_takes_the_other_model() -> None:
    world = World(num_prefills=2, num_decodes=2)
    for fake in (world.prefills[1], world.decodes[1]):
        fake.fingerprint = "other/f32"
        world.greet(world.worker(fake))
    reader = brought_to(world, Phase.RESERVING)
    world.lose(world.worker(world.decode))
    world.settle()
    assert reader.sequence.fingerprint == "other/f32"
    assert reader.token_ids == completion_ids(0, 200)


def test_a_request_id_in_use_is_refused() -> None:
    world = World()
    world.submit(make_request(1))
    with pytest.raises(RequestError) as refusal:
        world.submit(make_request(1))
    assert refusal.value.code == "server_error"
    world.conductor.check_accounting()


def test_frames_of_attempts_that_are_over_change_nothing() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    attempt = reader.sequence.attempt
    assert attempt is not None
    old = attempt.key
    world.lose(world.worker(world.decode))
    world.greet(world.worker(world.decode))
    decode, prefill = world.worker(world.decode), world.worker(world.prefill)
    before = list(reader.sequence.relay.token_ids)
    row = TokenRow(*old, len(before), 1)
    for frame in (
        Tokens(1, (row,)),
        Grant(*old, epoch=world.decode.epoch),
        Refuse(*old, RefuseReason.NO_ROWS),
        Ended(*old, EndReason.ERROR, num_tokens=3, freed_blocks=0),
    ):
        world.hear(decode, frame)
    late_first = FirstToken(*old, row, cached_tokens=0, queue_s=0, compute_s=0)
    world.hear(prefill, late_first)
    assert reader.sequence.relay.token_ids == before
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)
    world.check_idle()


def test_a_grant_of_an_earlier_life_is_not_taken() -> None:
    world = World()
    reader = brought_to(world, Phase.RESERVING)
    attempt = reader.sequence.attempt
    assert attempt is not None
    grant = Grant(*attempt.key, epoch=world.decode.epoch + 7)
    world.hear(attempt.pair.decode, grant)
    assert reader.sequence.phase is Phase.RESERVING


def test_a_frame_that_no_worker_says_ends_the_link() -> None:
    world = World(num_decodes=2)
    reader = brought_to(world, Phase.DECODING)
    hello = Hello(Peer(Role.PREFILL, "x", 1), 1, 1)
    world.hear(world.worker(world.decode), hello)
    world.decode.rows.clear()
    world.settle()
    assert reader.sequence.num_attempts == 2
    assert reader.token_ids == completion_ids(0, 200)


def test_heartbeats_name_prefill_only_after_it_was_asked() -> None:
    world = World()
    brought_to(world, Phase.RESERVING)
    decode, prefill = world.worker(world.decode), world.worker(world.prefill)
    assert len(decode.live_keys) == 1
    assert prefill.live_keys == []
    assert prefill.waiting_tokens == 5


@pytest.mark.parametrize("reason", [EndReason.ERROR, EndReason.DRAIN, EndReason.UNKNOWN])
def test_a_prefill_that_ends_without_a_token_leads_to_a_new_attempt(reason: EndReason) -> None:
    world = World()
    reader = brought_to(world, Phase.PREFILLING)
    [key] = world.prefill.waiting
    del world.prefill.waiting[key]
    ended = Ended(*key, reason, num_tokens=0, freed_blocks=0)
    world.hear(world.worker(world.prefill), ended)
    assert reader.sequence.num_failures == (reason is not EndReason.DRAIN)
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)
    world.check_idle()


def test_a_prefill_asks_for_nothing_that_decode_has_not_granted() -> None:
    world = World()
    world.submit(make_request())
    assert not world.up[world.worker(world.prefill)]
    world.deliver()
    [frame] = [f for f in world.prefill.received if isinstance(f, Prefill)]
    assert frame.target.peer == Peer(Role.DECODE, "decode-0", 1)
    assert frame.target.address == "mem://decode-0-kv"


def test_a_prefill_that_has_forgotten_what_it_shipped_does_not_matter() -> None:
    world = World(max_attempts=1)
    reader = brought_to(world, Phase.PREFILLING)
    prefill = world.worker(world.prefill)
    world.compute(prefill)
    world.hear(prefill, world.down[prefill].popleft())
    world.down[prefill].clear()
    [key] = world.decode.rows
    world.hear(prefill, Ended(*key, EndReason.UNKNOWN, num_tokens=0, freed_blocks=0))
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)


@pytest.mark.parametrize("reason", [EndReason.UNKNOWN, EndReason.STOP])
def test_what_decode_says_after_it_has_ended_changes_nothing(reason: EndReason) -> None:
    world = World(max_attempts=1)
    reader = brought_to(world, Phase.FINISHING)
    attempt = reader.sequence.attempt
    assert attempt is not None
    again = Ended(*attempt.key, reason, num_tokens=9, freed_blocks=0)
    world.hear(attempt.pair.decode, again)
    assert reader.sequence.phase is Phase.FINISHING
    assert not reader.terminals


def test_fewer_tokens_than_the_client_has_are_an_error() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    attempt = reader.sequence.attempt
    assert attempt is not None
    ended = Ended(*attempt.key, EndReason.LENGTH, num_tokens=1, freed_blocks=0)
    world.hear(attempt.pair.decode, ended)
    world.read(reader)
    assert reader.failed.error.code == "server_error"


def test_tokens_of_decode_prove_the_hand_over() -> None:
    world = World()
    reader = brought_to(world, Phase.PREFILLING)
    prefill, decode = world.worker(world.prefill), world.worker(world.decode)
    world.compute(prefill)
    world.down[prefill].clear()  # neither the first token nor the hand-over reached the server
    world.compute(decode)
    world.deliver()
    assert prefill.live_keys == []
    world.lose(prefill)
    world.settle()
    assert reader.token_ids == completion_ids(0, 200)
    assert reader.sequence.num_attempts == 1


def test_a_first_token_that_the_client_has_already_still_counts_as_computed() -> None:
    world = World(num_decodes=2)
    reader = brought_to(world, Phase.DECODING)
    world.lose(world.worker(world.decode))
    world.deliver()
    assert reader.sequence.phase is Phase.PREFILLING
    prefill = world.worker(world.prefill)
    world.compute(prefill)
    world.deliver()
    assert reader.sequence.phase is Phase.DECODING
    assert prefill.waiting_tokens == 0
