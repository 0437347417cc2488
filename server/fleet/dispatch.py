"""Which decode and which prefill worker a sequence goes to.

Pure functions of the workers' announcements. Decode: most blocks left after what is reserved and
what running sequences will grow by. Prefill: fewest prompt tokens to compute. Both must hold the
same model, or the KV of one would mean nothing to the other.

Workers whose breakers are open are left out, up to half of a role. Where a sequence failed before,
and pairs that lost one another, are the last choice: better than to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triolet.ids import Role

from .breaker import ejected

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .paths import BrokenPaths
    from .workers import Worker


class Need(NamedTuple):
    """What a sequence asks for.

    Attributes:
      prompt_tokens: to prefill.
      kv_tokens: prompt and replayed tokens, which decode holds from the start.
      fingerprint: of the model that it began with; empty if it has not begun.
      shunned: addresses of workers where it failed.
      is_on_probation: it must not share a worker with another one that is.
    """

    prompt_tokens: int
    kv_tokens: int
    fingerprint: str = ""
    shunned: frozenset[str] = frozenset()
    is_on_probation: bool = False


class Pair(NamedTuple):
    """Where it goes."""

    decode: Worker
    prefill: Worker

    def of(self, role: Role) -> Worker:
        """Return the one of this role."""
        return self.decode if role is Role.DECODE else self.prefill


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_size)


def choose_pair(
    workers: Iterable[Worker], need: Need, paths: BrokenPaths, now: float
) -> Pair | None:
    """Return the workers to send a sequence to, or None if it has to wait."""
    usable = [w for w in workers if w.is_usable]
    prefills = [w for w in _admitted(usable, Role.PREFILL, need) if _has_token_credit(w, need)]
    decodes = [w for w in _admitted(usable, Role.DECODE, need) if _has_room(w, need, now)]
    last_choice = None

    def decode_rank(worker: Worker) -> tuple[bool, int, str]:
        return worker.address in need.shunned, -_spare_blocks(worker), worker.address

    for decode in sorted(decodes, key=decode_rank):

        def prefill_rank(worker: Worker, decode: Worker = decode) -> tuple[bool, bool, int, str]:
            is_broken = paths.is_broken(worker, decode, now)
            is_shunned = worker.address in need.shunned
            return is_broken, is_shunned, worker.waiting_tokens, worker.address

        same_model = [w for w in prefills if w.fingerprint == decode.fingerprint]
        if same_model:
            pair = Pair(decode, min(same_model, key=prefill_rank))
            if not paths.is_broken(pair.prefill, decode, now):
                return pair
            last_choice = last_choice or pair
    return last_choice


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


def _admitted(usable: list[Worker], role: Role, need: Need) -> list[Worker]:
    """Return the workers of a role that may have this sequence at all, room or not."""
    pool = [w for w in usable if w.role is role]
    left_out = ejected(pool, lambda w: w.breaker)
    return [
        w
        for w in pool
        if w not in left_out
        and need.fingerprint in ("", w.fingerprint)
        and not (need.is_on_probation and _has_probation(w))
    ]


def _has_probation(worker: Worker) -> bool:
    return any(share.is_on_probation for share in worker.shares.values())


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
