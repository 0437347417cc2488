"""Tests of frames between a prefill and a decode core: KV chunks, credits, and invalid frames."""

from __future__ import annotations

import msgspec
import pytest

from transport.frames import (
    PROTOCOL_VERSION,
    AttemptRow,
    CreditRow,
    End,
    EndReason,
    Hello,
    KvChunk,
    KvCredit,
    KvDone,
    KvManifest,
    Peer,
    Prefill,
    Refuse,
    RefuseReason,
    Reserve,
    ServerHeartbeat,
    TokenCredit,
    Tokens,
    Welcome,
)
from transport.handshake import make_hello
from transport.lease import LeaseState
from transport.tokens import pack_tokens
from triolet.ids import PeerId, Role
from triolet.sampling import SamplingParams

from .pair import LINK, SERVER, Heard, Pair
from .phases import OTHER_SERVER, PROMPT, filling, paused, running, state_on_decode, until
from .scripts import VOCAB_SIZE


def test_reserve_twice_grants_one_lease() -> None:
    pair = Pair()
    key = pair.ask(PROMPT)
    leased = pair.nodes[Role.DECODE].engine.ledger.leased_blocks
    pair.heard[key].granted = False
    pair.ask(PROMPT, key=key)
    assert pair.heard[key].granted
    assert pair.nodes[Role.DECODE].engine.ledger.leased_blocks == leased == 6
    pair.run()
    assert len(pair.heard[key].tokens) == 6


@pytest.mark.parametrize(
    ("num_tokens", "reason"),
    [
        (4 * 24, RefuseReason.TOO_LONG),
        (4 * 18, RefuseReason.NO_BLOCKS),  # it fits, but the first could not grow any more
    ],
)
def test_what_does_not_fit_is_refused(num_tokens: int, reason: RefuseReason) -> None:
    pair = Pair()
    pair.ask(PROMPT)
    refused = pair.heard[pair.ask(range(num_tokens))].refused
    assert refused is not None
    assert refused.reason is reason
    assert pair.heard[pair.ask(range(4 * 17))].granted


def test_rows_are_refused_when_all_are_taken_but_paused_ones_take_none() -> None:
    pair = Pair(num_blocks=100, max_num_seqs=2)
    paused(pair)
    keys = [pair.ask(PROMPT) for _ in range(3)]
    assert [pair.heard[key].granted for key in keys] == [True, True, False]
    refused = pair.heard[keys[2]].refused
    assert refused is not None
    assert refused.reason is RefuseReason.NO_ROWS


def test_a_chunk_that_is_damaged_too_often_ends_the_attempt() -> None:
    pair = Pair()
    key = pair.ask(PROMPT)
    until(pair, lambda: pair.wire and isinstance(pair.wire[0].frame, KvChunk))
    for _ in range(LINK.max_chunk_resends + 1):
        index = next(i for i, p in enumerate(pair.wire) if isinstance(p.frame, KvChunk))
        assert state_on_decode(pair, key) is LeaseState.RESERVED
        pair.deliver(index, damage=True)
        while pair.wire and not isinstance(pair.wire[0].frame, KvChunk):
            pair.deliver()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.ERROR
    assert pair.decode.load().bad_digests == LINK.max_chunk_resends + 1
    assert pair.decode.load().kv_bytes == 0
    pair.run()
    pair.check_empty()
    assert pair.heard[key].ended[Role.PREFILL].reason is EndReason.UNWANTED


def test_kv_bytes_are_whole_blocks_also_under_repeats() -> None:
    pair = Pair()
    pair.ask(PROMPT)
    while pair.prefill.load().waiting_tokens or pair.wire:
        for index in reversed(range(len(pair.wire))):
            pair.deliver(index, keep=True)
            pair.deliver(index)
        pair.nodes[Role.PREFILL].begin_step(pair.now)
        pair.nodes[Role.PREFILL].finish_step(pair.now)
        pair.settle()
    pair.run()
    assert pair.decode.load().kv_bytes == 6 * pair.d_identity.capacity.bytes_per_block
    pair.check_empty()


def test_prefill_frees_its_blocks_when_they_are_out_and_stops_when_the_ring_is_full() -> None:
    pair = Pair()
    first, second = pair.ask(PROMPT[:8]), pair.ask(range(60))
    node = pair.nodes[Role.PREFILL]
    node.begin_step(pair.now)
    while node.rows:
        node.finish_step(pair.now)
        pair.settle()
        node.begin_step(pair.now)
    # Nothing was delivered: the ring holds all of the first prompt, and of the other what fits.
    assert not node.engine.ledger.has_lease(first)
    assert node.engine.ledger.has_lease(second)
    assert pair.prefill.shipper.ring_bytes == LINK.kv_ring_bytes
    assert pair.prefill.load().waiting_tokens > 0
    pair.run()
    assert pair.heard[second].ended[Role.PREFILL].reason is EndReason.HANDED_OVER
    pair.check_empty()


def test_late_chunks_meet_the_end_and_give_their_window_back() -> None:
    pair = Pair()
    key = filling(pair)
    pair.nodes[Role.PREFILL].finish_step(pair.now)
    pair.settle()
    num_chunks = sum(isinstance(parcel.frame, KvChunk) for parcel in pair.wire)
    assert num_chunks > 0
    pair.to_worker(Role.DECODE, End(*key, EndReason.CANCEL))
    assert pair.nodes[Role.DECODE].engine.ledger.leased_blocks == 0
    pair.run()
    assert pair.decode.load().stale_frames == num_chunks
    assert pair.prefill.shipper.ring_bytes == 0
    pair.check_empty()


def test_a_chunk_for_another_life_is_dropped_and_its_window_given_back() -> None:
    pair = Pair()
    pair.ask(PROMPT)
    until(pair, lambda: pair.wire and isinstance(pair.wire[0].frame, KvChunk))
    parcel = pair.wire[0]
    assert isinstance(parcel.frame, KvChunk)
    epoch = parcel.frame.target_epoch + 1
    parcel.frame = msgspec.structs.replace(parcel.frame, target_epoch=epoch)
    sent = parcel.frame
    pair.deliver()
    assert pair.decode.load().kv_bytes == 0
    assert pair.decode.load().stale_frames == 1
    answers = [p.frame for p in pair.wire if isinstance(p.frame, KvCredit | KvDone)]
    assert answers == [KvDone(*sent.key), KvCredit(*sent.key, index=0, num_bytes=32)]


def test_each_server_gets_one_frame_a_step_and_its_own_rows_only() -> None:
    pair = Pair()
    pair.decode.on_control(OTHER_SERVER.identity(), make_hello(OTHER_SERVER), pair.now)
    pair.settle()
    keys = [pair.ask(PROMPT, allowed=2) for _ in range(2)]
    pair.run()
    for key in keys:
        pair.allow(key, 6)
    pair.nodes[Role.DECODE].begin_step(pair.now)
    pair.nodes[Role.DECODE].finish_step(pair.now)
    sends = pair.decode.outbox.take_for_servers()
    assert [send.to for send in sends] == [SERVER.identity()]
    assert isinstance(sends[0].frame, Tokens)
    assert {row.key for row in sends[0].frame.rows} == set(keys)
    pair.decode.on_control(OTHER_SERVER.identity(), End(*keys[0], EndReason.CANCEL), pair.now)
    pair.decode.on_control(
        OTHER_SERVER.identity(), ServerHeartbeat(2, (AttemptRow(*keys[1]),)), pair.now
    )
    assert state_on_decode(pair, keys[0]) is LeaseState.RUNNING


def test_credit_is_shared_among_the_servers() -> None:
    pair = Pair()
    pair.beat()
    assert pair.beats[Role.DECODE].row_credit == 4
    assert pair.beats[Role.PREFILL].token_credit == 200
    for core in (pair.decode, pair.prefill):
        core.on_control(OTHER_SERVER.identity(), make_hello(OTHER_SERVER), pair.now)
    pair.ask(PROMPT)
    pair.beat()
    # Three rows are free: rounded up, or the last one would not be given.
    assert pair.beats[Role.DECODE].row_credit == 1 + 2
    assert pair.beats[Role.PREFILL].token_credit == 100


def test_strangers_are_told_to_say_hello() -> None:
    pair = Pair()
    pair.decode.on_control(OTHER_SERVER.identity(), ServerHeartbeat(2), pair.now)
    [send] = pair.decode.outbox.take_for_servers()
    assert "HELLO" in getattr(send.frame, "reason", "")
    wrong_model = Hello(
        Peer(Role.PREFILL, "p", 3), PROTOCOL_VERSION, PROTOCOL_VERSION, "another model"
    )
    pair.decode.on_kv(PeerId(Role.PREFILL, "p", 3).identity(), wrong_model, None, pair.now)
    [answer] = pair.decode.outbox.take_for_senders()
    assert not isinstance(answer.frame, Welcome)


def test_tokens_outside_the_vocabulary_end_one_attempt_not_the_batch() -> None:
    pair = Pair()
    good = running(pair)
    bad = pair.new_key()
    pair.heard[bad] = Heard((1,), SamplingParams(), 0)
    prompt = pack_tokens([VOCAB_SIZE])
    pair.to_worker(Role.DECODE, Reserve(*bad, prompt, b"", SamplingParams(), 0, 9, 9.0))
    assert pair.heard[bad].ended[Role.DECODE].reason is EndReason.ERROR
    pair.to_worker(Role.PREFILL, Prefill(*bad, prompt, pair.target, SamplingParams(), 0, 9.0))
    assert pair.heard[bad].ended[Role.PREFILL].reason is EndReason.ERROR
    pair.run()
    assert pair.heard[good].ended[Role.DECODE].reason is EndReason.LENGTH


def test_a_first_token_outside_the_vocabulary_ends_one_attempt_not_the_batch() -> None:
    pair = Pair()
    good, bad = running(pair), pair.ask(PROMPT)
    until(pair, lambda: any(isinstance(parcel.frame, KvManifest) for parcel in pair.wire))
    for parcel in pair.wire:
        if isinstance(parcel.frame, KvManifest):
            first = msgspec.structs.replace(parcel.frame.first, token_id=VOCAB_SIZE)
            parcel.frame = msgspec.structs.replace(parcel.frame, first=first)
    pair.run()
    assert "outside the vocabulary" in pair.heard[bad].ended[Role.DECODE].message
    assert pair.heard[good].ended[Role.DECODE].reason is EndReason.LENGTH
    pair.check_empty()


@pytest.mark.parametrize(
    ("num_tokens", "held_blocks", "words"),
    [(97, 0, "can hold"), (8, 2, "nothing to compute"), (90, 0, "respect the credit")],
)
def test_prefill_says_why_it_takes_no_prompt(num_tokens: int, held_blocks: int, words: str) -> None:
    pair = Pair()
    for _ in range(10):
        key = pair.new_key()
        pair.heard[key] = Heard((1,), SamplingParams(), 0)
        prompt = pack_tokens(range(80))
        frame = Prefill(*key, prompt, pair.target, SamplingParams(), 0, 60.0)
        pair.to_worker(Role.PREFILL, frame)
    key = pair.new_key()
    pair.heard[key] = Heard((1,), SamplingParams(), 0)
    frame = Prefill(
        *key,
        pack_tokens(range(num_tokens)),
        pair.target,
        SamplingParams(),
        0,
        60.0,
        held_blocks=held_blocks,
    )
    pair.to_worker(Role.PREFILL, frame)
    ended = pair.heard[key].ended[Role.PREFILL]
    assert ended.reason is EndReason.ERROR
    assert words in ended.message


def test_frames_of_the_other_role_are_refused() -> None:
    pair = Pair()
    key = pair.new_key()
    pair.heard[key] = Heard((1,), SamplingParams(), 0)
    pair.to_worker(Role.DECODE, Prefill(*key, b"", pair.target, SamplingParams(), 0, 9.0))
    assert "no PREFILL to a decode worker" in pair.heard[key].ended[Role.DECODE].message
    pair.to_worker(Role.PREFILL, Reserve(*key, b"", b"", SamplingParams(), 0, 9, 9.0))
    assert "no RESERVE to a prefill worker" in pair.heard[key].ended[Role.PREFILL].message


def test_a_wrong_frame_about_a_live_attempt_ends_it_by_the_one_path() -> None:
    pair = Pair()
    key = running(pair)
    pair.to_worker(Role.DECODE, Prefill(*key, b"", pair.target, SamplingParams(), 0, 9.0))
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.ERROR
    assert pair.heard[key].ended[Role.DECODE].freed_blocks > 0
    pair.run()
    pair.check_empty()


def test_a_wrong_frame_about_another_servers_attempt_harms_nothing() -> None:
    pair = Pair()
    key = running(pair)
    pair.decode.on_control(OTHER_SERVER.identity(), make_hello(OTHER_SERVER), pair.now)
    wrong = Prefill(*key, b"", pair.target, SamplingParams(), 0, 9.0)
    pair.decode.on_control(OTHER_SERVER.identity(), wrong, pair.now)
    assert pair.decode.load().stale_frames == 1
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LENGTH


def test_a_reserve_of_another_servers_attempt_is_refused_and_harms_nothing() -> None:
    pair = Pair()
    key = running(pair)
    for core in (pair.decode, pair.prefill):
        core.on_control(OTHER_SERVER.identity(), make_hello(OTHER_SERVER), pair.now)
    reserve = Reserve(*key, pack_tokens(PROMPT), b"", SamplingParams(), 0, 9, 9.0)
    pair.decode.outbox.take_for_servers()
    pair.decode.on_control(OTHER_SERVER.identity(), reserve, pair.now)
    [send] = pair.decode.outbox.take_for_servers()
    assert isinstance(send.frame, Refuse)
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LENGTH


def test_credit_and_end_of_another_server_count_for_nothing() -> None:
    pair = Pair()
    key = paused(pair)
    pair.decode.on_control(OTHER_SERVER.identity(), make_hello(OTHER_SERVER), pair.now)
    credit = TokenCredit((CreditRow(*key, 100),))
    pair.decode.on_control(OTHER_SERVER.identity(), credit, pair.now)
    pair.decode.on_control(OTHER_SERVER.identity(), End(*key, EndReason.CANCEL), pair.now)
    pair.run()
    assert state_on_decode(pair, key) is LeaseState.PAUSED
    assert pair.decode.load().stale_frames == 1
