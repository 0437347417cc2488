"""Frames to workers: those that begin an attempt, and the outbox in which they wait to be sent."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from transport.frames import (
    MAX_ROWS,
    AttemptRow,
    CreditRow,
    Embed,
    KvTarget,
    Prefill,
    Reserve,
    TokenCredit,
)
from transport.tokens import pack_tokens

if TYPE_CHECKING:
    from transport.frames import AnyFrame
    from triolet.ids import AttemptKey
    from triolet.service_class import Scheduling

    from .request import Attempt, Request
    from .workers import Worker


TENANT_BYTES: Final = 8


def reserve_frame(
    sequence: Request, attempt: Attempt, eos_token_ids: tuple[int, ...], now: float
) -> Reserve:
    """Return what asks decode for a lease."""
    return Reserve(
        *attempt.key,
        prompt=pack_tokens(sequence.request.prompt_ids),
        replay=pack_tokens(sequence.relay.token_ids),
        sampling=sequence.request.sampling,
        priority=attempt.rank,
        allowed=attempt.allowed,
        remaining_s=max(sequence.deadline - now, 0.0),
        eos_token_ids=eos_token_ids,
        salt=sequence.request.cache_salt,
        local_tokens=attempt.local_tokens,
        fork_of=None if attempt.fork_of is None else AttemptRow(*attempt.fork_of),
        tenant=tenant_digest(sequence.request.scheduling),
        cache_share=sequence.request.scheduling.cache_share,
        weight=sequence.request.scheduling.weight,
        kv_key=attempt.kv_key,
    )


def prefill_frame(
    sequence: Request,
    attempt: Attempt,
    eos_token_ids: tuple[int, ...],
    held_blocks: int,
    now: float,
) -> Prefill:
    """Return what asks prefill to compute the prompt and ship it to the attempt's decode worker."""
    welcome = attempt.pair.decode.welcome
    assert welcome is not None, "an attempt goes to welcomed workers only"
    return Prefill(
        *attempt.key,
        prompt=pack_tokens(sequence.request.prompt_ids),
        target=KvTarget(peer=welcome.peer, address=welcome.kv_address),
        sampling=sequence.request.sampling,
        priority=attempt.rank,
        remaining_s=max(sequence.deadline - now, 0.0),
        held_blocks=held_blocks,
        eos_token_ids=eos_token_ids,
        salt=sequence.request.cache_salt,
        tenant=tenant_digest(sequence.request.scheduling),
        cache_share=sequence.request.scheduling.cache_share,
        kv_key=attempt.kv_key,
    )


def embed_frame(sequence: Request, attempt: Attempt, now: float) -> Embed:
    """Return what asks prefill to compute the vector of an input."""
    form = sequence.request.form
    assert form is not None, "only inputs become vectors"
    return Embed(
        *attempt.key,
        prompt=pack_tokens(sequence.request.prompt_ids),
        pooling=form.pooling,
        dimensions=form.dimensions,
        is_normalized=form.is_normalized,
        priority=attempt.rank,
        remaining_s=max(sequence.deadline - now, 0.0),
    )


def tenant_digest(scheduling: Scheduling) -> bytes:
    """Return what workers call a tenant: empty for none. Two of one digest would share a share."""
    if not scheduling.tenant:
        return b""
    return blake2b(scheduling.tenant.encode(), digest_size=TENANT_BYTES).digest()


class Outgoing(NamedTuple):
    """A frame and its worker."""

    worker: Worker
    frame: AnyFrame


class Outbox:
    """What Requests wants sent."""

    def __init__(self) -> None:
        self._frames: list[Outgoing] = []
        self._credit: dict[Worker, dict[AttemptKey, CreditRow]] = {}

    def send(self, worker: Worker, frame: AnyFrame) -> None:
        """Add a frame, unless its worker is not connected."""
        if worker.is_connected:
            self._frames.append(Outgoing(worker, frame))

    def allow(self, worker: Worker, key: AttemptKey, allowed: int, received: int) -> None:
        """Add credit; of several amounts for one attempt the last counts."""
        self._credit.setdefault(worker, {})[key] = CreditRow(*key, allowed, received)

    @property
    def has_credit(self) -> bool:
        """Whether credit waits to be sent."""
        return bool(self._credit)

    def drain_frames(self) -> list[Outgoing]:
        """Take everything but credit."""
        frames, self._frames = self._frames, []
        return frames

    def drain_credit(self) -> list[Outgoing]:
        """Take all credit, one frame per worker."""
        frames = []
        for worker, credit in self._credit.items():
            rows = list(credit.values())
            frames += [
                Outgoing(worker, TokenCredit(tuple(rows[at : at + MAX_ROWS])))
                for at in range(0, len(rows), MAX_ROWS)
                if worker.is_connected
            ]
        self._credit = {}
        return frames
