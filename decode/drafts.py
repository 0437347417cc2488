"""Two sources of guesses for speculative decoding: lookup in a sequence's own tokens, and a draft
model. speculation.py decides how many guesses are worthwhile.

Lookup guesses the tokens that followed the last ones where they occurred before. Source: prompt
lookup decoding (Saxena 2023), with overlap as in LZ77, so that a repetition continues itself.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from engine.batch import FollowedBy, SampleSpec, StepRow

from .scheduler import blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.batch import Sampled
    from engine.block_ledger import BlockLedger
    from triolet.config import SpeculationConfig
    from triolet.ids import AttemptKey
    from worker.engine_port import EnginePort

    from .attempt import DecodeAttempt


WORD_BYTES = array("I").itemsize


class History:
    """The tokens of one sequence as packed words that C code can search.

    Args:
      token_ids: tokens so far.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._words = array("I", token_ids)

    def __len__(self) -> int:
        return len(self._words)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add new tokens."""
        self._words.extend(token_ids)

    def guess(self, most: int, config: SpeculationConfig) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow; empty if there is no earlier occurrence.

        Of all places where the last `min_ngram` tokens occur, the one with the longest common past
        wins, and of equals the latest.
        """
        words = self._words[-config.max_lookback_tokens :]
        if most < 1 or len(words) <= config.min_ngram:
            return ()
        after = _best_place(words, config)
        if after is None:
            return ()
        guesses = list(words[after : after + most])
        while len(guesses) < most:
            # The place reaches up to the end: it is followed by the guesses themselves.
            guesses += guesses[: most - len(guesses)]
        return tuple(guesses)


class Lookup:
    """Guesses by lookup for many sequences; see speculation.GuessSource.

    Args:
      config: bounds.
    """

    ledger = None

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._histories: dict[AttemptKey, History] = {}

    def guess(self, attempt: DecodeAttempt, most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow an attempt's tokens."""
        history = self._histories.get(attempt.key)
        if history is None:
            history = self._histories[attempt.key] = History(attempt.prompt_ids)
        history.append(attempt.output_ids[len(history) - len(attempt.prompt_ids) :])
        return history.guess(most, self._config)

    def forget(self, key: AttemptKey) -> None:
        """Forget an ended attempt."""
        self._histories.pop(key, None)


def _best_place(words: array[int], config: SpeculationConfig) -> int | None:
    """Return the index after the best earlier occurrence of the last tokens."""
    packed = words.tobytes()
    # If the shortest pattern does not occur, as in most text, the search ends here.
    after = _find(packed, config.min_ngram, len(packed) - WORD_BYTES)
    if after is None:
        return None
    for length in range(min(config.max_ngram, len(words) - 1), config.min_ngram, -1):
        better = _find(packed, length, after * WORD_BYTES)
        if better is not None:
            return better
    return after


def _find(packed: bytes, length: int, end: int) -> int | None:
    """Return the index after the latest occurrence of the last tokens before byte `end`."""
    pattern = packed[-length * WORD_BYTES :]
    while (at := packed.rfind(pattern, 0, end)) >= 0:
        if at % WORD_BYTES == 0:
            return at // WORD_BYTES + length
        # The match begins within a token, because zero bytes look alike. Search further to the
        # left.
        end = at + len(pattern) - 1
    return None


class DraftRow(NamedTuple):
    """The draft model's work for one sequence before a step.

    Attributes:
      token_ids: token ids of the sequence that are not computed yet.
      start: position of the first one.
      block_table: block table in the draft pool, with room for the guesses too.
      sample: how to choose the first guess; None if the sequence has not caught up yet.
      num_guesses: guesses to make, one after the other.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None
    num_guesses: int


def compute_drafts(
    step: Callable[[Sequence[StepRow]], list[Sampled | None]], rows: Sequence[DraftRow]
) -> list[tuple[int, ...]]:
    """Catch up with all sequences together, then make guesses. Runs on the device thread.

    Args:
      step: computes a step of the draft model.
      rows: one or more rows.

    Returns:
      The guesses of each row.
    """
    first = step(
        [
            StepRow(
                row.token_ids,
                row.start,
                row.block_table,
                row.sample,
                is_decode=len(row.token_ids) == 1,
            )
            for row in rows
        ]
    )
    guesses = [[] if sampled is None else [sampled.token_id] for sampled in first]
    for done in range(1, max(row.num_guesses for row in rows)):
        going_on = [i for i, row in enumerate(rows) if row.num_guesses > done]
        results = step([_next_row(rows[i], guesses[i]) for i in going_on])
        for i, sampled in zip(going_on, results, strict=True):
            assert sampled is not None, "a row that samples has a result"
            guesses[i].append(sampled.token_id)
    return [tuple(own) for own in guesses]


def _next_row(row: DraftRow, guesses: Sequence[int]) -> StepRow:
    assert row.sample is not None
    sample = replace(
        row.sample,
        position=row.sample.position + len(guesses),
        output_ids=FollowedBy(row.sample.output_ids, tuple(guesses)),
    )
    start = row.start + len(row.token_ids) + len(guesses) - 1
    return StepRow((guesses[-1],), start, row.block_table, sample, is_decode=True)


@dataclass(slots=True)
class _Draft:
    """The draft model's state of one sequence.

    Attributes:
      block_table: leased from the draft pool.
      num_computed_tokens: leading tokens of the sequence with KV in the draft pool.
      guesses: tokens that may follow the first `guessed_at` ones.
      guessed_at: number of tokens before the guesses.
    """

    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    guesses: tuple[int, ...] = ()
    guessed_at: int = 0


class Drafts:
    """Guesses by a draft model for many sequences; see speculation.GuessSource.

    Args:
      engine: the draft model with its pool.
      config: bounds.
      vocab_size: vocabulary size of the large model; ids beyond it are never guessed.
    """

    def __init__(self, engine: EnginePort, config: SpeculationConfig, vocab_size: int) -> None:
        self._engine = engine
        self._config = config
        self._vocab_size = vocab_size
        self._drafts: dict[AttemptKey, _Draft] = {}
        self._rows: list[tuple[DecodeAttempt, int]] = []
        self._leaving: list[AttemptKey] = []
        self._has_failed = False

    @property
    def ledger(self) -> BlockLedger:
        """The leases of the draft pool."""
        return self._engine.ledger

    def plan(self, wanted: Iterable[tuple[DecodeAttempt, int]]) -> list[DraftRow]:
        """Begin a round of guesses; an empty list means that there are none to make.

        Args:
          wanted: sequences that will have a row, and how many guesses each could use.
        """
        assert not self._rows, "one round at a time"
        rows: list[DraftRow] = []
        budget = 0 if self._has_failed else self._config.draft_chunk_tokens
        for attempt, most in wanted:
            draft = self._settled(attempt)
            if budget and draft.guessed_at < attempt.num_tokens:
                row = self._row(attempt, draft, most, budget)
                if row is not None:
                    budget -= len(row.token_ids)
                    self._rows.append((attempt, len(row.token_ids)))
                    rows.append(row)
        return rows

    def compute(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """Compute the rows of `plan`; the only method that runs on the device thread."""
        return compute_drafts(self._engine.step, rows)

    def complete(self, guesses: Sequence[tuple[int, ...]]) -> None:
        """Process the results of the round that `plan` began."""
        for (attempt, num_tokens), own in zip(self._rows, guesses, strict=True):
            draft = self._drafts[attempt.key]
            draft.num_computed_tokens += num_tokens
            if own:
                draft.guesses, draft.guessed_at = own, attempt.num_tokens
        self._end_round()

    def fail(self) -> None:
        """Process the failure of the round that `plan` began: no more guesses are made."""
        self._has_failed = True
        self._end_round()

    def guess(self, attempt: DecodeAttempt, most: int) -> Sequence[int]:
        """Return the guesses that follow an attempt's tokens; empty if it had no turn."""
        draft = self._drafts.get(attempt.key)
        if draft is None or draft.guessed_at != attempt.num_tokens:
            return ()
        guesses = draft.guesses[:most]
        unknown = (i for i, token_id in enumerate(guesses) if token_id >= self._vocab_size)
        return guesses[: next(unknown, most)]

    def forget(self, key: AttemptKey) -> None:
        """Free the blocks of an ended attempt, as soon as no step writes them."""
        if any(attempt.key == key for attempt, _ in self._rows):
            self._leaving.append(key)
        elif self._drafts.pop(key, None) is not None:
            self.ledger.release(key)

    def _end_round(self) -> None:
        self._rows = []
        leaving, self._leaving = self._leaving, []
        for key in leaving:
            self.forget(key)

    def _settled(self, attempt: DecodeAttempt) -> _Draft:
        """Return a sequence's draft; right guesses with KV count as computed."""
        draft = self._drafts.setdefault(attempt.key, _Draft())
        if draft.guesses and draft.guessed_at < attempt.num_tokens:
            decided = attempt.output_ids[draft.guessed_at - len(attempt.prompt_ids) :]
            # The last guess was made but not computed. The last token may be computed again,
            # because what follows it is no longer known.
            for token_id, guess in zip(decided[:-1], draft.guesses[:-1], strict=False):
                if token_id != guess:
                    break
                draft.num_computed_tokens += 1
            draft.guesses = ()
        return draft

    def _row(
        self, attempt: DecodeAttempt, draft: _Draft, most: int, budget: int
    ) -> DraftRow | None:
        start = draft.num_computed_tokens
        count = min(budget, attempt.num_tokens - start)
        is_caught_up = start + count == attempt.num_tokens
        num_guesses = most if is_caught_up else 0
        # The last guess needs no block.
        end = start + count + max(0, num_guesses - 1)
        if end > self._engine.max_model_len or not self._lease(attempt.key, draft, end):
            return None
        prompt_ids = attempt.prompt_ids
        behind = max(0, start - len(prompt_ids))
        token_ids = [*prompt_ids[start:], *attempt.output_ids[behind:]][:count]
        if max(token_ids) >= self._engine.vocab_size:
            return None
        sample = SampleSpec(
            params=replace(attempt.sampling, logprobs=None),
            position=len(attempt.output_ids),
            prompt_ids=prompt_ids,
            output_ids=attempt.output_ids,
            eos_token_ids=attempt.eos_token_ids,
        )
        return DraftRow(
            token_ids, start, draft.block_table, sample if is_caught_up else None, num_guesses
        )

    def _lease(self, key: AttemptKey, draft: _Draft, num_tokens: int) -> bool:
        """Lease blocks for this many tokens; return whether that succeeded."""
        missing = blocks_for(num_tokens, self._engine.block_size) - len(draft.block_table)
        if missing > self.ledger.available_blocks:
            return False
        if not self.ledger.has_lease(key):
            self.ledger.lease(key, 0)
        if missing > 0:
            draft.block_table += self.ledger.extend(key, missing)
        return True
