"""Which rows the next decode step has, and which attempts are preempted when blocks run out.

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
"""What a tenant holds for its weight, and when the youngest of it came."""


class StepPlan(NamedTuple):
    """What to do before and in the next step.

    Attributes:
      preempted: give their blocks back first.
      growing: need one more block each; after the preemptions there are enough.
      rows: compute the next token of these.
    """

    preempted: list[DecodeAttempt]
    growing: list[DecodeAttempt]
    rows: list[DecodeAttempt]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_size)


def needs_block(attempt: DecodeAttempt, block_size: int) -> bool:
    """Return whether the KV of its next token falls behind its last block."""
    return attempt.num_computed_tokens >= len(attempt.block_table) * block_size


def choose_victim(
    attempts: Iterable[DecodeAttempt], loads: dict[bytes, Load] | None = None
) -> DecodeAttempt:
    """Return the attempt to preempt: in the lowest class, of the tenant that holds most for its
    weight, the least important to its client, among these the youngest, which has the least work to
    lose.

    In its class, the only attempt of a tenant gives way to older ones alone. So the first
    of each tenant gets on, and where there is one of each, the oldest: however much others need,
    and whatever comes meanwhile, it is not pushed out for ever.

    Args:
      attempts: all that hold blocks.
      loads: what was found of tenants when victims were chosen for the same step.
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
    """Return how much one tenant's attempts hold for its weight, as that was said last, and when
    the youngest of them came. What they share counts once."""
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
    preempted: list[DecodeAttempt] = []
    loads: dict[bytes, Load] = {}
    while len(growing) > free_blocks + num_returned(preempted):
        victim = choose_victim(candidates, loads)
        candidates.remove(victim)
        preempted.append(victim)
        rows = [attempt for attempt in rows if attempt is not victim]
        growing = [attempt for attempt in growing if attempt is not victim]
    return StepPlan(preempted, growing, rows)
