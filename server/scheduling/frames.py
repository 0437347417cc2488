"""Frames between the server and its workers: builds the ones that start an attempt, queues outgoing
frames, and translates a worker's frame into a change of its request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from transport.frames import (
    MAX_ROWS,
    AttemptRow,
    CreditRow,
    Embed,
    EndReason,
    KvTarget,
    Prefill,
    Reserve,
    TokenCredit,
)
from transport.tokens import pack_tokens
from triolet.errors import server_error
from triolet.ids import Role

from ..contract.generation import FinishReason
from . import outcome
from .outcome import Failure, Outcome
from .request import Phase, Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transport.frames import AnyFrame, Ended, FirstToken, TokenRow
    from triolet.ids import AttemptKey
    from triolet.service_class import Scheduling

    from .output import RelayEnd
    from .request import Attempt, Request
    from .workers import Worker


TENANT_BYTES: Final = 8


def reserve_frame(
    request: Request, attempt: Attempt, eos_token_ids: tuple[int, ...], now: float
) -> Reserve:
    """Return the frame that asks decode for a lease."""
    return Reserve(
        *attempt.key,
        prompt=pack_tokens(request.spec.prompt_ids),
        replay=pack_tokens(request.relay.token_ids),
        sampling=request.spec.sampling,
        priority=attempt.rank,
        allowed=attempt.allowed,
        remaining_s=max(request.deadline - now, 0.0),
        eos_token_ids=eos_token_ids,
        salt=request.spec.cache_salt,
        local_tokens=attempt.local_tokens,
        fork_of=None if attempt.fork_of is None else AttemptRow(*attempt.fork_of),
        tenant=tenant_digest(request.spec.scheduling),
        cache_share=request.spec.scheduling.cache_share,
        weight=request.spec.scheduling.weight,
        kv_key=attempt.kv_key,
        adapter=request.spec.adapter,
    )


def prefill_frame(
    request: Request,
    attempt: Attempt,
    eos_token_ids: tuple[int, ...],
    held_blocks: int,
    now: float,
) -> Prefill:
    """Return the frame that asks prefill to compute a prompt and ship its KV to decode."""
    welcome = attempt.pair.decode.welcome
    assert welcome is not None, "an attempt goes to welcomed workers only"
    return Prefill(
        *attempt.key,
        prompt=pack_tokens(request.spec.prompt_ids),
        target=KvTarget(peer=welcome.peer, address=welcome.kv_address),
        sampling=request.spec.sampling,
        priority=attempt.rank,
        remaining_s=max(request.deadline - now, 0.0),
        held_blocks=held_blocks,
        eos_token_ids=eos_token_ids,
        salt=request.spec.cache_salt,
        tenant=tenant_digest(request.spec.scheduling),
        cache_share=request.spec.scheduling.cache_share,
        kv_key=attempt.kv_key,
        adapter=request.spec.adapter,
    )


def embed_frame(request: Request, attempt: Attempt, now: float) -> Embed:
    """Return the frame that asks prefill to embed an input."""
    form = request.spec.form
    assert form is not None, "only inputs become vectors"
    return Embed(
        *attempt.key,
        prompt=pack_tokens(request.spec.prompt_ids),
        pooling=form.pooling,
        dimensions=form.dimensions,
        is_normalized=form.is_normalized,
        priority=attempt.rank,
        remaining_s=max(request.deadline - now, 0.0),
        adapter=request.spec.adapter,
    )


def tenant_digest(scheduling: Scheduling) -> bytes:
    """Return the id by which workers know a tenant; empty for none. Tenants whose digests collide
    would share one cache share."""
    if not scheduling.claimant:
        return b""
    return blake2b(scheduling.claimant.encode(), digest_size=TENANT_BYTES).digest()


class Outgoing(NamedTuple):
    """A frame and its destination."""

    worker: Worker
    frame: AnyFrame


class FrameOutbox:
    """Frames and token credit that wait to be sent."""

    def __init__(self) -> None:
        self._frames: list[Outgoing] = []
        self._credit: dict[Worker, dict[AttemptKey, CreditRow]] = {}

    def send(self, worker: Worker, frame: AnyFrame) -> None:
        """Add a frame if its worker is connected."""
        if worker.is_connected:
            self._frames.append(Outgoing(worker, frame))

    def allow(self, worker: Worker, key: AttemptKey, allowed: int, received: int) -> None:
        """Add credit; a later amount for the same attempt replaces an earlier one."""
        self._credit.setdefault(worker, {})[key] = CreditRow(*key, allowed, received)

    @property
    def has_credit(self) -> bool:
        """Whether credit waits to be sent."""
        return bool(self._credit)

    def drain_frames(self) -> list[Outgoing]:
        """Remove and return all frames except credit."""
        frames, self._frames = self._frames, []
        return frames

    def drain_credit(self) -> list[Outgoing]:
        """Remove and return all credit, in as few frames per worker as possible."""
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


class AttemptVerdict(Enum):
    """What ENDED means for the attempt, unless it ends the request."""

    COMPLETE = auto()  # decode: all tokens exist; prefill: decode has the KV
    RETRY = auto()  # a failure: counts against `max_attempts`
    MOVE = auto()  # not a failure: does not count


ENDED: Final[Mapping[Role, Mapping[EndReason, AttemptVerdict | Outcome]]] = {
    Role.DECODE: {
        EndReason.STOP: AttemptVerdict.COMPLETE,
        EndReason.LENGTH: AttemptVerdict.COMPLETE,
        EndReason.PREEMPTED: AttemptVerdict.MOVE,
        EndReason.FORSAKEN: AttemptVerdict.MOVE,
        EndReason.DRAIN: AttemptVerdict.MOVE,
        EndReason.PEER_LOST: AttemptVerdict.RETRY,
        EndReason.LEASE_EXPIRED: AttemptVerdict.RETRY,
        EndReason.UNKNOWN: AttemptVerdict.RETRY,
        EndReason.ERROR: AttemptVerdict.RETRY,
        EndReason.STUCK: Outcome.STUCK,
        EndReason.TOO_COSTLY: Outcome.GRAMMAR_TOO_COSTLY,
    },
    Role.PREFILL: {
        EndReason.HANDED_OVER: AttemptVerdict.COMPLETE,
        EndReason.EMBEDDED: AttemptVerdict.RETRY,  # ENDED came before the vector, which was lost
        EndReason.PREEMPTED: AttemptVerdict.MOVE,
        EndReason.DRAIN: AttemptVerdict.MOVE,
        EndReason.PEER_LOST: AttemptVerdict.RETRY,
        EndReason.LEASE_EXPIRED: AttemptVerdict.RETRY,
        EndReason.UNKNOWN: AttemptVerdict.RETRY,
        EndReason.ERROR: AttemptVerdict.RETRY,
        EndReason.STUCK: Outcome.STUCK,
        EndReason.TOO_COSTLY: Outcome.GRAMMAR_TOO_COSTLY,
    },
}
"""Reasons without a row are ignored because the server caused them. Decode's DEADLINE: the server's
own clock decides when a request is too late. Prefill's UNWANTED: decode has ended the attempt, and
its own ENDED is on the way with the reason. Prefill's failures count only until decode has the
KV."""


@dataclass(frozen=True, slots=True)
class Finish:
    """All tokens have arrived."""

    end: RelayEnd


@dataclass(frozen=True, slots=True)
class FrameFault:
    """What went wrong with an attempt.

    Attributes:
      at: role of the worker where the fault showed.
      is_workers: whether that worker is at fault; otherwise the network, this server, or unknown.
      is_path: the connection between the two workers failed.
      is_shared: the same event makes other attempts fail within moments.
      step: the device step that raised; 0 if none did.
      num_suspects: requests that may have caused the failure, including this one; 0 if it was not
        being computed.
    """

    at: Role
    is_workers: bool = True
    is_path: bool = False
    is_shared: bool = False
    step: int = 0
    num_suspects: int = 0


@dataclass(frozen=True, slots=True)
class Again:
    """The attempt is over; start another one.

    Attributes:
      cause: a word for metrics and logs.
      fault: what went wrong; None if nothing did, so the attempt does not count against
        `max_attempts`.
    """

    cause: str
    fault: FrameFault | None = None


Change: TypeAlias = Finish | Again | Failure

_TOKEN_PHASES: Final = (Phase.PREFILLING, Phase.DECODING, Phase.FINISHING)


def take_row(request: Request, attempt: Attempt, row: TokenRow, now: float) -> Change | None:
    """Apply one token row of the current attempt."""
    if attempt.end is not None:
        return None  # decode continues until it receives END
    if request.phase not in _TOKEN_PHASES:
        return Again("token_without_prefill", FrameFault(Role.DECODE))
    token_ids = request.relay.token_ids
    if row.position < len(token_ids):
        return None if token_ids[row.position] == row.token_id else _failed()
    if row.position >= max(attempt.allowed, 1):
        return Again("token_without_credit", FrameFault(Role.DECODE))
    following: TokenRow | None = row
    if attempt.early or row.position > len(token_ids):
        twin = attempt.early.setdefault(row.position, row)
        if twin.token_id != row.token_id:
            return _failed()
        following = attempt.early.pop(len(token_ids), None)
    if request.phase is not Phase.DECODING:  # skip a no-op step, which would cost per token
        request.step(Step.TOKEN)
    if not request.fingerprint:
        request.fingerprint = attempt.pair.decode.fingerprint
    while following is not None:
        end = request.relay.push(following, now)
        if end is not None:
            return _finish(request, attempt, end, now)
        following = attempt.early.pop(len(token_ids), None)
    return _settle(request, attempt, now)


def take_first_token(
    request: Request, attempt: Attempt, frame: FirstToken, now: float
) -> Change | None:
    """Apply position 0 as sent by prefill. On a retry it must repeat what the client already
    has."""
    if request.cached_tokens is None:
        # A later attempt would count what this request itself left in the cache.
        request.cached_tokens = frame.cached_tokens
    attempt.pair.prefill.computed(attempt.key)
    if attempt.end is not None:
        return Finish(attempt.end)
    if request.phase is Phase.PREFILLING and request.relay.token_ids:
        request.step(Step.TOKEN)
    return take_row(request, attempt, frame.row, now)


def take_ended(
    request: Request, attempt: Attempt, role: Role, frame: Ended, now: float
) -> Change | None:
    """Apply a worker's ENDED."""
    if attempt.end is not None:
        # No FIRST_TOKEN follows prefill's ENDED.
        return Finish(attempt.end) if role is Role.PREFILL else None
    if role is Role.PREFILL:
        return _prefill_ended(request, attempt, frame)
    verdict = ENDED[role].get(frame.reason)
    if verdict is None or attempt.num_tokens is not None:
        return None
    if isinstance(verdict, Outcome):
        return _refused(verdict)
    if verdict is AttemptVerdict.MOVE:
        return Again(frame.reason)
    if verdict is AttemptVerdict.RETRY or request.phase is Phase.RESERVING:
        return Again(frame.reason, _fault_at(role, frame, is_local=attempt.pair.is_local))
    if frame.num_tokens < len(request.relay.token_ids):
        return _failed()
    request.step(Step.COMPLETE)
    attempt.is_handed_over = True
    attempt.num_tokens = frame.num_tokens
    is_stop = frame.reason is EndReason.STOP
    attempt.finish_reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
    return _settle(request, attempt, now)


def _failed() -> Failure:
    """Return the failure for workers that contradict one another."""
    return Failure(Outcome.ERROR, server_error())


def _refused(how: Outcome) -> Failure:
    """Return the failure for a request that would end the same way on any worker."""
    if how is Outcome.GRAMMAR_TOO_COSTLY:
        return outcome.grammar_too_costly()
    return how.failure(
        "no token can follow the completion so far: the grammar allows none that this model has"
    )


def _fault_at(role: Role, frame: Ended, *, is_local: bool = False) -> FrameFault:
    """Return the fault that an ENDED stands for."""
    match frame.reason:
        case EndReason.ERROR if frame.failed_rows:
            return FrameFault(
                role, is_shared=True, step=frame.failed_step, num_suspects=frame.failed_rows
            )
        case EndReason.ERROR:
            # Decode errs if KV arrived damaged or out of order. It names a step if that computed
            # logits that are not finite.
            is_path = role is Role.DECODE and not is_local and not frame.failed_step
            return FrameFault(role, is_workers=not is_path, is_path=is_path)
        case EndReason.PEER_LOST:
            return FrameFault(role, is_workers=False, is_path=True, is_shared=True)
        case _:
            # Leases expired: a peer fell silent, and all of its attempts here ended together.
            return FrameFault(role, is_workers=False, is_shared=True)


def _prefill_ended(request: Request, attempt: Attempt, frame: Ended) -> Change | None:
    reason = frame.reason
    match ENDED[Role.PREFILL].get(reason):
        case AttemptVerdict.COMPLETE:
            attempt.is_handed_over = True
            return None
        case Outcome() as how:
            return _refused(how)
        case AttemptVerdict.RETRY | AttemptVerdict.MOVE as verdict if not attempt.is_handed_over:
            if reason is EndReason.UNKNOWN and request.phase is not Phase.PREFILLING:
                # Prefill has forgotten what it shipped; decode has it or will report it missing.
                return None
            fault = _fault_at(Role.PREFILL, frame) if verdict is AttemptVerdict.RETRY else None
            return Again(f"prefill_{reason}", fault)
        case _:
            return None


def _finish(request: Request, attempt: Attempt, end: RelayEnd, now: float) -> Finish | None:
    """Finish, or wait for FIRST_TOKEN, which reports how many prompt tokens were cached.

    Prefill sends it before it ships the KV, but decode's tokens may overtake it, and a completion
    of one token has no later ones. Like a missing token, it is waited for `peer_timeout_s`.
    """
    prefill = attempt.pair.prefill
    if request.cached_tokens is not None or attempt.pair.is_local or not prefill.is_connected:
        return Finish(end)
    attempt.end, attempt.gap_since = end, now
    return None


def _settle(request: Request, attempt: Attempt, now: float) -> Change | None:
    """Record whether a token is missing. Finish if decode has ended and none is."""
    if attempt.num_tokens is None and not attempt.early:
        attempt.gap_since = None
        return None
    is_complete = attempt.num_tokens == len(request.relay.token_ids)
    if is_complete and attempt.finish_reason is not None:
        return _finish(request, attempt, request.relay.end(attempt.finish_reason, now), now)
    attempt.gap_since = attempt.gap_since or now
    return None
