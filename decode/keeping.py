"""Which blocks of an attempt are worth finding again, and when they are final.

Knows which tokens are where; does not know who looks for them. A prompt's KV is prefill's work
whoever holds it. A completion's is decode's, and stands for what prefill would compute only where
both give the same bits (`PrefixCache.keeps_completions`): a request's tokens must not depend on
what others have asked before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.tokens import pack_tokens

if TYPE_CHECKING:
    from engine.prefix_cache import PrefixCache

    from .attempt import Attempt


def keep_prompt(cache: PrefixCache, attempt: Attempt, block_size: int) -> None:
    """Note that the KV of a whole prompt is here."""
    _keep(cache, attempt, len(attempt.prompt_ids) // block_size)


def keep_completion(cache: PrefixCache, attempt: Attempt, block_size: int) -> None:
    """Note what an attempt that ends leaves behind: the next turn of its chat begins with it."""
    if cache.keeps_completions and attempt.output_ids:
        _keep(cache, attempt, attempt.num_computed_tokens // block_size)


def _keep(cache: PrefixCache, attempt: Attempt, num_blocks: int) -> None:
    if num_blocks:
        tokens = pack_tokens((*attempt.prompt_ids, *attempt.output_ids))
        cache.insert(tokens, attempt.salt, attempt.block_table[:num_blocks], attempt.keeper)
