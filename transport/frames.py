"""All frames: the messages between processes, as a closed union of records with integer tags.

codec.py encodes and decodes them; docs/protocol.md describes the protocol.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

import msgspec

from triolet.adapter_keys import cache_key
from triolet.audit import WorkerAudit  # noqa: TC001 (msgspec reads the annotations)
from triolet.ids import AttemptKey
from triolet.pooling import Pooling  # noqa: TC001 (msgspec reads the annotations)
from triolet.sampling import SamplingParams  # noqa: TC001 (msgspec reads the annotations)

from .control_protocol import MAX_MESSAGE_BYTES
from .parts import MAX_ROWS as MAX_ROWS
from .parts import MAX_SECONDS as MAX_SECONDS
from .parts import MAX_TEXT as MAX_TEXT
from .parts import MAX_TOKEN_ROWS as MAX_TOKEN_ROWS
from .parts import (
    AdapterField,
    Count,
    Digest,
    KvKey,
    Label,
    Mac,
    Name,
    PackedTokens,
    RequestIdField,
    Salt,
    Seconds,
    Share,
    Tenant,
    Text,
    Vector,
    Weight,
)
from .parts import AttemptRow as AttemptRow
from .parts import CacheLoad as CacheLoad
from .parts import Capacity as Capacity
from .parts import CreditRow as CreditRow
from .parts import EndReason as EndReason
from .parts import KvTarget as KvTarget
from .parts import Load as Load
from .parts import Part as Part
from .parts import Peer as Peer
from .parts import RefuseReason as RefuseReason
from .parts import SharedRange as SharedRange
from .parts import SharedRing as SharedRing
from .parts import TokenRow as TokenRow
from .parts import TopToken as TopToken

PROTOCOL_VERSION: Final = 3
OLDEST_PROTOCOL_VERSION: Final = 3
"""Oldest supported protocol: one release back, for rolling upgrades. No release spoke an earlier
one."""


def frame_name(frame: Frame) -> str:
    """Return the protocol's name of a frame, such as KV_CHUNK."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(frame).__name__).upper()


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class: one message."""


class AttemptFrame(Frame, frozen=True, array_like=True):
    """A frame about one attempt."""

    request_id: RequestIdField
    attempt: Count

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)


class Hello(Frame, frozen=True, array_like=True, tag=1):
    """Connecting side -> bound side: first frame of every link.

    `fingerprint` is empty for a server, which computes nothing.
    """

    peer: Peer
    version: Count
    oldest_version: Count
    fingerprint: Text = ""
    ring: SharedRing | None = None  # prefill -> decode: read chunks there, if on the same host


class Welcome(Frame, frozen=True, array_like=True, tag=2):
    """Bound side -> connecting side: the agreed version, and what this process is and has."""

    peer: Peer
    version: Count
    fingerprint: Text
    capacity: Capacity
    kv_address: Text = ""
    shares_ring: bool = False  # the ring of the Hello is mapped here: chunks need no payload
    labels: Annotated[dict[Name, Label], msgspec.Meta(max_length=16)] = msgspec.field(
        default_factory=dict
    )  # of a worker; unknown names are ignored


class Goodbye(Frame, frozen=True, array_like=True, tag=3):
    """Either way: this link ends now, with the reason: another fingerprint, an old version, a new
    epoch.

    `is_farewell` is sent to known peers by a process that leaves or takes a new epoch without
    having crashed. For a peer that did not know this epoch, the previous one may have crashed.
    """

    reason: Text
    is_farewell: bool = False


class WorkerHeartbeat(Frame, frozen=True, array_like=True, tag=4):
    """Worker -> server. `progress` rises with every device step. If work is pending and it does not
    rise, the device thread is stuck although this thread still answers."""

    epoch: Count
    progress: Count
    has_work: bool
    is_draining: bool
    load: Load
    token_credit: Count = 0  # prefill: prompt tokens this server may have under way
    row_credit: Count = 0  # decode: sequences this server may have under way


class ServerHeartbeat(Frame, frozen=True, array_like=True, tag=5):
    """Server -> worker: every attempt that this server still wants there. Renews their leases;
    attempts that are missing are released."""

    epoch: Count
    live: Annotated[tuple[AttemptRow, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()


class Reserve(AttemptFrame, frozen=True, array_like=True, tag=6):
    """Server -> decode: reserve blocks for this prompt.

    `replay` holds completion tokens that the client already has: they are recomputed, but not
    sampled or sent again. If at most `local_tokens` of the prompt lack KV there, decode computes
    them itself and no prefill worker is used. With `fork_of`, the prompt is that of another attempt
    of this server there, and its KV is shared once it is complete.
    """

    prompt: PackedTokens
    replay: PackedTokens
    sampling: SamplingParams
    priority: int
    allowed: Count  # the first token window, as in CreditRow
    remaining_s: Seconds
    eos_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()
    salt: Salt = b""
    local_tokens: Count = 0
    fork_of: AttemptRow | None = None
    tenant: Tenant = b""
    cache_share: Share = 1.0  # share of the prefix cache
    weight: Weight = 1.0  # of its tenant within the class
    kv_key: KvKey = b""  # for MACs, where KV is not encrypted
    adapter: AdapterField = b""

    @property
    def cache_key(self) -> bytes:
        """The key under which the prompt's KV is cached."""
        return cache_key(self.salt, self.adapter)


class Grant(AttemptFrame, frozen=True, array_like=True, tag=7):
    """Decode -> server: a lease is granted. Its first `held_blocks` already hold the prompt's KV.

    With `is_local`, decode computes the rest of the prompt itself, and its first token arrives in a
    TOKENS frame.
    """

    epoch: Count
    held_blocks: Count = 0
    is_local: bool = False


class Refuse(AttemptFrame, frozen=True, array_like=True, tag=8):
    """Decode -> server: no lease is granted."""

    reason: RefuseReason
    retry_after_s: Seconds = 0.0


class Prefill(AttemptFrame, frozen=True, array_like=True, tag=9):
    """Server -> prefill: compute this prompt, ship its KV to `target`, sample the first token."""

    prompt: PackedTokens
    target: KvTarget
    sampling: SamplingParams
    priority: int
    remaining_s: Seconds
    held_blocks: Count = 0
    eos_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()
    salt: Salt = b""
    tenant: Tenant = b""
    cache_share: Share = 1.0  # as in Reserve
    kv_key: KvKey = b""  # as in Reserve
    adapter: AdapterField = b""

    @property
    def cache_key(self) -> bytes:
        """As in Reserve."""
        return cache_key(self.salt, self.adapter)


class FirstToken(AttemptFrame, frozen=True, array_like=True, tag=10):
    """Prefill -> server: position 0, sent without waiting for the KV to arrive."""

    row: TokenRow
    cached_tokens: Count
    queue_s: Seconds
    compute_s: Seconds


class KvChunk(AttemptFrame, frozen=True, array_like=True, tag=11):
    """Prefill -> decode: whole blocks in sequence order, in a payload part or where `shared` says.

    A chunk with a `target_epoch` that is not the receiver's is dropped and counted.
    """

    target_epoch: Count
    index: Count
    first_block: Count  # index in the sequence, not in the pool
    num_blocks: Count
    digest: Digest
    shared: SharedRange | None = None
    mac: Mac = b""  # of all fields except `shared`, and the bytes


class KvManifest(AttemptFrame, frozen=True, array_like=True, tag=12):
    """Prefill -> decode: all chunks of the attempt are sent; this is their number."""

    target_epoch: Count
    num_chunks: Count
    num_tokens: Count
    first: TokenRow
    mac: Mac = b""  # of all other fields


class KvCredit(AttemptFrame, frozen=True, array_like=True, tag=13):
    """Decode -> prefill: chunk `index` was taken (copied, or dropped as stale); `num_bytes` of the
    window are free again."""

    index: Count
    num_bytes: Count


class KvResend(AttemptFrame, frozen=True, array_like=True, tag=14):
    """Decode -> prefill: these chunks are missing or arrived with a wrong digest."""

    indices: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ROWS)]


class KvDone(AttemptFrame, frozen=True, array_like=True, tag=15):
    """Decode -> prefill: everything arrived or nothing more is wanted; forget the attempt."""


class Tokens(Frame, frozen=True, array_like=True, tag=16):
    """Decode -> server: the new tokens of one step, for all sequences of this server."""

    step: Count
    rows: Annotated[tuple[TokenRow, ...], msgspec.Meta(max_length=MAX_TOKEN_ROWS)]


class TokenCredit(Frame, frozen=True, array_like=True, tag=17):
    """Server -> decode: how far each stream may run."""

    rows: Annotated[tuple[CreditRow, ...], msgspec.Meta(max_length=MAX_ROWS)]


class End(AttemptFrame, frozen=True, array_like=True, tag=18):
    """Server -> prefill and decode: stop this attempt and free what it holds."""

    reason: EndReason


class Ended(AttemptFrame, frozen=True, array_like=True, tag=19):
    """Worker -> server: the attempt is over here and its blocks are free.

    `num_tokens` counts completion tokens (positions 0 … num_tokens - 1), replayed ones included. If
    the attempt ended because a device step raised, `failed_step` is that step and `failed_rows` the
    number of attempts in it; 0 if it computed logits that are not finite for this attempt.
    """

    reason: EndReason
    num_tokens: Count
    freed_blocks: Count
    message: Text = ""
    failed_step: Count = 0
    failed_rows: Count = 0


class Drain(Frame, frozen=True, array_like=True, tag=20):
    """Control plane -> worker: accept no new work; exit when empty or after `deadline_s`."""

    deadline_s: Seconds


class Audit(Frame, frozen=True, array_like=True, tag=21):
    """Server, or another control client -> worker: report your account."""

    serial: Count  # echoed in the answer


class Audited(Frame, frozen=True, array_like=True, tag=22):
    """Worker -> client: the account; it covers every frame that was sent earlier on this link."""

    serial: Count
    account: WorkerAudit


class Embed(AttemptFrame, frozen=True, array_like=True, tag=23):
    """Server -> prefill: compute this input and answer with one vector; no KV travels.

    The lease is renewed, ended and accounted for like any other lease of a prefill worker.
    """

    prompt: PackedTokens
    pooling: Pooling
    dimensions: Count  # 0 for all
    is_normalized: bool
    priority: int
    remaining_s: Seconds
    adapter: AdapterField = b""


class Embedded(AttemptFrame, frozen=True, array_like=True, tag=24):
    """Prefill -> server: the vector of an input. ENDED(embedded) follows."""

    vector: Vector
    queue_s: Seconds
    compute_s: Seconds


class ServerReport(Frame, frozen=True, array_like=True, tag=25):
    """Server -> control: what it serves, or a model that it needs (control_protocol.py)."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]


class ControlNews(Frame, frozen=True, array_like=True, tag=26):
    """Control -> server: states of models, or routes (control_protocol.py)."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]


AnyFrame: TypeAlias = (
    Hello
    | Welcome
    | Goodbye
    | WorkerHeartbeat
    | ServerHeartbeat
    | Reserve
    | Grant
    | Refuse
    | Prefill
    | FirstToken
    | KvChunk
    | KvManifest
    | KvCredit
    | KvResend
    | KvDone
    | Tokens
    | TokenCredit
    | End
    | Ended
    | Drain
    | Audit
    | Audited
    | Embed
    | Embedded
    | ServerReport
    | ControlNews
)
