"""Decide how many guesses each row of a step gets in speculative decoding, from the success of its
earlier ones.

Open it when guesses cost more than they save. drafts.py makes the guesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from .scheduler import blocks_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.block_ledger import BlockLedger
    from triolet.config import SpeculationConfig
    from triolet.ids import AttemptKey
    from worker.counters import Counters

    from .attempt import DecodeAttempt


TRUST: Final = 0.125
"""Weight of one row in the average: a few failures in a row are chance, ten are not."""
FIRST_ACCEPTANCE: Final = 0.5
"""Start value: seven failures end guessing."""
FIRST_LENGTH: Final = 2
"""Guesses of a new sequence: most are not copies."""


class GuessPace:
    """Doubles the number of guesses while all are right, cuts it to the number that was right, and
    pauses when too few are.

    Args:
      config: bounds.

    Attributes:
      acceptance: moving average of the share of right guesses.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self.acceptance = FIRST_ACCEPTANCE
        self._config = config
        self._length = min(FIRST_LENGTH, config.max_guesses)
        self._pause_rows = config.pause_rows
        self._resting_rows = 0

    @property
    def length(self) -> int:
        """Most guesses of the next row; 0 during a pause."""
        return 0 if self._resting_rows else self._length

    def went_without(self) -> None:
        """Record a row without guesses."""
        self._resting_rows = max(0, self._resting_rows - 1)

    def went(self, proposed: int, accepted: int) -> None:
        """Record a row with guesses.

        Args:
          proposed: number of guesses, at least one.
          accepted: number of right ones.
        """
        self.acceptance += TRUST * (accepted / proposed - self.acceptance)
        if accepted == proposed:
            self._length = min(self._config.max_guesses, 2 * self._length)
            if self.acceptance >= self._config.min_acceptance:
                self._pause_rows = self._config.pause_rows
        else:
            self._length = max(1, accepted)
        if self.acceptance < self._config.min_acceptance:
            self._rest()

    def _rest(self) -> None:
        self._resting_rows = self._pause_rows
        self._pause_rows = min(self._config.max_pause_rows, 2 * self._pause_rows)
        # After a pause one guess decides: if right, continue, otherwise pause again.
        self.acceptance = self._config.min_acceptance
        self._length = 1


class GuessSource(Protocol):
    """A source of guesses."""

    @property
    def ledger(self) -> BlockLedger | None:
        """The leases of the source's own pool; None if it has none."""
        ...

    def guess(self, attempt: DecodeAttempt, most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow an attempt's tokens."""
        ...

    def forget(self, key: AttemptKey) -> None:
        """Forget an ended attempt."""
        ...


class GuessRoom(NamedTuple):
    """Room for guesses in a step.

    Attributes:
      spare_blocks: blocks that no attempt will need soon.
      block_size: tokens per block.
      max_model_len: longest sequence.
    """

    spare_blocks: int
    block_size: int
    max_model_len: int


class GuessTurn(NamedTuple):
    """One attempt's part of a step.

    Attributes:
      attempt: the attempt.
      guesses: tokens that may follow its row's; each has a row.
      num_new_blocks: blocks to lease for them.
      num_more: tokens of a replay after its row's; each has a row.
    """

    attempt: DecodeAttempt
    guesses: tuple[int, ...] = ()
    num_new_blocks: int = 0
    num_more: int = 0

    @property
    def num_rows(self) -> int:
        """Number of this attempt's rows in the step."""
        return 1 + len(self.guesses) + self.num_more

    def holds(self, index: int, token_id: int) -> bool:
        """Return whether the guess after a row, by its index, equals the token that this row chose;
        there is none after the last row."""
        return self.guesses[index : index + 1] == (token_id,)


class Speculation:
    """Gives rows their guesses, and learns for each sequence whether they pay off.

    Args:
      source: source of guesses; None for no guesses.
      config: bounds.
      counters: counters of guesses.
    """

    def __init__(
        self, source: GuessSource | None, config: SpeculationConfig, counters: Counters
    ) -> None:
        self._source = source
        self._config = config
        self._counters = counters
        self._paces: dict[AttemptKey, GuessPace] = {}

    @property
    def ledger(self) -> BlockLedger | None:
        """The leases of the source's own pool, if it has one."""
        return None if self._source is None else self._source.ledger

    def plan(self, rows: Sequence[DecodeAttempt], room: GuessRoom) -> list[GuessTurn]:
        """Give rows their guesses, in the given order, as far as the step has room; replays get
        more of their known tokens, which are computed in the same way."""
        left, share = self._shares(len(rows))
        turns = []
        for attempt in rows:
            turn = GuessTurn(attempt)
            if left > 0:
                turn = self._turn(attempt, min(left, share), room)
                left -= turn.num_rows - 1
                room = room._replace(spare_blocks=room.spare_blocks - turn.num_new_blocks)
            turns.append(turn)
        return turns

    def wanted(
        self, rows: Sequence[DecodeAttempt], max_model_len: int
    ) -> list[tuple[DecodeAttempt, int]]:
        """Return which rows of a step could use guesses, and how many."""
        left, share = self._shares(len(rows))
        most = min(left, share)
        return [
            (attempt, count)
            for attempt in rows
            if attempt.samples_next and (count := min(most, self._most(attempt, max_model_len))) > 0
        ]

    def went(self, turn: GuessTurn, num_tokens: int) -> None:
        """Record how many tokens a turn has produced: one without guesses, and one more for each
        right guess."""
        if self._source is None:
            return
        pace = self._pace(turn.attempt)
        if not turn.guesses:
            pace.went_without()
            return
        accepted = num_tokens - 1
        pace.went(len(turn.guesses), accepted)
        self._counters.speculative_rows += 1
        self._counters.speculative_proposed += len(turn.guesses)
        self._counters.speculative_accepted += accepted

    def forget(self, key: AttemptKey) -> None:
        """Forget an ended attempt."""
        self._paces.pop(key, None)
        if self._source is not None:
            self._source.forget(key)

    def _shares(self, num_rows: int) -> tuple[int, int]:
        """Return how many more rows a step has room for, and how many of them for one attempt."""
        left = max(0, self._config.max_step_tokens - num_rows)
        return left, max(1, left // max(1, num_rows))

    def _most(self, attempt: DecodeAttempt, max_model_len: int) -> int:
        """Return how many guesses an attempt could use before it may end or must wait."""
        position = len(attempt.output_ids)
        return min(
            self._pace(attempt).length,
            attempt.window.allowed - position - 1,
            attempt.sampling.max_tokens - position - 1,
            max_model_len - attempt.num_tokens - 1,
        )

    def _turn(self, attempt: DecodeAttempt, most: int, room: GuessRoom) -> GuessTurn:
        # The row's own token and all after it are stored.
        held = len(attempt.block_table) * room.block_size - attempt.num_computed_tokens - 1
        if not attempt.samples_next:
            return GuessTurn(attempt, num_more=min(most, held, attempt.num_to_replay - 1))
        if self._source is None:
            return GuessTurn(attempt)
        most = min(most, self._most(attempt, room.max_model_len))
        most = min(most, held + room.spare_blocks * room.block_size)
        if most < 1:
            return GuessTurn(attempt)
        guesses = tuple(self._source.guess(attempt, most))
        assert len(guesses) <= most, "more guesses than were asked for"
        num_new_blocks = blocks_for(max(0, len(guesses) - held), room.block_size)
        return GuessTurn(attempt, guesses, num_new_blocks)

    def _pace(self, attempt: DecodeAttempt) -> GuessPace:
        pace = self._paces.get(attempt.key)
        if pace is None:
            pace = self._paces[attempt.key] = GuessPace(self._config)
        return pace
