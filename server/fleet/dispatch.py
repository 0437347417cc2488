"""Which decode and which prefill worker a sequence goes to.

Pure functions of the workers' announcements. Decode: most blocks left after what is reserved and
what running sequences will grow by, unless another one holds enough of the prompt to make up for
the streams that it has more. Prefill: fewest prompt tokens to compute until this prompt is done. So
a prefix draws prompts to where it is until they are sooner done elsewhere. Both must hold the same
model, or the KV of one would mean nothing to the other.

Workers whose breakers are open are left out, up to half of a role. Where a sequence failed before,
and pairs that lost one another, are the last choice: better than to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.ids import Role

from .breaker import ejected

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .paths import BrokenPaths
    from .prefixes import PrefixChain
    from .workers import Worker


TOKENS_PER_STREAM: Final = 256
"""Prompt tokens that a decode worker must hold for each stream that it has more than the emptiest
one: KV that does not travel is worth a little, a slower step for everybody is not."""
MIN_GAIN_TOKENS: Final = 64
"""Less is not worth a thought: what a few tokens save is not felt, and where blocks are is."""


class Need(NamedTuple):
    """What a sequence asks for.

    Attributes:
      prompt_tokens: to prefill.
      kv_tokens: prompt and replayed tokens, which decode holds from the start.
      fingerprint: of the model that it began with; empty if it has not begun.
      shunned: addresses of workers where it failed.
      is_on_probation: it must not share a worker with another one that is.
      chain: names the prompt's blocks; None if nobody is asked for them.
    """

    prompt_tokens: int
    kv_tokens: int
    fingerprint: str = ""
    shunned: frozenset[str] = frozenset()
    is_on_probation: bool = False
    chain: PrefixChain | None = None


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
    for decode in _ranked(decodes, need):

        def prefill_rank(worker: Worker, decode: Worker = decode) -> tuple[bool, bool, int, str]:
            is_broken = paths.is_broken(worker, decode, now)
            is_shunned = worker.address in need.shunned
            tokens = worker.waiting_tokens + tokens_to_compute(worker, need)
            return is_broken, is_shunned, tokens, worker.address

        same_model = [w for w in prefills if w.fingerprint == decode.fingerprint]
        if same_model:
            pair = Pair(decode, min(same_model, key=prefill_rank))
            if not paths.is_broken(pair.prefill, decode, now):
                return pair
            last_choice = last_choice or pair
    return last_choice


def tokens_to_compute(worker: Worker, need: Need) -> int:
    """Return how many prompt tokens a worker would probably have to compute."""
    return max(1, need.prompt_tokens - worker.prefixes.held_tokens(need.chain, worker.capacity))


def counted_tokens(worker: Worker, need: Need) -> int:
    """Return what a prompt takes of a prefill worker's credit: at least half of it, because workers
    turn away what overruns their credit twice, and what they hold is only a guess."""
    return max(tokens_to_compute(worker, need), need.prompt_tokens // 2)


def _ranked(decodes: list[Worker], need: Need) -> list[Worker]:
    """Return decode workers, the best first."""
    fewest = min((len(worker.shares) for worker in decodes), default=0)

    def rank(worker: Worker) -> tuple[bool, int, int, str]:
        crowd = TOKENS_PER_STREAM * (len(worker.shares) - fewest)
        gain = worker.prefixes.held_tokens(need.chain, worker.capacity) - crowd
        gain = gain if gain >= MIN_GAIN_TOKENS else 0
        return worker.address in need.shunned, -gain, -_spare_blocks(worker), worker.address

    return sorted(decodes, key=rank)


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
    return credit > 0 and (waiting == 0 or waiting + counted_tokens(worker, need) <= credit)


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
