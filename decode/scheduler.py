"""Which rows the next decode step has, and who gives way when blocks run out.

Pure functions of the attempts and the number of free blocks. Continuous batching: an attempt joins
as soon as its KV is complete and leaves as soon as it ends. A paused one has no row and keeps its
blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .attempt import Attempt


class StepPlan(NamedTuple):
    """What to do before and in the next step.

    Attributes:
      preempted: give their blocks back first.
      growing: need one more block each; after the preemptions there are enough.
      rows: compute the next token of these.
    """

    preempted: list[Attempt]
    growing: list[Attempt]
    rows: list[Attempt]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_size)


def needs_block(attempt: Attempt, block_size: int) -> bool:
    """Return whether the KV of its next token falls behind its last block."""
    return attempt.num_computed_tokens >= len(attempt.block_table) * block_size


def choose_victim(attempts: Iterable[Attempt]) -> Attempt:
    """Return who gives way: the least important, among these the youngest, which has the least
    work to lose."""
    return max(attempts, key=lambda attempt: (attempt.priority, attempt.order))


def plan_step(
    holders: Iterable[Attempt],
    runnable: Iterable[Attempt],
    *,
    free_blocks: int,
    num_returned: Callable[[Sequence[Attempt]], int],
    block_size: int,
    max_num_seqs: int,
) -> StepPlan:
    """Choose rows, growth and preemptions for one step.

    Args:
      holders: all that hold blocks, in any state; none of them is inside a running step.
      runnable: those of them whose KV is complete and whose window is open.
      free_blocks: blocks that can be leased now.
      num_returned: how many more could be if some attempts ended; what they share with others is
        not among them.
      block_size: tokens per block.
      max_num_seqs: most rows.

    Returns:
      A plan whose growth fits into `free_blocks` plus what the preempted give back.
    """
    # The one that waited longest comes first, so that more runnable rows than the step can hold
    # take turns: paused rows do not count against credit and may all come back at once.
    rows = sorted(runnable, key=lambda a: (a.last_turn, a.priority, a.order))[:max_num_seqs]
    growing = [attempt for attempt in rows if needs_block(attempt, block_size)]
    candidates = list(holders) if len(growing) > free_blocks else []
    preempted: list[Attempt] = []
    while len(growing) > free_blocks + num_returned(preempted):
        victim = choose_victim(candidates)
        candidates.remove(victim)
        preempted.append(victim)
        rows = [attempt for attempt in rows if attempt is not victim]
        growing = [attempt for attempt in growing if attempt is not victim]
    return StepPlan(preempted, growing, rows)
