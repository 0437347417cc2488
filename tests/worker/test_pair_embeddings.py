"""Tests of embedding inputs on a prefill core: vectors are right, limits hold, and all blocks are
freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from simulation.engine import hidden, kv_of
from transport.frames import Embed, Embedded, End, Ended, EndReason
from transport.tokens import pack_tokens
from triolet.ids import AttemptKey, Role
from triolet.pooling import Pooling

from .pair import SERVER, Pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transport.frames import AnyFrame


class Inputs(Pair):
    """A pair with a server that also requests vectors.

    Attributes:
      vectors: received vectors, by attempt.
      ends: ENDED frames, by attempt.
    """

    def __init__(self, num_blocks: int = 24) -> None:
        self.vectors: dict[AttemptKey, bytes] = {}
        self.ends: dict[AttemptKey, Ended] = {}
        super().__init__(num_blocks)

    def embed(
        self, ids: Sequence[int], pooling: Pooling = Pooling.LAST, remaining_s: float = 60.0
    ) -> AttemptKey:
        """Request a vector that is not normalized."""
        key = self.new_key()
        frame = Embed(*key, pack_tokens(ids), pooling, 0, False, 0, remaining_s)
        self.to_worker(Role.PREFILL, frame)
        return key

    def _hear(self, role: Role, frame: AnyFrame) -> None:
        if isinstance(frame, Embedded):
            self.vectors[frame.key] = frame.vector
        elif isinstance(frame, Ended) and frame.key not in self.heard:
            self.ends[frame.key] = frame
        else:
            super()._hear(role, frame)

    def wait(self) -> None:
        """Let inputs wait long enough for their batch."""
        self.now += 0.01

    def check_vector(self, key: AttemptKey, ids: Sequence[int]) -> None:
        """Assert that an attempt returned the last token's hidden state, and ended well."""
        expected = np.array(hidden(kv_of(ids)), dtype="<f4").tobytes()
        assert self.vectors[key] == expected
        assert self.ends[key].reason is EndReason.EMBEDDED


def test_vectors_are_right_and_leave_nothing() -> None:
    pair = Inputs()
    inputs = [[1, 2, 3], list(range(10, 31)), [5]]
    keys = [pair.embed(ids) for ids in inputs]
    pair.wait()
    pair.run()
    for key, ids in zip(keys, inputs, strict=True):
        pair.check_vector(key, ids)
    mean = pair.embed([4, 5, 6, 7, 8, 9, 10, 11, 12, 13], Pooling.MEAN)
    pair.wait()
    pair.run()
    ids = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    states = [hidden(kv_of(ids[: n + 1])) for n in range(len(ids))]
    assert pair.vectors[mean] == np.mean(states, axis=0).astype("<f4").tobytes()
    pair.check_empty()


def test_an_idle_worker_waits_for_company_and_says_until_when() -> None:
    pair = Inputs()
    first = pair.embed([1, 2])
    stepper = pair.prefill.stepper
    assert stepper.plan(pair.now) == []
    assert stepper.due_after(pair.now) == pair.now + 0.003
    second = pair.embed([3, 4])
    pair.wait()
    assert stepper.due_after(pair.now) is None
    assert len(stepper.plan(pair.now)) == 2
    pair.prefill.stepper.fail("not computed", pair.now)
    pair.settle()
    assert [pair.ends[key].reason for key in (first, second)] == [EndReason.ERROR] * 2
    assert {pair.ends[key].failed_rows for key in (first, second)} == {2}
    pair.check_empty()


def test_chats_come_first_and_both_end() -> None:
    pair = Inputs(num_blocks=64)
    keys = [pair.embed([9, n, 3, 4, 5, 6, 7]) for n in range(6)]
    pair.wait()
    chat = pair.ask(range(100, 121))
    node = pair.nodes[Role.PREFILL]
    node.begin_step(pair.now)
    assert [len(row.token_ids) for row in node.rows] == [7, 1]  # type: ignore[attr-defined]
    pair.run()
    pair.check()
    assert len(pair.heard[chat].tokens) == 6
    for n, key in enumerate(keys):
        pair.check_vector(key, [9, n, 3, 4, 5, 6, 7])
    pair.check_empty()


def test_an_end_frees_at_once_or_when_the_step_returns() -> None:
    pair = Inputs()
    early, late = pair.embed(range(50, 70)), pair.embed([1, 2, 3])
    pair.to_worker(Role.PREFILL, End(*early, EndReason.CANCEL))
    assert pair.ends[early].freed_blocks == 0
    pair.wait()
    node = pair.nodes[Role.PREFILL]
    node.begin_step(pair.now)
    pair.to_worker(Role.PREFILL, End(*late, EndReason.CANCEL))
    pair.check()
    assert late not in pair.ends
    node.finish_step(pair.now)
    pair.settle()
    assert pair.ends[late].freed_blocks == 1
    assert not pair.vectors
    pair.check_empty()


def test_what_nobody_names_any_more_runs_out() -> None:
    pair = Inputs()
    named = pair.embed([1, 2, 3])
    pair.live.clear()
    pair.pass_time(3.0)
    assert pair.ends[named].reason is EndReason.LEASE_EXPIRED
    pair.check_empty()


def test_a_deadline_ends_it() -> None:
    pair = Inputs()
    key = pair.embed([1, 2, 3], remaining_s=0.1)
    pair.pass_time(0.5)
    assert pair.ends[key].reason is EndReason.DEADLINE
    pair.check_empty()


def test_what_cannot_be_computed_is_turned_away() -> None:
    pair = Inputs()
    for ids in ([], [5000], list(range(300))):
        key = pair.embed(ids)
        assert pair.ends[key].reason is EndReason.ERROR
    pair.prefill.server_sessions.drain(pair.now, 5.0)
    key = pair.embed([1])
    assert pair.ends[key].reason is EndReason.DRAIN
    pair.check_empty()


def test_an_input_waits_for_blocks_that_a_chat_holds() -> None:
    pair = Inputs(num_blocks=6)
    chat = pair.ask(range(100, 121), max_tokens=3)
    node = pair.nodes[Role.PREFILL]
    node.begin_step(pair.now)
    key = pair.embed(range(5))
    pair.wait()
    pair.run()
    assert len(pair.heard[chat].tokens) == 3
    pair.check_vector(key, range(5))
    pair.check_empty()


def test_the_server_is_another_life_and_gets_nothing_of_the_old() -> None:
    pair = Inputs()
    key = pair.embed([1, 2, 3])
    pair.prefill.server_sessions.on_server_gone(SERVER.identity(), pair.now)
    pair.settle()
    pair.wait()
    pair.run()
    assert key not in pair.vectors
    pair.check_empty()
