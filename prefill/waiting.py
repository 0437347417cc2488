"""Which prompts may have a row in the next step, seen through what the prefix cache has.

Knows attempts and the cache; does not choose among them (worker/chunks.py) and begins nothing. A
prompt that leaves the cache where another one is just computing waits for that one: the same block
is not computed twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.prefix_cache import Frontier, PrefixCache

    from .attempt import Attempt


def candidates(attempts: Iterable[Attempt], cache: PrefixCache, block_size: int) -> list[Attempt]:
    """Return the attempts to plan with; notes on those that wait what their start would find.

    Args:
      attempts: all whose prompt is not computed yet.
      cache: of the worker.
      block_size: tokens per block.
    """
    chosen: list[Attempt] = []
    ahead: dict[Frontier, int] = {}
    for attempt in sorted(attempts, key=_by_precedence):
        prospect = cache.prospect(attempt.packed_ids, attempt.salt, attempt.num_blocks)
        frontier = prospect.frontier
        if not attempt.is_started:
            attempt.num_computed_tokens = prospect.num_cached_blocks * block_size
            attempt.num_needed_blocks = prospect.num_needed_blocks
            # Whoever is more important waits for nobody less important.
            if frontier in ahead and ahead[frontier] <= attempt.priority:
                continue
        if frontier is not None:
            ahead[frontier] = min(attempt.priority, ahead.get(frontier, attempt.priority))
        chosen.append(attempt)
    return chosen


def _by_precedence(attempt: Attempt) -> tuple[bool, int, int]:
    return (not attempt.is_started, attempt.priority, attempt.order)
