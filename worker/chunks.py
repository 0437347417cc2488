"""Choose which chunks of which prompts the next step computes, on prefill and on decode.

Pure: prompts and free blocks in, chunks out. Order: by class; within a class tenants below their
share first; then shortest remaining first, so that a short prompt is done within a step or two. To
prevent starvation, a share of every step goes to the oldest prompt of the first band, and a small
share to the oldest of all. Age is order of arrival, not time: this holds at any device speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from engine.batch import SampleSpec, StepRow
from triolet.config import MAX_NUM_SEQS
from triolet.service_class import band_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.batch import Constraint
    from triolet.sampling import SamplingParams

OLDEST_SHARE: Final = 4
"""The oldest prompt gets one part in this many of each step's tokens: a long prompt takes at most
this many times as long as alone, and short ones lose a quarter of their speed beside it."""

LOWER_SHARE: Final = 16
"""The oldest prompt gets one part in this many while more urgent classes have work: it makes
progress, and they hardly notice."""

MAX_OVERTAKES: Final = 16
"""How many younger prompts may take blocks while the oldest waits for enough of them. After that
none may, so that the pool drains until the oldest fits."""

MAX_URGENT_OVERTAKES: Final = 256
"""This limit for younger prompts of more urgent classes than the oldest's."""


class ComputedPrompt(Protocol):
    """What the scheduler needs to know about an attempt to compute its prompt here."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Number of leading tokens with KV in the pool."""
        ...

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens still to compute."""
        ...

    @property
    def priority(self) -> int:
        """Lower is more important."""
        ...

    @property
    def order(self) -> int:
        """Increases with each arrival."""
        ...

    @property
    def num_needed_blocks(self) -> int:
        """Available blocks that its start would take at present."""
        ...

    @property
    def is_started(self) -> bool:
        """Return whether it has its blocks."""
        ...

    @property
    def block_table(self) -> Sequence[int]:
        """Its blocks, once it has them."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the first token."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end tokens."""
        ...

    @property
    def constraint(self) -> Constraint | None:
        """Constraint on its completion."""
        ...

    @property
    def adapter(self) -> bytes:
        """Digest of its adapter; empty for the base model."""
        ...


P = TypeVar("P", bound=ComputedPrompt)


class PromptChunk(NamedTuple, Generic[P]):
    """One row of a step.

    Attributes:
      attempt: attempt that the prompt belongs to.
      num_tokens: number of its next tokens to compute.
    """

    attempt: P
    num_tokens: int


def chunk_row(chunk: PromptChunk[P]) -> StepRow:
    """Return the row of a chunk; a prompt's last chunk samples the first token."""
    attempt, num_tokens = chunk
    start = attempt.num_computed_tokens
    end = start + num_tokens
    sample = None
    if end == len(attempt.prompt_ids):
        sample = SampleSpec(
            params=attempt.sampling,
            position=0,
            prompt_ids=attempt.prompt_ids,
            eos_token_ids=attempt.eos_token_ids,
            constraint=attempt.constraint,
        )
    return StepRow(
        token_ids=attempt.prompt_ids[start:end],
        start=start,
        block_table=attempt.block_table,
        sample=sample,
        adapter=attempt.adapter,
    )


class ChunkScheduler(Generic[P]):
    """Chooses the chunks of each step."""

    def __init__(self) -> None:
        self._num_overtakes = 0

    def plan(
        self,
        attempts: Iterable[P],
        max_tokens: int,
        free_blocks: int,
        max_rows: int = MAX_NUM_SEQS,
    ) -> list[PromptChunk[P]]:
        """Choose the next step.

        Args:
          attempts: attempts with prompts that are not fully computed.
          max_tokens: token budget of the step.
          free_blocks: blocks that can be leased now; an attempt that has not started needs all of
            its blocks at once (`num_needed_blocks`), so that two half-computed prompts never wait
            for one another.
          max_rows: most chunks.

        Returns:
          At most one chunk per attempt, in total at most the budget.
        """
        waiting = sorted(attempts, key=_by_urgency)
        if not waiting:
            return []
        oldest = min(waiting, key=_by_age)
        most_urgent = band_of(waiting[0].priority)
        first = min((a for a in waiting if band_of(a.priority) == most_urgent), key=_by_age)
        admitted = self._admit(waiting, oldest, free_blocks, is_urgent=oldest is first)
        if len(admitted) > max_rows:
            # A single row is not shared: it goes to the most urgent class.
            is_kept = max_rows > 1 or oldest is first
            keeps_oldest = is_kept and oldest in admitted[max_rows - 1 :]
            admitted = admitted[: max_rows - keeps_oldest] + [oldest] * keeps_oldest
        shares = dict.fromkeys(admitted, 0)
        budget = max_tokens
        for attempt, part in {oldest: LOWER_SHARE, first: OLDEST_SHARE}.items():
            if attempt in shares:
                share = min(max(1, max_tokens // part), budget)
                shares[attempt] = min(attempt.num_remaining_tokens, share)
                budget -= shares[attempt]
        for attempt in admitted:
            more = min(attempt.num_remaining_tokens - shares[attempt], budget)
            shares[attempt] += more
            budget -= more
        chosen = [PromptChunk(attempt, tokens) for attempt, tokens in shares.items() if tokens]
        self._count_overtakes(chosen, oldest)
        return chosen

    def _admit(self, waiting: list[P], oldest: P, free_blocks: int, *, is_urgent: bool) -> list[P]:
        """Return the attempts that may have a row, most urgent first; their blocks fit together. An
        oldest prompt of the most urgent class gets its blocks before others."""
        is_oldest_stuck = not oldest.is_started and oldest.num_needed_blocks > free_blocks
        most_overtakes = MAX_OVERTAKES if is_urgent else MAX_URGENT_OVERTAKES
        is_closed = is_oldest_stuck and self._num_overtakes >= most_overtakes
        is_before = is_urgent and not (oldest.is_started or is_oldest_stuck)
        if is_before:
            free_blocks -= oldest.num_needed_blocks
        admitted = []
        for attempt in waiting:
            if attempt.is_started or (is_before and attempt is oldest):
                admitted.append(attempt)
            elif not is_closed and attempt.num_needed_blocks <= free_blocks:
                free_blocks -= attempt.num_needed_blocks
                admitted.append(attempt)
        return admitted

    def _count_overtakes(self, chosen: list[PromptChunk[P]], oldest: P) -> None:
        if oldest.is_started or any(chunk.attempt is oldest for chunk in chosen):
            self._num_overtakes = 0
        else:
            self._num_overtakes += sum(not chunk.attempt.is_started for chunk in chosen)


def _by_age(attempt: ComputedPrompt) -> int:
    return attempt.order


def _by_urgency(attempt: ComputedPrompt) -> tuple[int, int, int]:
    return (attempt.priority, attempt.num_remaining_tokens, attempt.order)
