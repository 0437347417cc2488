"""How much a prefill worker is given before it has computed what it has.

Pure. What waits on a worker is past all order of classes, tenants and deadlines, so it is given
only what keeps it busy. Knows what this server sent there; knows nobody who waits here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dispatch import Need
    from .workers import Worker


def is_within_pace(worker: Worker, num_tokens: int, need: Need) -> bool:
    """Return whether a prefill worker has little enough of ours before a prompt of so many tokens,
    by its own pace: at least two of its steps, of which each server has the share that it has of
    the credit."""
    assert worker.capacity is not None, "only welcomed workers are asked"
    assert worker.beat is not None, "nor those that have not said what they do"
    rate = worker.beat.load.prompt_tokens_per_s
    if need.backlog_s is None or rate <= 0.0:
        return True
    share = worker.beat.token_credit / max(worker.capacity.max_waiting_tokens, 1)
    ahead_s = max(need.backlog_s, 2 * worker.capacity.step_s)
    most = (1.0 - need.kept_share) * min(share, 1.0) * rate * ahead_s
    return tokens_before(worker, num_tokens, need, need.overtaken_s * rate) < most


def tokens_before(worker: Worker, num_tokens: int, need: Need, overtaken_tokens: float) -> int:
    """Return the tokens of ours that a worker has to compute before a prompt.

    Args:
      worker: which computes by class, then the shortest first.
      num_tokens: of the prompt.
      need: whose it is.
      overtaken_tokens: a prompt of the same class that is longer than this one and than so many is
        computed beside it, and holds it up no more than a part of each step.
    """
    own, limit = need.service_class, max(num_tokens, overtaken_tokens)
    return sum(
        share.num_tokens
        for share in worker.shares.values()
        if share.service_class < own or (share.service_class == own and share.num_tokens <= limit)
    )
