"""Tests of how many guessed tokens a decode step takes: they fit into the step, the stream's
window, the rest of the answer and the spare KV blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from decode.speculation import GuessRoom, GuessTurn, Speculation
from tests.decode.test_scheduler import BLOCK_SIZE, attempt, full
from transport.window import TokenWindow
from triolet.config import SpeculationConfig
from triolet.sampling import SamplingParams
from worker.counters import Counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decode.attempt import DecodeAttempt
    from triolet.ids import AttemptKey

ROOM = GuessRoom(spare_blocks=100, block_size=BLOCK_SIZE, max_model_len=1000)


class Counting:
    """A source with unlimited guesses 7, 8, 9, …"""

    ledger = None

    def __init__(self) -> None:
        self.forgotten: list[AttemptKey] = []

    def guess(self, attempt: DecodeAttempt, most: int) -> Sequence[int]:
        return range(7, 7 + most)

    def forget(self, key: AttemptKey) -> None:
        self.forgotten.append(key)


def speculation(max_step_tokens: int = 64, max_guesses: int = 8) -> Speculation:
    config = SpeculationConfig(max_guesses=max_guesses, max_step_tokens=max_step_tokens)
    return Speculation(Counting(), config, Counters())


def warm(subject: Speculation, *attempts: DecodeAttempt) -> None:
    """Let the guesses of some attempts be right until they get the maximum."""
    for sequence in attempts:
        for _ in range(4):
            subject.went(GuessTurn(sequence, (7, 8)), 3)


def lengths(turns: Sequence[GuessTurn]) -> list[int]:
    return [len(turn.guesses) for turn in turns]


def test_without_a_source_nothing_is_guessed_and_nothing_kept() -> None:
    subject = Speculation(None, SpeculationConfig(), Counters())
    rows = [attempt(1), attempt(2)]
    turns = subject.plan(rows, ROOM)
    assert turns == [GuessTurn(rows[0]), GuessTurn(rows[1])]
    subject.went(turns[0], 1)
    subject.forget(rows[0].key)
    assert not subject._paces


def test_rows_and_guesses_together_fit_into_the_step() -> None:
    rows = [attempt(order, num_blocks=9) for order in range(5)]
    for most in range(2, 30):
        subject = speculation(max_step_tokens=most)
        warm(subject, *rows)
        counts = lengths(subject.plan(rows, ROOM))
        assert sum(counts) == (min(most - 5, 5 * ((most - 5) // 5 or 1)) if most > 5 else 0)
        assert max(counts) - min(counts) <= 1, "one row has all of them"


@pytest.mark.parametrize("allowed", range(1, 8))
def test_nothing_is_guessed_behind_the_window(allowed: int) -> None:
    subject, row = speculation(), attempt(1, num_blocks=9)
    warm(subject, row)
    row.window = TokenWindow(allowed)
    [turn] = subject.plan([row], ROOM)
    # It has one token already, and its own row brings another.
    assert len(turn.guesses) == max(0, allowed - 2)


@pytest.mark.parametrize("max_tokens", range(2, 8))
def test_nothing_is_guessed_behind_the_end(max_tokens: int) -> None:
    subject, row = speculation(), attempt(1, num_blocks=9)
    warm(subject, row)
    row.sampling = SamplingParams(max_tokens=max_tokens)
    [turn] = subject.plan([row], ROOM)
    assert len(turn.guesses) == max_tokens - 2
    row.sampling = SamplingParams(max_tokens=100)
    [turn] = subject.plan([row], ROOM._replace(max_model_len=row.num_tokens + max_tokens - 1))
    assert len(turn.guesses) == max_tokens - 2


@pytest.mark.parametrize("spare_blocks", range(4))
@pytest.mark.parametrize("num_tokens", range(6, 10))
def test_guesses_take_no_block_that_others_may_need(num_tokens: int, spare_blocks: int) -> None:
    subject = speculation()
    # It holds blocks for its own row.
    row = attempt(1, num_tokens=num_tokens, num_blocks=-(-num_tokens // BLOCK_SIZE))
    row.sampling = SamplingParams(max_tokens=100)
    warm(subject, row)
    [turn] = subject.plan([row], ROOM._replace(spare_blocks=spare_blocks))
    held = len(row.block_table) * BLOCK_SIZE - num_tokens
    assert len(turn.guesses) == min(8, held + spare_blocks * BLOCK_SIZE)
    assert turn.num_new_blocks <= spare_blocks
    needed = num_tokens + len(turn.guesses)
    assert (len(row.block_table) + turn.num_new_blocks) * BLOCK_SIZE >= needed


def test_blocks_that_one_row_takes_are_not_given_to_the_next() -> None:
    subject, rows = speculation(), [full(order) for order in range(3)]
    for row in rows:
        row.block_table.append(9)  # its own row's, which the plan has leased
        row.sampling = SamplingParams(max_tokens=100)
    warm(subject, *rows)
    turns = subject.plan(rows, ROOM._replace(spare_blocks=1))
    assert [turn.num_new_blocks for turn in turns] == [1, 0, 0]
    assert lengths(turns) == [7, 3, 3]


@pytest.mark.parametrize("has_source", [True, False])
def test_a_replay_carries_no_guesses_but_known_tokens_up_to_the_last(has_source: bool) -> None:
    subject = speculation(max_step_tokens=9)
    if not has_source:
        subject = Speculation(None, SpeculationConfig(max_step_tokens=9), Counters())
    row = attempt(1, num_blocks=9)
    assert row.num_to_replay == 0
    counts = []
    row.output_ids += [1] * 20
    while not row.samples_next:
        [turn] = subject.plan([row], ROOM)
        assert (turn.guesses, turn.num_new_blocks) == ((), 0)
        step = row.rows(turn.guesses, turn.num_more)
        assert len(step) == turn.num_rows
        assert all(one.sample is None for one in step)
        assert [one.start for one in step] == [
            row.num_computed_tokens + i for i in range(len(step))
        ]
        counts.append(turn.num_rows)
        row.num_computed_tokens += turn.num_rows
    assert counts == [9, 9, 2]


def test_a_replay_stays_within_its_blocks() -> None:
    row = attempt(1, num_tokens=6, num_blocks=2)
    row.output_ids += [1] * 9
    [turn] = speculation().plan([row], ROOM)
    assert turn.num_rows == 3


def test_replays_share_the_room_of_a_step() -> None:
    rows = [attempt(order, num_blocks=20) for order in range(3)]
    for row in rows:
        row.output_ids += [1] * 50
    turns = speculation(max_step_tokens=16).plan(rows, ROOM)
    assert [turn.num_rows for turn in turns] == [5, 5, 5]


def test_what_became_of_guesses_is_counted_and_an_end_forgets_it() -> None:
    source, counters = Counting(), Counters()
    subject = Speculation(source, SpeculationConfig(), counters)
    row = attempt(1)
    subject.went(GuessTurn(row, (7, 8, 9)), 2)
    subject.went(GuessTurn(row, (7, 8)), 3)
    subject.went(GuessTurn(row), 1)
    assert (
        counters.speculative_rows,
        counters.speculative_proposed,
        counters.speculative_accepted,
    ) == (2, 5, 3)
    subject.forget(row.key)
    assert source.forgotten == [row.key]
    assert not subject._paces
