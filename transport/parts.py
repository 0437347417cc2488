"""What the fields of frames may hold: bounds of counts, texts, durations, packed ids.

Knows types and limits; knows no frame.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from triolet.config import MAX_NUM_SEQS
from triolet.ids import AttemptKey, PeerId, Role

MAX_ROWS: Final = 65_536
MAX_TOKEN_ROWS: Final = MAX_NUM_SEQS
"""Rows of one step; with 20 alternatives each they take 8 MiB in memory."""
MAX_TEXT: Final = 4096
MAX_SECONDS: Final = 1e9
"""Thirty years: keeps infinity out."""
MAX_TOKENS_ON_WIRE: Final = 4 * 1024 * 1024
"""Token ids per frame; ids travel packed, 4 bytes each."""

RequestIdField: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Label: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,63}\Z")]
"""Of a worker: where it runs, what it costs."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
RowSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
PackedTokens: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS_ON_WIRE)]
Salt: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=16)]
"""Whose prefix cache: KV is found again under the same salt only. Empty for everybody's."""
AdapterField: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=32)]
"""Digest of the LoRA adapter that computes a sequence. Empty for the base alone."""
Tenant: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=8)]
"""For whom KV is kept: a digest of the tenant's name. Empty where there are no tenants."""
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
"""Of some room; no keeper's is nothing."""
Weight: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
"""Of one tenant beside others."""
Vector: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4 * 65_536)]
"""Numbers as little-endian fp32; far more than any model's hidden states have."""
KvKey: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=32)]
"""With which an attempt's chunks are authenticated. Empty from a server that knows of none."""
Mac: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=16)]
"""Of a frame and its payload, by the attempt's `KvKey`. Empty where the link has keys itself."""
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group of fields inside frames; an array on the wire."""


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
    borrowed_steps: Count = 0  # of `steps`, those that used cores that others could spare
    busy_s: Seconds = 0.0  # that the device was in steps
    busy_row_s: RowSeconds = 0.0  # the same, each step times its rows


class EndReason(StrEnum):
    """Why an attempt ended. The first three are the model's own ends, all others are ours."""

    STOP = "stop"  # end-of-sequence or stop token
    LENGTH = "length"
    STOP_STRING = "stop_string"
    CANCEL = "cancel"  # the client left
    STALLED = "stalled"  # the client stopped reading
    DEADLINE = "deadline"
    DRAIN = "drain"
    PREEMPTED = "preempted"  # blocks ran out; the server begins a new attempt
    FORSAKEN = "forsaken"  # decode only: the attempt whose prompt it was to share ended first
    SUPERSEDED = "superseded"  # a newer attempt of the same request exists
    LEASE_EXPIRED = "lease_expired"  # its server fell silent or no longer names it
    PEER_LOST = "peer_lost"  # the other worker of the pair
    HANDED_OVER = "handed_over"  # prefill only: decode has all of the KV; a success
    EMBEDDED = "embedded"  # prefill only: the vector was sent; a success
    UNWANTED = "unwanted"  # prefill only: decode has ended it, and says itself why
    STUCK = "stuck"  # its grammar leaves no token
    TOO_COSTLY = "too_costly"  # its grammar takes too long to follow
    UNKNOWN = "unknown"  # the worker has no such attempt
    ERROR = "error"


class RefuseReason(StrEnum):
    """Why decode granted no lease."""

    NO_BLOCKS = "no_blocks"
    NO_ROWS = "no_rows"
    DRAINING = "draining"
    TOO_LONG = "too_long"
    ENDED = "ended"  # a tombstone: the END overtook its RESERVE
    NO_FORK = "no_fork"  # the attempt whose prompt it was to share is not here


class Peer(Part, frozen=True, array_like=True):
    """A process, as it names itself."""

    role: Role
    name: Name
    epoch: Count

    @classmethod
    def of(cls, peer_id: PeerId) -> Peer:
        return cls(*peer_id)

    @property
    def peer_id(self) -> PeerId:
        return PeerId(self.role, self.name, self.epoch)


class Capacity(Part, frozen=True, array_like=True):
    """What a worker has in all; fixed for its life."""

    num_blocks: Count
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    bytes_per_block: Count
    max_num_seqs: Count
    max_model_len: Count
    max_waiting_tokens: Count = 0
    kv_window_bytes: Count = 0
    step_s: Seconds = 0.0  # what a full step takes; the server is at least this patient


class KvTarget(Part, frozen=True, array_like=True):
    """Where the KV of an attempt goes: one life of one decode worker."""

    peer: Peer
    address: Text


class TopToken(Part, frozen=True, array_like=True):
    """One alternative at a position."""

    token_id: Count
    logprob: float


class TokenRow(Part, frozen=True, array_like=True):
    """One token of one attempt. `position` counts completion tokens from 0."""

    request_id: RequestIdField
    attempt: Count
    position: Count
    token_id: Count
    logprob: float | None = None
    top: Annotated[tuple[TopToken, ...], msgspec.Meta(max_length=20)] = ()

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)


class CreditRow(Part, frozen=True, array_like=True):
    """Positions below `allowed` may be produced; those below `received` have arrived. Absolute, so
    that a doubled frame and a reordered one (the largest wins) do no harm. One that allows nothing
    new asks for everything after `received` once more."""

    request_id: RequestIdField
    attempt: Count
    allowed: Count
    received: Count = 0

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)


class AttemptRow(Part, frozen=True, array_like=True):
    """An attempt that its server still wants."""

    request_id: RequestIdField
    attempt: Count

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)


class SharedRing(Part, frozen=True, array_like=True):
    """A sender's ring, as another process of its host finds it: descriptor `fd` of process `pid`.
    `token` is in it, which proves that both mean the same memory."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    fd: Count
    num_bytes: Count
    token: Digest


class SharedRange(Part, frozen=True, array_like=True):
    """Where in the sender's ring a chunk's bytes are, instead of a payload."""

    offset: Count
    num_bytes: Count
