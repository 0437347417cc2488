"""Which requests are refused at once, before anything is held for them, and with which words.

Knows limits that workers announced and how full the line is; changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from triolet.errors import crowded_out, invalid_request
from triolet.ids import Role
from triolet.units import SECONDS

from .newcomer import crowd

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config import ServerConfig
    from triolet.service_class import Scheduling

    from ..contract.generation import GenerationRequest
    from .fair_queue import FairQueue
    from .workers import Worker

FULL_RETRY_S: Final = 2 * SECONDS
"""After which a full line has moved."""


class Limits(NamedTuple):
    """What the fleet can hold of one sequence.

    Attributes:
      max_model_len: positions; the least that any part of the fleet takes.
      pool_tokens: tokens that the largest decode pool holds; None if no decode worker was ever
        seen.
      prefill_pool_tokens: the same for prompts and prefill.
    """

    max_model_len: int
    pool_tokens: int | None = None
    prefill_pool_tokens: int | None = None


def limits_of(workers: Iterable[Worker], max_model_len: int) -> Limits:
    """Return the limits of a fleet, from what its workers said last, also those now gone."""
    pools: dict[Role, int] = {}
    for worker in workers:
        capacity = worker.capacity
        if capacity is not None:
            max_model_len = min(max_model_len, capacity.max_model_len)
            pool = capacity.num_blocks * capacity.block_size
            pools[worker.role] = max(pool, pools.get(worker.role, 0))
    return Limits(max_model_len, pools.get(Role.DECODE), pools.get(Role.PREFILL))


def missing_role(
    workers: Iterable[Worker], roles: Iterable[Role], wait_s: float, now: float
) -> Role | None:
    """Return one of the roles that no worker has filled for longer than a restart takes
    (`wait_s`)."""
    workers = tuple(workers)
    for role in roles:
        since = [w.missing_since for w in workers if w.role is role]
        gone = [at for at in since if at is not None]
        if len(gone) == len(since) and (not gone or now - max(gone) >= wait_s):
            return role
    return None


def refuse_unfit(request: GenerationRequest, limits: Limits) -> None:
    """Raise for a request that can never run, however empty the fleet is.

    Raises:
      RequestError: 400, with the numbers.
    """
    prompt_tokens = len(request.prompt_ids)
    max_tokens = request.sampling.max_tokens
    if prompt_tokens == 0:
        raise invalid_request("the prompt is empty; at least one token is needed", "prompt")
    if prompt_tokens + max_tokens > limits.max_model_len:
        raise invalid_request(
            f"{prompt_tokens} prompt tokens and max_tokens = {max_tokens} make "
            f"{prompt_tokens + max_tokens}; the context of this model is {limits.max_model_len} "
            "tokens",
            "prompt" if prompt_tokens >= limits.max_model_len else "max_tokens",
            "context_length_exceeded",
        )
    # The KV of the last token is never needed.
    kv_tokens = prompt_tokens + max_tokens - 1
    if limits.pool_tokens is not None and kv_tokens > limits.pool_tokens:
        raise invalid_request(
            f"{prompt_tokens} prompt tokens and max_tokens = {max_tokens} need KV for {kv_tokens} "
            f"tokens; the largest decode pool holds {limits.pool_tokens}",
            "max_tokens",
            "context_length_exceeded",
        )
    if limits.prefill_pool_tokens is not None and prompt_tokens > limits.prefill_pool_tokens:
        raise invalid_request(
            f"a prompt of {prompt_tokens} tokens does not fit; the largest prefill pool holds "
            f"{limits.prefill_pool_tokens}",
            "prompt",
            "context_length_exceeded",
        )


def refuse_full(
    line: FairQueue[Any], scheduling: Scheduling, num_together: int, config: ServerConfig
) -> None:
    """Raise where no more requests may wait, however quickly they would go: they take memory.

    Args:
      line: where they would wait.
      scheduling: theirs.
      num_together: that come.
      config: how many may.

    Raises:
      RequestError: 503 with the seconds after which a retry makes sense.
    """
    if num_queued := crowd(line, scheduling, num_together, config.max_queued_requests):
        raise crowded_out(f"{num_queued} requests wait already", FULL_RETRY_S)
