"""What a worker says of its work with every heartbeat. Knows counts; judges nothing."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .fields import Count, Name, Part, Rate, Seconds


class CacheLoad(Part, frozen=True, array_like=True):
    """What a worker's prefix cache has done. Only rises within one life, but for the last two."""

    queried_tokens: Count = 0  # of the prompts that began there
    hit_tokens: Count = 0  # of these, whose KV was there
    evicted_blocks: Count = 0
    spilled_blocks: Count = 0  # evicted to host memory
    restored_blocks: Count = 0  # and brought back from it
    host_bytes: Count = 0
    tenants: Count = 0  # that have cached blocks


class Load(Part, frozen=True, array_like=True):
    """What a worker is doing; with every heartbeat. Counters only rise within one epoch."""

    free_blocks: Count = 0
    cached_blocks: Count = 0
    leased_blocks: Count = 0
    running: Count = 0
    paused: Count = 0
    waiting: Count = 0
    waiting_tokens: Count = 0
    steps: Count = 0
    computed_tokens: Count = 0
    kv_bytes: Count = 0  # sent by prefill, received into the pool by decode
    stale_frames: Count = 0  # not acted upon, for any reason
    bad_digests: Count = 0
    preemptions: Count = 0
    dropped: Annotated[dict[Name, Count], msgspec.Meta(max_length=16)] = msgspec.field(
        default_factory=dict
    )  # the same, by reason
    speculative_rows: Count = 0  # that carried guesses; decode
    speculative_proposed: Count = 0  # guesses
    speculative_accepted: Count = 0  # of these, were the token that was chosen
    cache: CacheLoad = CacheLoad()
    step_s: Seconds = 0.0  # of the usual step; decode's without prompt tokens
    prompt_tokens_per_s: Rate = 0.0  # what a second of computing yields
    local_tokens: Count = 0  # decode: prompt tokens that it has still to compute itself
    local_prompts: Count = 0  # decode: prompts that it has computed itself
    chunk_tokens: Count = 0  # decode: prompt tokens that its next step may hold
    kv_shared_bytes: Count = 0  # of `kv_bytes`, those that decode reads in prefill's memory
