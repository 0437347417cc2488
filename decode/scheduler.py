"""Choose the rows of the next decode step, and the attempts to preempt when blocks run out.

Pure functions of the attempts and the number of free blocks. Continuous batching: an attempt joins
as soon as its KV is complete and leaves as soon as it ends. A paused one has no row and keeps its
blocks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from triolet.service_class import class_of, rank_without_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .attempt import DecodeAttempt


Load: TypeAlias = "tuple[float, int]"
"""A tenant's blocks relative to its weight, and the arrival of its youngest attempt."""


class StepPlan(NamedTuple):
    """Actions before and in the next step.

    Attributes:
      preempted: attempts to preempt; their blocks are freed first.
      growing: attempts that need one more block; after the preemptions there are enough.
      rows: attempts that get their next token.
    """

    preempted: list[DecodeAttempt]
    growing: list[DecodeAttempt]
    rows: list[DecodeAttempt]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_size)


def needs_block(attempt: DecodeAttempt, block_size: int) -> bool:
    """Return whether the KV of its next token needs a new block."""
    return attempt.num_computed_tokens >= len(attempt.block_table) * block_size


def choose_victim(
    attempts: Iterable[DecodeAttempt], loads: dict[bytes, Load] | None = None
) -> DecodeAttempt:
    """Return the attempt to preempt: in the lowest class, of the tenant that holds most relative to
    its weight, the one least important to its client, and of these the youngest, which loses the
    least work.

    Within its class, a tenant's only attempt gives way only to older ones. So the first attempt of
    each tenant makes progress, and if each has one, the oldest does: it is not preempted forever,
    whatever others need.

    Args:
      attempts: all that hold blocks.
      loads: loads of tenants already computed for the same step.
    """
    attempts, loads = tuple(attempts), {} if loads is None else loads
    lowest = max(class_of(attempt.priority) for attempt in attempts)
    rivals = [attempt for attempt in attempts if class_of(attempt.priority) is lowest]
    by_tenant: defaultdict[bytes, list[DecodeAttempt]] = defaultdict(list)
    for attempt in rivals:
        by_tenant[attempt.keeper.tenant].append(attempt)
    youngest = max(rivals, key=_by_age)
    choices = [own for own in by_tenant.values() if len(own) > 1 or youngest in own]
    chosen = choices[0]
    if len(choices) > 1:
        for own in choices:
            tenant = own[0].keeper.tenant
            if tenant not in loads:
                loads[tenant] = _load(own)
        chosen = max(choices, key=lambda own: loads[own[0].keeper.tenant])
    victim = max(chosen, key=lambda attempt: (rank_without_share(attempt.priority), attempt.order))
    loads.pop(victim.keeper.tenant, None)
    return victim


def _by_age(attempt: DecodeAttempt) -> int:
    return attempt.order


def _load(own: Sequence[DecodeAttempt]) -> Load:
    """Return a tenant's blocks relative to its weight (as sent last), and the arrival of its
    youngest attempt. Shared blocks count once."""
    youngest = max(own, key=_by_age)
    num_blocks = len(set().union(*(attempt.block_table for attempt in own)))
    return num_blocks / youngest.weight, youngest.order


def plan_step(
    holders: Iterable[DecodeAttempt],
    runnable: Iterable[DecodeAttempt],
    *,
    free_blocks: int,
    num_returned: Callable[[Sequence[DecodeAttempt]], int],
    block_size: int,
    max_num_seqs: int,
) -> StepPlan:
    """Choose rows, growth and preemptions for one step.

    Args:
      holders: all attempts with blocks, in any state; none is in a running step.
      runnable: those of them with complete KV and an open window.
      free_blocks: blocks that can be leased now.
      num_returned: returns how many blocks the end of some attempts would free, without shared
        ones.
      block_size: tokens per block.
      max_num_seqs: most rows.

    Returns:
      A plan that needs at most `free_blocks` plus the blocks of preempted attempts.
    """
    # The one that waited longest goes first, so that rows take turns if there are too many: paused
    # rows do not count against credit and may all resume at once.
    rows = sorted(runnable, key=lambda a: (a.last_turn, a.priority, a.order))[:max_num_seqs]
    growing = [attempt for attempt in rows if needs_block(attempt, block_size)]
    candidates = list(holders) if len(growing) > free_blocks else []
    preempted: list[DecodeAttempt] = []
    loads: dict[bytes, Load] = {}
    while len(growing) > free_blocks + num_returned(preempted):
        victim = choose_victim(candidates, loads)
        candidates.remove(victim)
        preempted.append(victim)
        rows = [attempt for attempt in rows if attempt is not victim]
        growing = [attempt for attempt in growing if attempt is not victim]
    return StepPlan(preempted, growing, rows)
