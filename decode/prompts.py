"""Prompts that decode computes itself: which chunks ride in the next step, and how fast that goes.

Knows attempts whose leases say that their prompts are computed here; knows nothing of running rows
but their number, for which they leave room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transport.lease import LeaseEvent, LeaseState
from worker.chunks import Chunk, ChunkScheduler
from worker.rates import StepRates

if TYPE_CHECKING:
    from engine.pace import Pace
    from triolet.ids import AttemptKey
    from worker.roster import Roster

    from .attempt import Attempt

PROMPT_ROWS: Final = 4
"""One row in this many may be a prompt's: more would each have a few tokens only, and streams would
lose their turns to them."""


class Prompts:
    """The prompts of one decode worker.

    Args:
      roster: who holds a lease.
      pace: how much a step may hold.
      max_num_seqs: rows of a step.

    Attributes:
      rates: how fast steps have been.
    """

    def __init__(self, roster: Roster[Attempt], pace: Pace, max_num_seqs: int) -> None:
        self.rates = StepRates(pace)
        self._roster = roster
        self._most_rows = max(1, max_num_seqs // PROMPT_ROWS)
        self._scheduler: ChunkScheduler[Attempt] = ChunkScheduler()
        self._open: dict[AttemptKey, Attempt] = {}
        self._chunks: list[Chunk[Attempt]] = []
        self._began_at = 0.0

    def add(self, attempt: Attempt) -> None:
        """Take an attempt whose prompt is to be computed here."""
        self._open[attempt.key] = attempt

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return sum(attempt.num_remaining_tokens for attempt in self._waiting())

    @property
    def num_rows(self) -> int:
        """Rows of the next step that prompts may want."""
        return min(len(self._waiting()), self._most_rows)

    def plan(self, num_decode_rows: int, now: float) -> list[Chunk[Attempt]]:
        """Choose the chunks that ride beside so many rows of running streams."""
        budget = self.rates.chunk_tokens(num_decode_rows)
        self._chunks = self._scheduler.plan(self._waiting(), budget, 0, self._most_rows)
        self._began_at = now
        for chunk in self._chunks:
            lease = self._roster.leases.get(chunk.attempt.key)
            if lease is not None and lease.state is LeaseState.RESERVED:
                self._roster.leases.step(lease.key, LeaseEvent.START)
        return self._chunks

    def take(self, num_decode_rows: int, now: float, speedup: float) -> list[Chunk[Attempt]]:
        """Return the chunks of the step that has returned, having learned from it."""
        chunks, self._chunks = self._chunks, []
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self.rates.took(
            now - self._began_at,
            num_prompt_tokens=num_tokens,
            num_decode_rows=num_decode_rows,
            speedup=speedup,
        )
        return chunks

    def _waiting(self) -> list[Attempt]:
        """Return those that live and are not done, and forget the others."""
        if not self._open:
            return []  # the usual case: this is asked several times in each step
        alive = self._roster.attempts
        self._open = {
            key: attempt
            for key, attempt in self._open.items()
            if key in alive and attempt.num_remaining_tokens
        }
        return list(self._open.values())
