"""Tests of prompts that the decode core computes itself: in chunks beside streams, with one lease,
and with the same result."""

from __future__ import annotations

import pytest

from engine.batch import StepRow
from transport.digest import payload_digest
from transport.frames import Drain, EndReason, KvChunk, KvDone, Reserve
from transport.handshake import make_hello
from transport.tokens import pack_tokens
from triolet.ids import AttemptKey, Role
from triolet.sampling import SamplingParams

from .pair import Pair
from .scripts import completion

LONG = range(5, 5 + 30)
MANY = 10_000


def step_decode(pair: Pair) -> list[StepRow]:
    """Run one step of decode; return its rows."""
    node = pair.nodes[Role.DECODE]
    node.begin_step(pair.now)
    rows = [row for row in node.rows if isinstance(row, StepRow)]
    node.finish_step(pair.now)
    pair.settle()
    return rows


def state(pair: Pair, key: AttemptKey) -> str:
    lease = pair.decode.attempt_table.leases.get(key)
    return "none" if lease is None else lease.state.value


def test_a_prompt_is_computed_in_chunks_beside_running_rows() -> None:
    pair = Pair()
    streams = [pair.ask((1, 2, 3 + n), max_tokens=30, seed=n) for n in range(2)]
    while not all(state(pair, key) == "running" for key in streams):
        pair.nodes[Role.PREFILL].begin_step(pair.now)
        pair.nodes[Role.PREFILL].finish_step(pair.now)
        pair.settle()
        while pair.wire:
            pair.deliver()
        step_decode(pair)
    key = pair.ask(LONG, max_tokens=4, local_tokens=MANY)
    assert pair.heard[key].is_local
    assert state(pair, key) == "reserved"
    chunks = []
    while not pair.heard[key].tokens:
        rows = step_decode(pair)
        assert [len(row.token_ids) for row in rows if row.is_decode] == [1, 1], "none waits"
        chunks += [len(row.token_ids) for row in rows if not row.is_decode]
        assert state(pair, key) in ("computing", "ready")
    assert chunks == [8, 8, 8, 6]
    pair.run()
    assert list(pair.heard[key].tokens.values()) == completion(tuple(LONG), 3, 4)
    assert pair.decode.counters.local_prompts == 1
    assert pair.prefill.counters.computed_tokens == 6, "prefill had nothing of it"
    pair.check_empty()


def test_decode_says_who_computes_by_what_it_was_told() -> None:
    pair = Pair()
    at, below = (pair.ask(LONG, local_tokens=n) for n in (30, 29))
    assert pair.heard[at].is_local
    assert not pair.heard[below].is_local
    pair.heard[at].is_local = False
    packed, params = pack_tokens(LONG), pair.heard[at].sampling
    again = Reserve(*at, packed, b"", params, 0, 1_000, 60.0, local_tokens=30)
    pair.to_worker(Role.DECODE, again)
    assert pair.heard[at].is_local, "a repeated RESERVE gets the same answer"
    pair.run()
    pair.check_empty()


def test_several_prompts_and_streams_take_turns() -> None:
    pair = Pair(num_blocks=60, max_num_seqs=4)
    keys = [
        pair.ask(range(n, n + 3 + 7 * n), max_tokens=9, seed=n, local_tokens=MANY)
        for n in range(1, 5)
    ]
    most_rows = 0
    while pair.decode.attempt_table.attempts:
        rows = step_decode(pair)
        most_rows = max(most_rows, len(rows))
        pair.check()
    assert most_rows <= 4
    for n, key in enumerate(keys, 1):
        wanted = completion(tuple(range(n, n + 3 + 7 * n)), n, 9)
        assert [pair.heard[key].tokens[i] for i in range(9)] == wanted
    pair.check_empty()


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("is_inside", [False, True])
def test_an_end_at_any_chunk_frees_everything(num_steps: int, is_inside: bool) -> None:
    pair = Pair()
    key = pair.ask(LONG, max_tokens=9, local_tokens=MANY)
    for _ in range(num_steps):
        step_decode(pair)
    node = pair.nodes[Role.DECODE]
    if is_inside:
        node.begin_step(pair.now)
    pair.end(key)
    ledger = node.engine.ledger
    assert bool(ledger.leased_blocks) == is_inside, "what the device writes stays until it returns"
    node.finish_step(pair.now)
    pair.settle()
    assert ledger.leased_blocks == 0
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.CANCEL
    num_tokens = len(pair.heard[key].tokens)
    pair.run()
    assert len(pair.heard[key].tokens) == num_tokens
    pair.check_empty()


@pytest.mark.parametrize("num_replayed", [1, 5, 9])
def test_a_replay_follows_a_prompt_that_was_computed_here(num_replayed: int) -> None:
    pair = Pair()
    wanted = completion(tuple(LONG), 3, 12)
    key = pair.ask(LONG, replay=wanted[:num_replayed], max_tokens=12, local_tokens=MANY)
    pair.run()
    heard = pair.heard[key]
    assert sorted(heard.tokens) == list(range(num_replayed, 12))
    assert [heard.tokens[i] for i in sorted(heard.tokens)] == wanted[num_replayed:]
    pair.check_empty()


def test_a_first_token_that_is_not_the_one_that_was_sent_ends_the_attempt() -> None:
    pair = Pair()
    wrong = [completion(tuple(LONG), 3, 1)[0] + 1, 5]
    key = pair.ask(LONG, replay=wrong, local_tokens=MANY)
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.ERROR
    assert "would not be the same" in pair.heard[key].ended[Role.DECODE].message
    assert not pair.heard[key].tokens
    pair.check_empty()


def test_nobody_else_writes_into_what_is_computed_here() -> None:
    pair = Pair()
    key = pair.ask(LONG, max_tokens=3, local_tokens=MANY)
    sender = pair.p_identity.me.identity()
    core = pair.decode
    core.on_kv(sender, make_hello(pair.p_identity.me, pair.p_identity.fingerprint), None, pair.now)
    payload = bytes(pair.nodes[Role.DECODE].engine.bytes_per_block)
    forged = KvChunk(*key, pair.d_identity.me.epoch, 0, 0, 1, payload_digest(payload))
    for _ in range(3):
        core.on_kv(sender, forged, payload, pair.now)
        answers = [send.frame for send in core.outbox.take_for_senders()]
        assert any(isinstance(frame, KvDone) for frame in answers)
        step_decode(pair)
    assert core.counters.kv_bytes == 0
    assert core.counters.stale_frames == 3
    pair.run()
    assert list(pair.heard[key].tokens.values()) == completion(tuple(LONG), 3, 3)


def test_a_step_that_raises_ends_the_prompts_in_it_too() -> None:
    pair = Pair()
    keys = [pair.ask(LONG, seed=n, local_tokens=MANY) for n in range(1)]
    keys.append(pair.ask((9, 8), local_tokens=MANY, max_tokens=20))
    node = pair.nodes[Role.DECODE]
    node.begin_step(pair.now)
    num_rows = len(node.rows)
    node.finish_step(pair.now, fails=True)
    pair.settle()
    ended = [heard.ended[Role.DECODE] for heard in pair.heard.values() if heard.ended]
    assert len(ended) == num_rows
    assert {frame.failed_rows for frame in ended} == {num_rows}
    pair.run()
    for key in keys:
        assert pair.heard[key].ended
    pair.check_empty()


def test_a_prompt_gives_way_when_blocks_run_out() -> None:
    pair = Pair(num_blocks=12)
    stream = pair.ask((1, 2, 3), max_tokens=40, local_tokens=MANY)
    for _ in range(4):
        step_decode(pair)
    prompt = pair.ask(range(9, 9 + 30), max_tokens=3, priority=1, local_tokens=MANY)
    assert pair.heard[prompt].granted
    node = pair.nodes[Role.DECODE]
    node.engine.ledger.lease("somebody", node.engine.ledger.available_blocks)
    while (
        prompt in pair.decode.attempt_table.attempts
        and stream in pair.decode.attempt_table.attempts
    ):
        pair.decode.stepper.prompts.rates.step_s = 0.0
        step_decode(pair)
    assert stream in pair.heard
    node.engine.ledger.release("somebody")
    pair.run()
    assert len(pair.heard[stream].tokens) == 40 or pair.heard[stream].ended
    pair.check_empty()


def test_what_is_being_computed_is_announced() -> None:
    pair = Pair()
    key = pair.ask(LONG, max_tokens=3, local_tokens=MANY)
    step_decode(pair)
    pair.beat()
    load = pair.beats[Role.DECODE].load
    assert (load.local_tokens, load.local_prompts, load.waiting) == (22, 0, 1)
    [lease] = pair.decode.account(pair.now).leases
    assert (lease.attempt, lease.state) == (str(key), "computing")
    pair.run()
    pair.beat()
    assert pair.beats[Role.DECODE].load.local_tokens == 0
    assert pair.beats[Role.DECODE].load.local_prompts == 1


def test_a_drain_waits_for_a_prompt_as_for_a_stream() -> None:
    pair = Pair()
    key = pair.ask(LONG, max_tokens=3, local_tokens=MANY)
    step_decode(pair)
    pair.to_worker(Role.DECODE, Drain(deadline_s=60.0))
    pair.run()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LENGTH
    late = AttemptKey(b"z" * 16, 0)
    pair.heard[late] = pair.heard[key]
    pair.to_worker(
        Role.DECODE,
        Reserve(*late, pack_tokens((1, 2)), b"", SamplingParams(), 0, 9, 9.0, local_tokens=9),
    )
    assert pair.heard[late].refused is not None
