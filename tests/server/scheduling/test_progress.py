"""Tests of frames about an attempt: duplicated, reordered, late, contradictory, missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.contract.generation import FinishReason
from server.scheduling.request import Phase
from transport.frames import (
    PROTOCOL_VERSION,
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
    TokenRow,
    Tokens,
)
from triolet.ids import Role

from .fakes import LINK, completion_ids, make_request
from .stages import brought_to
from .world import World

if TYPE_CHECKING:
    from triolet.ids import AttemptKey

    from .world import Reader


def test_doubled_rows_are_shown_once() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    decode = world.worker(world.decode)
    rows = [TokenRow(*reader.attempt.key, p, i) for p, i in enumerate(completion_ids(0, 4))]
    world.hear(decode, Tokens(9, tuple(rows)))
    world.complete(reader, 200)


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
    first = FirstToken(*key, TokenRow(*key, 0, ids[0]), 0, 0.1, 0.1)
    world.hear(world.worker(world.prefill), first)
    world.read(reader)
    assert reader.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("position", [2, 7])
def test_two_answers_for_one_position_are_an_error(position: int) -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    attempt = reader.attempt
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
    attempt = reader.attempt
    have = len(reader.request.relay.token_ids)
    ids = completion_ids(0, have + 2)
    world.decode.rows.clear()
    ended = Ended(*attempt.key, EndReason.STOP, num_tokens=have + 2, freed_blocks=1)
    world.hear(attempt.pair.decode, ended)
    assert reader.request.phase is Phase.FINISHING
    for position in (have, have + 1):
        assert reader.request.phase is Phase.FINISHING
        row = TokenRow(*attempt.key, position, ids[position])
        world.hear(attempt.pair.decode, Tokens(1, (row,)))
    world.read(reader)
    assert reader.token_ids == ids
    assert reader.finished.usage.completion_tokens == have + 2
    world.check_idle()


def overtaken(world: World) -> tuple[Reader, AttemptKey]:
    """Let decode's only token and its ENDED overtake FIRST_TOKEN; decode held 4 tokens of the
    prompt."""
    world.decode.held_blocks = 1
    reader = brought_to(world, Phase.PREFILLING, max_tokens=1)
    [key] = world.decode.rows
    decode = world.worker(world.decode)
    world.hear(decode, Tokens(1, (TokenRow(*key, 0, completion_ids(0, 1)[0]),)))
    world.hear(decode, world.decode.end(key, EndReason.LENGTH))
    world.read(reader)
    assert reader.token_ids == completion_ids(0, 1)
    return reader, key


def test_usage_has_what_prefill_found_cached_where_decodes_end_overtakes_its_first_token() -> None:
    world = World()
    reader, key = overtaken(world)
    assert not reader.terminals
    late = TokenRow(*key, 1, completion_ids(0, 2)[1])
    world.hear(world.worker(world.decode), Tokens(2, (late,)))
    first = TokenRow(*key, 0, reader.token_ids[0])
    world.hear(world.worker(world.prefill), FirstToken(*key, first, 8, 0.1, 0.1))
    world.read(reader)
    assert reader.finished.reason is FinishReason.LENGTH
    assert reader.finished.usage.cached_tokens == 8
    assert len(reader.token_ids) == 1
    world.end()


@pytest.mark.parametrize(
    "event", ["handed over", "prefill lost", "decode lost", "deadline", "time"]
)
def test_an_end_does_not_wait_for_a_first_token_that_will_not_come(event: str) -> None:
    world = World(max_attempts=1)
    reader, key = overtaken(world)
    prefill = world.worker(world.prefill)
    match event:
        case "handed over":
            world.hear(prefill, Ended(*key, EndReason.HANDED_OVER, 0, 0))
        case "prefill lost":
            world.lose(prefill)
        case "decode lost":
            world.lose(world.worker(world.decode))
        case "deadline":
            reader.request.deadline = world.now + LINK.peer_timeout_s / 2
            world.sweep(LINK.peer_timeout_s * 0.6)
        case _:
            world.sweep(LINK.peer_timeout_s * 0.9)
            assert not reader.terminals
            world.sweep(LINK.peer_timeout_s * 0.2)
    world.read(reader)
    assert reader.finished.reason is FinishReason.LENGTH
    assert reader.finished.usage.cached_tokens == 4
    world.end()


def test_tokens_that_never_come_lead_to_a_new_attempt() -> None:
    world = World()
    reader = brought_to(world, Phase.FINISHING)
    world.sweep(1.0)
    assert reader.request.phase is Phase.FINISHING
    world.sweep(1.0)
    world.complete(reader, 200)


def test_more_tokens_than_credit_end_the_attempt() -> None:
    world = World(token_window=4, max_attempts=1)
    reader = brought_to(world, Phase.PREFILLING)
    [key] = world.decode.rows
    row = TokenRow(*key, 4, completion_ids(0, 5)[4])
    world.hear(world.worker(world.decode), Tokens(1, (row,)))
    world.settle()
    assert reader.failed.error.code == "no_worker"
    world.check_idle()


def test_frames_of_attempts_that_are_over_change_nothing() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    attempt = reader.attempt
    old = attempt.key
    world.restart(world.worker(world.decode))
    decode, prefill = world.worker(world.decode), world.worker(world.prefill)
    before = list(reader.request.relay.token_ids)
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
    assert reader.request.relay.token_ids == before
    world.complete(reader, 200)


def test_a_grant_of_an_earlier_life_is_not_taken() -> None:
    world = World()
    reader = brought_to(world, Phase.RESERVING)
    attempt = reader.attempt
    grant = Grant(*attempt.key, epoch=world.decode.epoch + 7)
    world.hear(attempt.pair.decode, grant)
    assert reader.request.phase is Phase.RESERVING


def test_a_frame_that_no_worker_says_ends_the_link() -> None:
    world = World(num_decodes=2)
    reader = brought_to(world, Phase.DECODING)
    hello = Hello(Peer(Role.PREFILL, "x", 1), PROTOCOL_VERSION, PROTOCOL_VERSION)
    world.hear(world.worker(world.decode), hello)
    world.decode.rows.clear()
    world.settle()
    assert reader.request.num_attempts == 2
    assert reader.token_ids == completion_ids(0, 200)


def test_heartbeats_name_prefill_only_after_it_was_asked() -> None:
    world = World()
    brought_to(world, Phase.RESERVING)
    decode, prefill = world.worker(world.decode), world.worker(world.prefill)
    assert len(decode.live_keys) == 1
    assert prefill.live_keys == []
    assert prefill.waiting_tokens == 5


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
    world.complete(reader, 200)


def test_an_attempt_that_decode_does_not_know_yet_is_ended_before_it_begins() -> None:
    world = World(max_attempts=1)
    reader = brought_to(world, Phase.RESERVING)
    attempt = reader.attempt
    unknown = Ended(*attempt.key, EndReason.UNKNOWN, num_tokens=0, freed_blocks=0)
    world.hear(attempt.pair.decode, unknown)
    world.read(reader)
    assert reader.failed.error.code == "no_worker"
    [end] = [f for f in world.up[attempt.pair.decode] if isinstance(f, End)]
    assert end.key == attempt.key
    world.deliver()
    world.check_idle()


@pytest.mark.parametrize("reason", [EndReason.UNKNOWN, EndReason.STOP])
def test_what_decode_says_after_it_has_ended_changes_nothing(reason: EndReason) -> None:
    world = World(max_attempts=1)
    reader = brought_to(world, Phase.FINISHING)
    attempt = reader.attempt
    again = Ended(*attempt.key, reason, num_tokens=9, freed_blocks=0)
    world.hear(attempt.pair.decode, again)
    assert reader.request.phase is Phase.FINISHING
    assert not reader.terminals


def test_fewer_tokens_than_the_client_has_are_an_error() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    attempt = reader.attempt
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
    world.complete(reader, 200)
    assert reader.request.num_attempts == 1


def test_a_first_token_that_the_client_has_already_still_counts_as_computed() -> None:
    world = World(num_decodes=2)
    reader = brought_to(world, Phase.DECODING)
    world.lose(world.worker(world.decode))
    world.deliver()
    assert reader.request.phase is Phase.PREFILLING
    prefill = world.worker(world.prefill)
    world.compute(prefill)
    world.deliver()
    assert reader.request.phase.name == "DECODING"
    assert prefill.waiting_tokens == 0
