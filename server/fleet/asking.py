"""The frames that ask workers for an attempt.

Knows how a sequence is written into them; decides nothing.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from transport.frames import KV_KEY_VERSION, AttemptRow, KvTarget, Prefill, Reserve
from transport.tokens import pack_tokens

if TYPE_CHECKING:
    from triolet.service_class import Claim

    from .sequence import Attempt, Sequence
    from .workers import Worker

TENANT_BYTES: Final = 8


def reserve_frame(
    sequence: Sequence, attempt: Attempt, eos_token_ids: tuple[int, ...], now: float
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
        tenant=tenant_digest(sequence.request.claim),
        cache_share=sequence.request.claim.cache_share,
        weight=sequence.request.claim.weight,
        kv_key=_kv_key_for(attempt, attempt.pair.decode),
    )


def prefill_frame(
    sequence: Sequence,
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
        tenant=tenant_digest(sequence.request.claim),
        cache_share=sequence.request.claim.cache_share,
        kv_key=_kv_key_for(attempt, attempt.pair.prefill),
    )


def _kv_key_for(attempt: Attempt, worker: Worker) -> bytes:
    """Return the key of an attempt's KV, nothing to a worker of the release that knows none."""
    assert worker.welcome is not None, "an attempt goes to welcomed workers only"
    return attempt.kv_key if worker.welcome.version >= KV_KEY_VERSION else b""


def tenant_digest(claim: Claim) -> bytes:
    """Return what workers call a tenant: empty for none. Two of one digest would share a share."""
    if not claim.tenant:
        return b""
    return blake2b(claim.tenant.encode(), digest_size=TENANT_BYTES).digest()
