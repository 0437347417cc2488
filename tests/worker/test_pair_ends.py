"""Tests of how attempts end on a prefill and a decode core: every end frees all blocks and is
reported once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from transport.frames import (
    PROTOCOL_VERSION,
    Drain,
    EndReason,
    Goodbye,
    Hello,
    Peer,
    RefuseReason,
)
from triolet.ids import AttemptKey, Role
from triolet.sampling import SamplingParams

from .pair import LINK, SERVER, Heard, Pair
from .scripts import completion

if TYPE_CHECKING:
    from collections.abc import Callable
from .phases import (
    PHASES,
    PROMPT,
    inside_a_decode_step,
    paused,
    prefilling,
    queued,
    running,
    state_on_decode,
)


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


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_stood_still_for_a_moment_holds_it_against_nobody(
    phase: Callable[[Pair], AttemptKey],
) -> None:
    pair = Pair()
    key = phase(pair)
    for node in pair.nodes.values():
        node.finish_step(pair.now)
    epochs = (pair.p_identity.me.epoch, pair.d_identity.me.epoch)
    pair.pass_time(0.75, beats=False)
    # Renewals and answers of this time wait in its sockets, unread.
    pair.now += LINK.lease_ttl_s
    pair.sweep()
    assert not pair.heard[key].ended.keys() & {Role.DECODE}
    assert state_on_decode(pair, key) is not None
    assert (pair.p_identity.me.epoch, pair.d_identity.me.epoch) == epochs
    pair.live.discard(key)
    pair.pass_time(LINK.lease_ttl_s + 0.5)
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LEASE_EXPIRED
    pair.run()
    pair.pass_time(LINK.kv_stall_s + 0.5)
    pair.check_empty()


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
    assert pair.nodes[Role.PREFILL].core.server_sessions.is_drained
    assert not pair.nodes[Role.DECODE].core.server_sessions.is_drained
    pair.beat()
    assert pair.beats[Role.DECODE].is_draining
    pair.pass_time(5.5)
    assert pair.heard[waiting].ended[Role.DECODE].reason is EndReason.DRAIN
    assert pair.nodes[Role.DECODE].core.server_sessions.is_drained


def test_a_server_whose_frames_are_lost_loses_what_it_had() -> None:
    pair = Pair()
    key = running(pair)
    pair.decode.server_sessions.on_server_gone(SERVER.identity(), pair.now)
    pair.settle()
    assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LEASE_EXPIRED
    pair.run()
    pair.check_empty()


def test_a_server_that_says_goodbye_is_no_warning() -> None:
    levels = []
    for has_said_so in (True, False):
        pair = Pair()
        running(pair)
        with capture_logs() as logs:
            if has_said_so:
                pair.to_worker(Role.DECODE, Goodbye("shut down"))
            else:
                pair.decode.server_sessions.on_server_gone(SERVER.identity(), pair.now)
        levels += [entry["log_level"] for entry in logs if entry["event"] == "server_gone"]
    assert levels == ["info", "warning"]


def test_a_server_that_greets_again_has_given_up_what_it_had() -> None:
    pair = Pair()
    keys = [running(pair), prefilling(pair)]
    for role in pair.nodes:
        pair.to_worker(role, Hello(Peer.of(SERVER), PROTOCOL_VERSION, PROTOCOL_VERSION))
    other = pair.ask(PROMPT)
    pair.run()
    for key in keys:
        assert pair.heard[key].ended[Role.DECODE].reason is EndReason.LEASE_EXPIRED
    assert pair.heard[keys[1]].ended[Role.PREFILL].reason is EndReason.LEASE_EXPIRED
    assert pair.heard[other].ended[Role.DECODE].reason is EndReason.LENGTH
    pair.check_empty()
