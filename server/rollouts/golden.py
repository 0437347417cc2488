"""Golden prompts: fixed prompts whose greedy answers show whether a candidate computes the same
tokens every time and everywhere."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from transport.tokens import pack_tokens
from triolet.ids import new_request_id
from triolet.sampling import SamplingParams
from triolet.service_class import Scheduling, ServiceClass

from ..contract.generation import CancelReason, Delta, Failed, GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from triolet.config import CandidateConfig

    from ..scheduling.links import Links

PROMPTS: Final = (
    "The capital of France is",
    "def fibonacci(n):",
    "1, 2, 3, 5, 8, 13,",
    "Translate into German: The weather is fine today.",
)
DIGEST_BYTES: Final = 8
"""Bytes of an answer's digest: answers differ by fault, not on purpose."""
SALT_BYTES: Final = 16


async def golden_answers(
    links: Links,
    encode: Callable[[str], Awaitable[tuple[int, ...]]],
    config: CandidateConfig,
) -> tuple[str, ...]:
    """Return a digest of a version's answer to each golden prompt, computed one at a time.

    Args:
      links: the version's workers.
      encode: returns the token ids of a text, by the version's tokenizer.
      config: deadline and length of each answer.

    Raises:
      RequestError: a prompt was refused, its answer failed, or the model computed no numbers.
    """
    answers = [await _answer(links, await encode(text), config) for text in PROMPTS]
    digests = (blake2b(pack_tokens(one), digest_size=DIGEST_BYTES) for one in answers)
    return tuple(one.hexdigest() for one in digests)


async def _answer(links: Links, prompt_ids: tuple[int, ...], config: CandidateConfig) -> list[int]:
    # With logprobs, workers choose tokens on the host, which notices logits that are no numbers.
    spec = GenerationRequest(
        new_request_id(),
        prompt_ids,
        SamplingParams(config.golden_tokens, temperature=0.0, seed=0, ignore_eos=True, logprobs=0),
        config.golden_deadline_s,
        cache_salt=secrets.token_bytes(SALT_BYTES),  # KV in a cache would hide a new fault
        scheduling=Scheduling(service_class=ServiceClass.CRITICAL),  # never paused
        is_silent=True,
    )
    token_ids: list[int] = []
    stream = links.submit(spec)
    try:
        async for events in stream:
            for _, event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta):
                    token_ids += event.token_ids
    finally:
        stream.cancel(CancelReason.STOPPED)
    return token_ids
