"""Phases of an attempt from which tests of a prefill and a decode core start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.lease import LeaseState
from triolet.ids import AttemptKey, PeerId, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from .pair import Pair

PROMPT = tuple(range(1, 22))
"""21 tokens: six blocks, three chunks, three prefill steps."""
OTHER_SERVER = PeerId(Role.SERVER, "server-1", 2)


def state_on_decode(pair: Pair, key: AttemptKey) -> LeaseState | None:
    lease = pair.decode.attempt_table.leases.get(key)
    return None if lease is None else lease.state


def until(pair: Pair, condition: Callable[[], object]) -> None:
    """Run events one by one until a condition holds."""
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
