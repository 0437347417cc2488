"""Which decode and which prefill worker a sequence goes to, and which goes without the latter.

Pure functions of the workers' announcements. Decode: fewest streams, for each makes the step of all
others longer, unless another one holds enough of the prompt to make up for the streams that it has
more; whose pool is nearly full comes last. Prefill: fewest prompt tokens to compute until this
prompt is done. So a prefix draws prompts to where it is until they are sooner done elsewhere. Both
must hold the same model, or the KV of one would mean nothing to the other. Where decode computes
the prompt itself (routing.py), it is both of the pair.

Workers whose breakers are open are left out, up to half of a role. Where a sequence failed before,
and pairs that lost one another, are the last choice: better than to wait.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.config_routing import LocalPrefill
from triolet.ids import Role
from triolet.service_class import ServiceClass

from .backlog import is_within_pace
from .breaker import ejected
from .routing import DecodeRates, PrefillRates, Why, most_local_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config_routing import RoutingConfig
    from triolet.ids import AttemptKey

    from .paths import BrokenPaths
    from .prefixes import PrefixChain
    from .workers import Worker


TOKENS_PER_STREAM: Final = 256
"""Prompt tokens that a decode worker must hold for each stream that it has more than the emptiest
one: KV that does not travel is worth a little, a slower step for everybody is not."""
TIGHT_SHARE: Final = 1 / 8
"""Of a pool: where less than this would stay free, growing sequences soon push one another out."""
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
      is_suspect: its prompt may be what a worker died of.
      chain: names the prompt's blocks; None if nobody is asked for them.
      kept_share: of each worker, which is kept for others.
      backlog_s: of computing that a prefill worker may have ahead; None for all of its credit.
      overtaken_s: of computing beyond which a prompt does not count for shorter ones.
      service_class: the request's.
    """

    prompt_tokens: int
    kv_tokens: int
    fingerprint: str = ""
    shunned: frozenset[str] = frozenset()
    is_on_probation: bool = False
    is_suspect: bool = False
    chain: PrefixChain | None = None
    kept_share: float = 0.0
    backlog_s: float | None = None
    overtaken_s: float = math.inf
    service_class: ServiceClass = ServiceClass.DEFAULT


class Pair(NamedTuple):
    """Where it goes; the same worker twice if decode computes the prompt."""

    decode: Worker
    prefill: Worker

    @property
    def is_local(self) -> bool:
        """Whether decode computes the prompt."""
        return self.prefill is self.decode

    def of(self, role: Role) -> Worker:
        """Return the one of this role."""
        return self.decode if role is Role.DECODE else self.prefill


class Route(NamedTuple):
    """Where a sequence goes, and who computes its prompt.

    Attributes:
      pair: of workers.
      local_tokens: decode computes the prompt if no more than these have no KV there.
      why: it would be so, and why it would not.
      fork_of: the attempt there whose prompt it shares; None for none.
    """

    pair: Pair
    local_tokens: int
    why: tuple[Why, Why]
    fork_of: AttemptKey | None = None


def choose_route(
    workers: Iterable[Worker],
    need: Need,
    paths: BrokenPaths,
    config: RoutingConfig,
    handover_s: float,
    now: float,
) -> Route | None:
    """Return where a sequence goes now, or None if it has to wait.

    Args:
      workers: every worker.
      need: what it asks for.
      paths: which pairs lost one another.
      config: who may compute prompts.
      handover_s: what KV took lately, from prefill's first token until decode had it.
      now: the time.
    """
    workers = tuple(workers)
    need = need._replace(backlog_s=config.backlog_s, overtaken_s=config.overtaken_s)
    if config.local_prefill is LocalPrefill.OFF:
        return _over_prefill(workers, need, paths, Why.OFF, now)
    if config.local_prefill is LocalPrefill.ALWAYS:
        return _local(choose_decode(workers, need, now), need, Why.ALWAYS)
    grace_s = config.suspect_grace_s if need.is_suspect else config.prefill_grace_s
    if is_prefill_away(workers, grace_s, now):
        return _local(choose_decode(workers, need, now), need, Why.NO_PREFILL)
    if need.is_suspect:
        return _over_prefill(workers, need, paths, Why.SUSPECT, now)
    route = _over_prefill(workers, need, paths, Why.LONG, now)
    if route is not None:
        decode, prefill = route.pair
        local_tokens = _most_local_tokens(decode, prefill, need, config, handover_s)
        return route._replace(local_tokens=local_tokens)
    decode_worker = choose_decode(workers, need, now)
    busy = [w for w in workers if w.role is Role.PREFILL and w.is_usable]
    if decode_worker is None or not busy:
        return None
    # Prefill takes nothing more at the moment; what is short need not wait for it.
    least_busy = min(busy, key=lambda worker: worker.waiting_tokens)
    local_tokens = _most_local_tokens(decode_worker, least_busy, need, config, handover_s)
    if tokens_to_compute(decode_worker, need) > local_tokens:
        return None
    return _local(decode_worker, need, Why.SHORT)


def is_prefill_away(workers: Iterable[Worker], grace_s: float, now: float) -> bool:
    """Return whether no prefill worker is there that some decode worker could work with, nor was
    one until just now."""
    workers = tuple(workers)
    models = {w.fingerprint for w in workers if w.role is Role.DECODE and w.is_usable}
    for worker in workers:
        if worker.role is not Role.PREFILL:
            continue
        if worker.is_connected and not worker.is_draining and worker.fingerprint in models:
            return False
        if worker.missing_since is not None and now - worker.missing_since < grace_s:
            return False
    return True


def is_ready(workers: Iterable[Worker], config: RoutingConfig, now: float) -> bool:
    """Return whether some workers could take a request now, whoever computes its prompt."""
    workers = tuple(workers)
    models = {
        role: {w.fingerprint for w in workers if w.role is role and w.is_usable}
        for role in (Role.PREFILL, Role.DECODE)
    }
    if models[Role.PREFILL] & models[Role.DECODE]:
        return True
    match config.local_prefill:
        case LocalPrefill.OFF:
            is_local = False
        case LocalPrefill.AUTO:
            is_local = is_prefill_away(workers, config.prefill_grace_s, now)
        case LocalPrefill.ALWAYS:
            is_local = True
    return is_local and bool(models[Role.DECODE])


def choose_decode(workers: Iterable[Worker], need: Need, now: float) -> Worker | None:
    """Return the decode worker for a sequence whose prompt it computes, or None."""
    usable = [w for w in workers if w.is_usable]
    decodes = [w for w in _admitted(usable, Role.DECODE, need) if has_room(w, need, now)]
    return next(iter(_ranked(decodes, need)), None)


def _over_prefill(
    workers: Iterable[Worker], need: Need, paths: BrokenPaths, why: Why, now: float
) -> Route | None:
    pair = choose_pair(workers, need, paths, now)
    return None if pair is None else Route(pair, 0, (Why.SHORT, why))


def _local(decode: Worker | None, need: Need, why: Why) -> Route | None:
    if decode is None:
        return None
    return Route(Pair(decode, decode), need.prompt_tokens, (why, why))


def _most_local_tokens(
    decode: Worker, prefill: Worker, need: Need, config: RoutingConfig, handover_s: float
) -> int:
    """Return what the rates say that both announced, and what this server has sent them since."""
    of_decode, of_prefill = decode.load, prefill.load
    # How long other servers' prompts are nobody has said: they count as overtaken.
    waiting_tokens = max(of_prefill.waiting_tokens, prefill.waiting_tokens)
    prompts = [share.num_tokens for share in prefill.shares.values() if share.num_tokens]
    longest = counted_tokens(prefill, need)
    tokens_before = sum(num_tokens for num_tokens in prompts if num_tokens <= longest)
    return most_local_tokens(
        DecodeRates(
            of_decode.prompt_tokens_per_s,
            of_decode.step_s,
            of_decode.running,
            max(of_decode.local_tokens, decode.waiting_tokens),
            of_decode.chunk_tokens,
        ),
        PrefillRates(
            of_prefill.prompt_tokens_per_s,
            of_prefill.step_s,
            tokens_before,
            waiting_tokens - tokens_before,
            len(prompts),
            handover_s,
        ),
        config,
    )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_size)


def choose_pair(
    workers: Iterable[Worker], need: Need, paths: BrokenPaths, now: float
) -> Pair | None:
    """Return the workers to send a sequence to, or None if it has to wait."""
    usable = [w for w in workers if w.is_usable]
    prefills = [w for w in _admitted(usable, Role.PREFILL, need) if _has_token_credit(w, need)]
    decodes = [w for w in _admitted(usable, Role.DECODE, need) if has_room(w, need, now)]
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
    fewest = min((streams_on(worker) for worker in decodes), default=0)

    def rank(worker: Worker) -> tuple[bool, bool, int, int, int, str]:
        is_shunned = worker.address in need.shunned
        crowd = TOKENS_PER_STREAM * (streams_on(worker) - fewest)
        gain = worker.prefixes.held_tokens(need.chain, worker.capacity) - crowd
        gain = gain if gain >= MIN_GAIN_TOKENS else 0
        spare = _spare_blocks(worker)
        return (
            is_shunned,
            _is_tight(worker, need),
            -gain,
            streams_on(worker),
            -spare,
            worker.address,
        )

    return sorted(decodes, key=rank)


def streams_on(worker: Worker) -> int:
    """Return how many sequences are there, of this server and of others."""
    return len(worker.shares) + worker.foreign_streams


def _is_tight(worker: Worker, need: Need) -> bool:
    """Return whether a sequence would leave hardly anything for others to grow into."""
    assert worker.capacity is not None, "only welcomed workers are asked"
    left = _spare_blocks(worker) - blocks_needed(worker, need)
    return left < TIGHT_SHARE * worker.capacity.num_blocks


def is_model_gone(workers: Iterable[Worker], need: Need, config: RoutingConfig) -> bool:
    """Return whether a sequence can never go on: workers of a role that it needs are there, all
    with another model than it began with."""
    if not need.fingerprint:
        return False
    workers = tuple(workers)
    for role in needed_roles(config):
        present = [w.fingerprint for w in workers if w.role is role and w.is_connected]
        if present and need.fingerprint not in present:
            return True
    return False


def needed_roles(config: RoutingConfig) -> tuple[Role, ...]:
    """Return the roles without which nothing goes."""
    if config.local_prefill is LocalPrefill.OFF:
        return (Role.PREFILL, Role.DECODE)
    return (Role.DECODE,)


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
    credit = (1.0 - need.kept_share) * worker.beat.token_credit
    waiting = worker.waiting_tokens
    if credit <= 0 or waiting == 0:
        return credit > 0
    tokens = counted_tokens(worker, need)
    return waiting + tokens <= credit and is_within_pace(worker, tokens, need)


def blocks_needed(worker: Worker, need: Need) -> int:
    """Return the blocks that decode must lease at once."""
    assert worker.capacity is not None, "only welcomed workers are asked"
    return blocks_for(need.kv_tokens, worker.capacity.block_size)


def has_room(worker: Worker, need: Need, now: float) -> bool:
    """Return whether a decode worker has a row and blocks for a sequence, as far as is known."""
    if worker.beat is None or now < worker.busy_until:
        return False
    # Of few rows at least one is for anybody.
    kept_rows = min(int(need.kept_share * worker.beat.row_credit), worker.beat.row_credit - 1)
    if len(worker.shares) >= worker.beat.row_credit - max(kept_rows, 0):
        return False
    # With nothing of ours there, growth is no reason to hold back: whoever fits may start.
    room = _spare_blocks(worker) if worker.shares else worker.available_blocks
    if worker.shares and worker.capacity is not None:
        room -= int(need.kept_share * worker.capacity.num_blocks)
    return blocks_needed(worker, need) <= room


def _spare_blocks(worker: Worker) -> int:
    """Blocks left once every sequence there has grown by one, so that a new one does not at once
    push out another."""
    return worker.available_blocks - len(worker.shares)
