"""Groups of fields that frames have in common: peers, what they have, rows of tokens and credit.

Knows their types and bounds; knows no frame.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from triolet.ids import AttemptKey, PeerId, Role

from .fields import Count, Digest, Name, Part, RequestIdField, Seconds, Text


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
