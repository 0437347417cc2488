"""What two cores do together, claim by claim: leases, windows, recoveries, ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from transport.frames import (
    AttemptRow,
    Drain,
    End,
    EndReason,
    Hello,
    KvChunk,
    KvCredit,
    KvDone,
    Peer,
    Prefill,
    RefuseReason,
    Reserve,
    ServerHeartbeat,
    Tokens,
    Welcome,
)
from transport.handshake import make_hello
from transport.lease import LeaseState
from transport.tokens import pack_tokens
from triolet.ids import AttemptKey, PeerId, Role
from triolet.sampling import SamplingParams

from .fake_engine import VOCAB_SIZE, completion
from .pair import LINK, SERVER, Heard, Pair

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = tuple(range(1, 22))
"""21 tokens: six blocks, three chunks, three prefill steps."""
OTHER_SERVER = PeerId(Role.SERVER, "server-1", 2)


def state_on_decode(pair: Pair, key: AttemptKey) -> LeaseState | None:
    lease = pair.decode.roster.leases.get(key)
    return None if lease is None else lease.state


def until(pair: Pair, condition: Callable[[], object]) -> None:
    """Let things happen one by one until something holds."""
    for _ in range(500):
        if condition():
            return
        if pair.wire:
            pair.deliver()
            continue
        for node in pair.nodes.values():
            node.finish_step(pair.now)
            pair.settle()
            if condition():
                return
            node.begin_step(pair.now)
        pair.settle()
    raise AssertionError("it never holds")


def queued(pair: Pair) -> AttemptKey:
    return pair.ask(PROMPT)


def prefilling(pair: Pair) -> AttemptKey:
    key = pair.ask(PROMPT)
    pair.nodes[Role.PREFILL].begin_step(pair.now)
    return key


def filling(pair: Pair) -> AttemptKey:
    key = pair.ask(PROMPT)
    until(pair, lambda: state_on_decode(pair, key) is LeaseState.FILLING)
    return key


def running(pair: Pair) -> AttemptKey:
    key = pair.ask(PROMPT)
    until(pair, lambda: len(pair.heard[key].tokens) == 3)
    return key


def inside_a_decode_step(pair: Pair) -> AttemptKey:
    key = running(pair)
    pair.nodes[Role.DECODE].begin_step(pair.now)
    assert pair.nodes[Role.DECODE].rows
    return key


def paused(pair: Pair) -> AttemptKey:
    key = pair.ask(PROMPT, allowed=2)
    pair.run()
    assert state_on_decode(pair, key) is LeaseState.PAUSED
    return key


PHASES = [queued, prefilling, filling, running, inside_a_decode_step, paused]


@pytest.mark.parametrize("phase", PHASES)
def test_end_frees_everything_in_every_phase(phase: Callable[[Pair], AttemptKey]) -> None:
    pair = Pair()
    key = phase(pair)
    pair.end(key)
    for node in pair.nodes.values():
        node.finish_step(pair.now)
    pair.settle()
    for role, node in pair.nodes.items():
        assert node.engine.ledger.leased_blocks == 0, role
    ended = pair.heard[key].ended
    assert ended[Role.DECODE].reason is EndReason.CANCEL
    assert ended[Role.PREFILL].reason in (EndReason.CANCEL, EndReason.HANDED_OVER)
    num_tokens = len(pair.heard[key].tokens)
    pair.run()
    pair.check_empty()
    assert len(pair.heard[key].tokens) == num_tokens, "a token after the end"


@pytest.mark.parametrize(
    ("phase", "role"), [(prefilling, Role.PREFILL), (inside_a_decode_step, Role.DECODE)]
)
def test_blocks_that_the_device_writes_are_free_only_when_it_returns(
    phase: Callable[[Pair], AttemptKey], role: Role
) -> None:
    pair = Pair()
    key = phase(pair)
    node = pair.nodes[role]
    held = node.engine.ledger.leased_blocks
    pair.end(key)
    assert node.engine.ledger.leased_blocks == held > 0
    assert role not in pair.heard[key].ended
    pair.end(key)
    pair.live.add(key)
    pair.beat()
    assert role not in pair.heard[key].ended, "it is not over before its blocks are free"
    node.finish_step(pair.now)
    pair.settle()
    assert node.engine.ledger.leased_blocks == 0
    assert pair.heard[key].ended[role].freed_blocks == held


@pytest.mark.parametrize("phase", PHASES)
def test_what_its_server_no_longer_names_is_released(phase: Callable[[Pair], AttemptKey]) -> None:
    pair = Pair()
    key = phase(pair)
    pair.live.discard(key)
    for node in pair.nodes.values():
        node.finish_step(pair.now)
    pair.pass_time(LINK.lease_ttl_s + 0.5)
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LEASE_EXPIRED
    pair.run()
    pair.pass_time(LINK.kv_stall_s + 0.5)
    pair.check_empty()


@pytest.mark.parametrize("phase", PHASES)
def test_a_named_attempt_lives_until_its_deadline(phase: Callable[[Pair], AttemptKey]) -> None:
    pair = Pair()
    key = phase(pair)
    for node in pair.nodes.values():
        node.finish_step(pair.now)
    pair.pass_time(1.0)
    assert state_on_decode(pair, key) is not None
    pair.pass_time(60.0)
    assert pair.heard[key].ended[Role.DECODE].reason in (EndReason.DEADLINE, EndReason.PEER_LOST)
    assert pair.nodes[Role.DECODE].engine.ledger.leased_blocks == 0


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


def test_an_end_that_overtakes_its_reserve_wins() -> None:
    pair = Pair()
    key = pair.new_key()
    pair.heard[key] = Heard(PROMPT, SamplingParams(), 0)
    pair.end(key)
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.CANCEL
    pair.ask(PROMPT, key=key)
    refused = pair.heard[key].refused
    assert refused is not None
    assert refused.reason is RefuseReason.ENDED


def test_a_new_attempt_supersedes_the_old_one() -> None:
    pair = Pair()
    old = running(pair)
    tokens = completion(PROMPT, 3, 6)
    new = pair.ask(PROMPT, key=AttemptKey(old.request_id, 1), replay=tokens[:3])
    assert pair.heard[old].ended[Role.DECODE].reason is EndReason.SUPERSEDED
    pair.run()
    assert pair.heard[new].tokens == {0: tokens[0], 3: tokens[3], 4: tokens[4], 5: tokens[5]}
    pair.check_empty()


@pytest.mark.parametrize("num_replayed", range(7))
def test_a_replay_continues_exactly_and_sends_nothing_twice(num_replayed: int) -> None:
    pair, tokens = Pair(), completion(PROMPT, 3, 6)
    key = pair.ask(PROMPT, replay=tokens[:num_replayed])
    pair.run()
    heard = pair.heard[key]
    # Position 0 comes from prefill, which knows of no replay.
    assert sorted(heard.tokens) == sorted({0, *range(num_replayed, 6)})
    assert heard.ended[Role.DECODE].reason is EndReason.LENGTH
    assert heard.ended[Role.DECODE].num_tokens == 6
    pair.check_empty()


def test_a_replay_that_begins_otherwise_is_an_error() -> None:
    pair, tokens = Pair(), completion(PROMPT, 3, 6)
    key = pair.ask(PROMPT, replay=[(tokens[0] + 1) % VOCAB_SIZE])
    pair.run()
    ended = pair.heard[key].ended[Role.DECODE]
    assert ended.reason is EndReason.ERROR
    assert "would not be the same" in ended.message
    pair.check_empty()


def test_a_stream_stops_at_its_window_and_goes_on_when_it_opens() -> None:
    pair, tokens = Pair(), completion(PROMPT, 3, 6)
    key = paused(pair)
    assert pair.heard[key].tokens == {0: tokens[0], 1: tokens[1]}
    assert pair.decode.load().paused == 1
    assert pair.decode.load().leased_blocks > 0
    pair.allow(key, 1)
    pair.run()
    assert len(pair.heard[key].tokens) == 2
    pair.allow(key, 5)
    pair.run()
    assert len(pair.heard[key].tokens) == 5
    pair.allow(key, 6)
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LENGTH


@pytest.mark.parametrize("position", range(6))
def test_a_stop_token_ends_it_and_is_a_row(position: int) -> None:
    pair, tokens = Pair(), completion(PROMPT, 3, 6)
    key = pair.ask(PROMPT, stop_token_ids=(tokens[position],))
    pair.run()
    ended = pair.heard[key].ended[Role.DECODE]
    assert ended.reason is EndReason.STOP
    assert ended.num_tokens == len(pair.heard[key].tokens) == position + 1
    pair.check_empty()


def test_the_context_length_ends_it() -> None:
    pair = Pair(num_blocks=7)
    key = pair.ask(PROMPT, max_tokens=500)
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LENGTH
    assert pair.heard[key].ended[Role.DECODE].num_tokens == 28 - 21


def test_when_blocks_run_out_the_youngest_of_the_least_important_gives_way() -> None:
    pair = Pair(num_blocks=24, max_num_seqs=3)
    keys = [pair.ask(PROMPT[:12], max_tokens=30, priority=p, seed=p) for p in (0, 1, 1)]
    pair.run()
    reasons = [pair.heard[key].ended[Role.DECODE].reason for key in keys]
    assert reasons == [EndReason.LENGTH, EndReason.LENGTH, EndReason.PREEMPTED]
    assert pair.decode.load().preemptions == 1
    pair.check()


@pytest.mark.parametrize(
    ("num_tokens", "reason"),
    [(4 * 24, RefuseReason.TOO_LONG), (4 * 23, RefuseReason.NO_BLOCKS)],
)
def test_what_does_not_fit_is_refused(num_tokens: int, reason: RefuseReason) -> None:
    pair = Pair()
    pair.ask(PROMPT)
    refused = pair.heard[pair.ask(range(num_tokens))].refused
    assert refused is not None
    assert refused.reason is reason


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
    assert pair.heard[key].ended[Role.PREFILL].reason is EndReason.PEER_LOST


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


def test_a_failed_step_ends_its_batch_and_nothing_else() -> None:
    pair = Pair()
    first = running(pair)
    second = queued(pair)
    pair.nodes[Role.DECODE].begin_step(pair.now)
    pair.nodes[Role.DECODE].finish_step(pair.now, fails=True)
    pair.settle()
    assert pair.heard[first].ended[Role.DECODE].reason is EndReason.ERROR
    pair.run()
    assert pair.heard[second].ended[Role.DECODE].reason is EndReason.LENGTH
    third = queued(pair)
    pair.nodes[Role.PREFILL].begin_step(pair.now)
    pair.nodes[Role.PREFILL].finish_step(pair.now, fails=True)
    pair.settle()
    assert pair.heard[third].ended[Role.PREFILL].reason is EndReason.ERROR
    pair.end(third)
    pair.run()
    pair.check_empty()


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_stood_still_drops_everything_first(
    phase: Callable[[Pair], AttemptKey],
) -> None:
    pair = Pair()
    key = phase(pair)
    epochs = (pair.p_identity.me.epoch, pair.d_identity.me.epoch)
    for node in pair.nodes.values():
        node.finish_step(pair.now)
    pair.now += LINK.lease_ttl_s + 0.1
    pair.sweep()
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LEASE_EXPIRED
    assert (pair.p_identity.me.epoch, pair.d_identity.me.epoch) != epochs
    pair.check_empty()
    again = pair.ask(PROMPT, key=AttemptKey(key.request_id, 1))
    pair.run()
    assert pair.heard[again].ended[Role.DECODE].reason is EndReason.LENGTH


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


def test_a_lost_end_is_told_again_and_unknown_is_said_to_be_unknown() -> None:
    pair = Pair()
    key = pair.ask(PROMPT)
    pair.run()
    told = dict(pair.heard[key].ended)
    pair.heard[key].ended.clear()
    pair.live.add(key)
    pair.beat()
    assert pair.heard[key].ended == told
    stranger = pair.new_key()
    pair.heard[stranger] = pair.heard.pop(key)
    pair.heard[stranger].ended.clear()
    pair.live = {stranger}
    pair.beat()
    assert pair.heard[stranger].ended[Role.DECODE].reason is EndReason.UNKNOWN


def test_drain_takes_nothing_new_and_ends_at_its_deadline() -> None:
    pair = Pair()
    key = running(pair)
    waiting = paused(pair)
    for role in pair.nodes:
        pair.to_worker(role, Drain(5.0))
    refused = pair.heard[pair.ask(PROMPT)].refused
    assert refused is not None
    assert refused.reason is RefuseReason.DRAINING
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LENGTH
    assert pair.nodes[Role.PREFILL].core.reception.is_drained
    assert not pair.nodes[Role.DECODE].core.reception.is_drained
    pair.beat()
    assert pair.beats[Role.DECODE].is_draining
    pair.pass_time(5.5)
    assert pair.heard[waiting].ended[Role.DECODE].reason is EndReason.DRAIN
    assert pair.nodes[Role.DECODE].core.reception.is_drained


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
    assert pair.beats[Role.DECODE].row_credit == 1 + 3 // 2
    assert pair.beats[Role.PREFILL].token_credit == 100


def test_a_server_whose_frames_are_lost_loses_what_it_had() -> None:
    pair = Pair()
    key = running(pair)
    pair.decode.reception.on_server_gone(SERVER.identity(), pair.now)
    pair.settle()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LEASE_EXPIRED
    pair.run()
    pair.check_empty()


def test_strangers_are_told_to_say_hello() -> None:
    pair = Pair()
    pair.decode.on_control(OTHER_SERVER.identity(), ServerHeartbeat(2), pair.now)
    [send] = pair.decode.outbox.take_for_servers()
    assert "HELLO" in getattr(send.frame, "reason", "")
    wrong_model = Hello(Peer(Role.PREFILL, "p", 3), 1, 1, "another model")
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


@pytest.mark.parametrize(
    ("num_tokens", "held_blocks", "words"),
    [(97, 0, "can hold"), (8, 2, "nothing to compute"), (90, 0, "mind the credit")],
)
def test_prefill_says_why_it_takes_no_prompt(num_tokens: int, held_blocks: int, words: str) -> None:
    pair = Pair()
    for _ in range(4):
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
    assert "no Prefill to a decode worker" in pair.heard[key].ended[Role.DECODE].message
    pair.to_worker(Role.PREFILL, Reserve(*key, b"", b"", SamplingParams(), 0, 9, 9.0))
    assert "no Reserve to a prefill worker" in pair.heard[key].ended[Role.PREFILL].message
