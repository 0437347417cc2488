"""Which decode and which prefill worker a sequence goes to.

Pure functions of the workers' announcements. Decode: most blocks left after what is reserved and
what running sequences will grow by. Prefill: fewest prompt tokens to compute. Both must hold the
same model, or the KV of one would mean nothing to the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .workers import Worker


class Need(NamedTuple):
    """What a sequence asks for.

    Attributes:
      prompt_tokens: to prefill.
      kv_tokens: prompt and replayed tokens, which decode holds from the start.
      fingerprint: of the model that it began with; empty if it has not begun.
    """

    prompt_tokens: int
    kv_tokens: int
    fingerprint: str = ""


class Pair(NamedTuple):
    """Where it goes."""

    decode: Worker
    prefill: Worker


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_size)


def choose_pair(workers: Iterable[Worker], need: Need, now: float) -> Pair | None:
    """Return the workers to send a sequence to, or None if it has to wait."""
    usable = [w for w in workers if w.is_usable and need.fingerprint in ("", w.fingerprint)]
    prefills = [w for w in usable if w.role is Role.PREFILL and _has_token_credit(w, need)]
    decodes = [w for w in usable if w.role is Role.DECODE and _has_room(w, need, now)]
    for decode in sorted(decodes, key=lambda w: (-_spare_blocks(w), w.address)):
        same_model = [w for w in prefills if w.fingerprint == decode.fingerprint]
        if same_model:
            return Pair(decode, min(same_model, key=lambda w: (w.waiting_tokens, w.address)))
    return None


def is_model_gone(workers: Iterable[Worker], need: Need) -> bool:
    """Return whether a sequence can never go on: workers of its role are there, all with another
    model than it began with."""
    if not need.fingerprint:
        return False
    for role in (Role.PREFILL, Role.DECODE):
        present = [w.fingerprint for w in workers if w.role is role and w.is_connected]
        if present and need.fingerprint not in present:
            return True
    return False


def _has_token_credit(worker: Worker, need: Need) -> bool:
    """Return whether a prefill worker takes these tokens: within its credit, or alone if they are
    more than it ever gives."""
    if worker.beat is None:
        return False
    credit = worker.beat.token_credit
    waiting = worker.waiting_tokens
    return credit > 0 and (waiting == 0 or waiting + need.prompt_tokens <= credit)


def blocks_needed(worker: Worker, need: Need) -> int:
    """Return the blocks that decode must lease at once."""
    assert worker.capacity is not None, "only welcomed workers are asked"
    return blocks_for(need.kv_tokens, worker.capacity.block_size)


def _has_room(worker: Worker, need: Need, now: float) -> bool:
    if worker.beat is None or now < worker.busy_until:
        return False
    if len(worker.shares) >= worker.beat.row_credit:
        return False
    # With nothing of ours there, growth is no reason to hold back: whoever fits may start.
    room = _spare_blocks(worker) if worker.shares else worker.available_blocks
    return blocks_needed(worker, need) <= room


def _spare_blocks(worker: Worker) -> int:
    """Blocks left once every sequence there has grown by one, so that a new one does not at once
    push out another."""
    return worker.available_blocks - len(worker.shares)
