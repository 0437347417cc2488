"""Whether decode computes a prompt itself, or a prefill worker does: conditional disaggregation.

Pure: measured rates in, a number of tokens out. Up to so many prompt tokens without KV decode does
better itself; how many of a prompt's tokens those are only decode knows, so the number travels with
RESERVE and the answer comes back in GRANT. Knows no frames and no workers; whose rates are asked is
dispatch.py's to say.

For n tokens the sum of waiting is compared, in seconds:

    on decode    a step and a half until it joins, then n tokens at decode's rate and the steps that
                 its chunks ride on; and each running stream waits for the n tokens too
    on prefill   what is before it there, n tokens at prefill's rate, and the way of the KV

Both are lines in n, so the answer is where they cross, within the bounds of the configuration.

Before a prompt are those that are no longer than it: only longer ones are overtaken. So prompts of
one length that come together are shared out between both, and what is short beside a long one goes
to prefill as if that were not there.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from triolet.config_routing import RoutingConfig

JOIN_STEPS: Final = 1.5
"""Decode's running step is half done on average when a prompt arrives, and the next one carries
it."""
LEAST_TOKENS_PER_S: Final = 1e-3
"""A slower worker has told nonsense, and what is computed from it would be no number."""


class Why(StrEnum):
    """Why a prompt went where it went."""

    OFF = "off"  # prefill: nothing else was allowed
    LONG = "long"  # prefill: decode would take longer, or cost its streams too much
    SUSPECT = "suspect"  # prefill: it may be what workers die of, and decode has streams to lose
    SHORT = "short"  # decode: it is sooner done there
    NO_PREFILL = "no_prefill"  # decode: nobody else is there
    ALWAYS = "always"  # decode: nothing else was allowed
    FORK = "fork"  # decode: it shares the prompt of another completion there


class PrefillRates(NamedTuple):
    """What a prefill worker is like just now.

    Attributes:
      tokens_per_s: that it computes.
      step_s: of its usual step, which is all that overtaking costs.
      tokens_before: that it computes before this prompt's.
      tokens_behind: that it has still to compute besides, of prompts that this one overtakes.
      waiting_prompts: how many these are of.
      handover_s: from its first token until decode has all of the KV.
    """

    tokens_per_s: float
    step_s: float
    tokens_before: int
    tokens_behind: int
    waiting_prompts: int
    handover_s: float


class DecodeRates(NamedTuple):
    """What a decode worker is like just now.

    Attributes:
      tokens_per_s: prompt tokens that it computes, beside its streams.
      step_s: of a step without prompt tokens.
      streams: that run there.
      waiting_tokens: prompt tokens that it has still to compute.
      chunk_tokens: prompt tokens that a step holds.
    """

    tokens_per_s: float
    step_s: float
    streams: int
    waiting_tokens: int
    chunk_tokens: int


def most_local_tokens(decode: DecodeRates, prefill: PrefillRates, config: RoutingConfig) -> int:
    """Return up to how many prompt tokens without KV decode should compute itself.

    Args:
      decode: who would compute them.
      prefill: who would otherwise.
      config: bounds.
    """
    if min(decode.tokens_per_s, prefill.tokens_per_s) < LEAST_TOKENS_PER_S:
        return 0  # nothing is known yet, or nothing of use
    token_s = 1.0 / decode.tokens_per_s
    # Behind other prompts it meets the streams that these will be.
    step_s = decode.step_s if decode.streams or decode.waiting_tokens else 0.0
    chunk_tokens: float = decode.chunk_tokens
    if not decode.streams:
        chunk_tokens -= step_s * decode.tokens_per_s  # what their rows will leave of a step
    chunk_s = step_s / max(chunk_tokens, 1.0)
    overtaken_s = min(prefill.tokens_behind / prefill.tokens_per_s, prefill.step_s)
    ahead_s = prefill.tokens_before / prefill.tokens_per_s + overtaken_s
    on_prefill_s = ahead_s + prefill.handover_s
    on_decode_s = JOIN_STEPS * step_s + decode.waiting_tokens * (token_s + chunk_s)
    per_token_s = token_s + chunk_s + config.stream_weight * decode.streams * token_s
    gained_s = on_prefill_s - on_decode_s
    lost_per_token_s = per_token_s - 1.0 / prefill.tokens_per_s
    if gained_s < 0.0:
        return 0
    crossing = gained_s / lost_per_token_s if lost_per_token_s > 0.0 else math.inf
    harmless = math.inf
    # Flat gaps are for readers, as long as no more than they wait for their first token.
    if decode.streams >= max(prefill.waiting_prompts, 1):
        harmless = config.max_gap_growth * step_s * decode.tokens_per_s - decode.waiting_tokens
    return max(0, int(min(crossing, harmless, config.max_local_tokens)))
