"""Field types of frames, with their limits: counts, texts, durations, packed token ids."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from triolet.config import MAX_NUM_SEQS
from triolet.ids import AttemptKey, PeerId, Role

MAX_ROWS: Final = 65_536
MAX_TOKEN_ROWS: Final = MAX_NUM_SEQS
"""Rows of one step; with 20 alternatives each they take 8 MiB of memory."""
MAX_TEXT: Final = 4096
MAX_SECONDS: Final = 1e9
"""Thirty years: excludes infinity."""
MAX_TOKENS_ON_WIRE: Final = 4 * 1024 * 1024
"""Token ids per frame; ids travel packed, 4 bytes each."""

RequestIdField: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Label: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,63}\Z")]
"""Value of a worker's label: zone, host, price and so on."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
RowSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
PackedTokens: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS_ON_WIRE)]
Salt: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=16)]
"""Prefix-cache partition: KV is found only under the same salt. Empty for the shared cache."""
AdapterField: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=32)]
"""Digest of the LoRA adapter of a sequence. Empty for the base model."""
Tenant: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=8)]
"""Tenant that owns the KV: a digest of its name. Empty without tenants."""
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
"""Share of a cache; never zero."""
Weight: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
"""Weight of a tenant relative to others."""
Vector: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4 * 65_536)]
"""Numbers as little-endian fp32; the limit is far above any model's hidden size."""
KvKey: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=32)]
"""Key for MACs of an attempt's chunks. Empty from a server that does not support them."""
Mac: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=16)]
"""MAC of a frame and its payload by the attempt's `KvKey`. Empty where the link has its own
keys."""
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group of fields inside frames; an array on the wire."""


class CacheLoad(Part, frozen=True, array_like=True):
    """Prefix-cache counters of a worker. All but the last two only rise within one epoch."""

    queried_tokens: Count = 0  # of prompts that began there
    hit_tokens: Count = 0  # of these, found in the cache
    evicted_blocks: Count = 0
    spilled_blocks: Count = 0  # evicted to host memory
    restored_blocks: Count = 0  # and brought back from it
    host_bytes: Count = 0
    tenants: Count = 0  # that have cached blocks


class Load(Part, frozen=True, array_like=True):
    """A worker's load, sent with every heartbeat. Counters only rise within one epoch."""

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
    stale_frames: Count = 0  # ignored, for any reason
    bad_digests: Count = 0
    preemptions: Count = 0
    dropped: Annotated[dict[Name, Count], msgspec.Meta(max_length=16)] = msgspec.field(
        default_factory=dict
    )  # the same, by reason
    speculative_rows: Count = 0  # rows with guesses; decode
    speculative_proposed: Count = 0  # guesses
    speculative_accepted: Count = 0  # of these, equal to the chosen token
    cache: CacheLoad = CacheLoad()
    step_s: Seconds = 0.0  # usual step; for decode without prompt tokens
    prompt_tokens_per_s: Rate = 0.0  # per second of computing
    local_tokens: Count = 0  # decode: prompt tokens still to compute locally
    local_prompts: Count = 0  # decode: prompts computed locally
    chunk_tokens: Count = 0  # decode: prompt tokens that fit its next step
    kv_shared_bytes: Count = 0  # part of `kv_bytes` read from prefill's memory
    borrowed_steps: Count = 0  # part of `steps` run on borrowed cores
    busy_s: Seconds = 0.0  # time that the device spent in steps
    busy_row_s: RowSeconds = 0.0  # the same, each step times its rows


class EndReason(StrEnum):
    """Why an attempt ended. The first three are decided by the model, all others by the system."""

    STOP = "stop"  # end-of-sequence or stop token
    LENGTH = "length"
    STOP_STRING = "stop_string"
    CANCEL = "cancel"  # the client left
    STALLED = "stalled"  # the client stopped reading
    DEADLINE = "deadline"
    DRAIN = "drain"
    PREEMPTED = "preempted"  # blocks ran out; the server begins a new attempt
    FORSAKEN = "forsaken"  # decode only: the attempt that it forks ended first
    SUPERSEDED = "superseded"  # a newer attempt of the same request exists
    LEASE_EXPIRED = "lease_expired"  # its server fell silent or no longer names it
    PEER_LOST = "peer_lost"  # the other worker of the pair
    HANDED_OVER = "handed_over"  # prefill only: decode has all of the KV; a success
    EMBEDDED = "embedded"  # prefill only: the vector was sent; a success
    UNWANTED = "unwanted"  # prefill only: decode ended it and reports why
    STUCK = "stuck"  # its grammar leaves no token
    TOO_COSTLY = "too_costly"  # its grammar takes too long to evaluate
    UNKNOWN = "unknown"  # the worker has no such attempt
    ERROR = "error"


class RefuseReason(StrEnum):
    """Why decode granted no lease."""

    NO_BLOCKS = "no_blocks"
    NO_ROWS = "no_rows"
    DRAINING = "draining"
    TOO_LONG = "too_long"
    ENDED = "ended"  # a tombstone: the END overtook its RESERVE
    NO_FORK = "no_fork"  # the attempt to fork is not here


class Peer(Part, frozen=True, array_like=True):
    """A process, as it identifies itself."""

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
    """A worker's total capacity; fixed for the life of the process."""

    num_blocks: Count
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    bytes_per_block: Count
    max_num_seqs: Count
    max_model_len: Count
    max_waiting_tokens: Count = 0
    kv_window_bytes: Count = 0
    step_s: Seconds = 0.0  # length of a full step; a server waits at least this long


class KvTarget(Part, frozen=True, array_like=True):
    """Where the KV of an attempt goes: one decode worker in one epoch."""

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
    """Positions below `allowed` may be generated; those below `received` have arrived. The numbers
    are absolute, so duplicated and reordered frames do no harm (the largest wins). A row that
    allows nothing new requests everything after `received` again."""

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
    """Where another process on this host finds a sender's ring: descriptor `fd` of process `pid`.
    The ring holds `token`, which proves that both mean the same memory."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    fd: Count
    num_bytes: Count
    token: Digest


class SharedRange(Part, frozen=True, array_like=True):
    """Where a chunk's bytes are in the sender's ring, instead of a payload."""

    offset: Count
    num_bytes: Count
