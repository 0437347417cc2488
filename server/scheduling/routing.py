"""The choice of workers for a request: its decode worker, and whether that one computes the prompt
itself or a prefill worker does (conditional disaggregation).

Up to a number of prompt tokens without KV, decode computes them sooner itself. Only decode knows
how many tokens of a prompt those are, so the number travels with RESERVE and the answer comes back
in GRANT.

For n tokens the sum of waiting is compared, in seconds:

    on decode    a step and a half until it joins, then n tokens at decode's rate and the steps that
                 its chunks ride on; and each running stream waits for the n tokens too
    on prefill   what is before it there, n tokens at prefill's rate, and the way of the KV

Both are lines in n, so the answer is where they cross, within the bounds of the configuration.

Before a prompt are those that are no longer than it: only longer ones are overtaken. So prompts of
one length that come together are shared out between both, and what is short beside a long one goes
to prefill as if that were not there.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.config import LocalPrefill
from triolet.ids import Role
from triolet.service_class import DEFAULT_BAND

from .workers import ejected

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config import RecoveryConfig, RoutingConfig
    from triolet.ids import AttemptKey, PeerId
    from triolet.service_class import Band

    from .workers import PrefixChain, Worker


JOIN_STEPS: Final = 1.5
"""Decode's running step is half done on average when a prompt arrives, and the next one carries
it."""
LEAST_TOKENS_PER_S: Final = 1e-3
"""A slower worker has told nonsense, and what is computed from it would be no number."""


class Why(StrEnum):
    """Why a prompt went where it went."""

    OFF = "off"  # prefill: nothing else was allowed
    LONG = "long"  # prefill: decode would take longer, or cost its streams too much
    SUSPECT = "suspect"  # prefill: it may be what workers die of, and decode has streams to lose
    SHORT = "short"  # decode: it is sooner done there
    NO_PREFILL = "no_prefill"  # decode: no prefill worker is there
    ALWAYS = "always"  # decode: nothing else was allowed
    VECTOR = "vector"  # prefill: no tokens follow
    FORK = "fork"  # decode: it shares the prompt of another completion there


class PrefillRates(NamedTuple):
    """What a prefill worker is like just now.

    Attributes:
      tokens_per_s: that it computes.
      step_s: of its usual step, which is all that overtaking costs.
      tokens_before: that it computes before this prompt's.
      tokens_behind: that it has still to compute besides, of prompts that this one overtakes.
      waiting_prompts: how many these are of.
      handover_s: from its first token until decode has all of the KV.
    """

    tokens_per_s: float
    step_s: float
    tokens_before: int
    tokens_behind: int
    waiting_prompts: int
    handover_s: float


class DecodeRates(NamedTuple):
    """What a decode worker is like just now.

    Attributes:
      tokens_per_s: prompt tokens that it computes, beside its streams.
      step_s: of a step without prompt tokens.
      streams: that run there.
      waiting_tokens: prompt tokens that it has still to compute.
      chunk_tokens: prompt tokens that a step holds.
    """

    tokens_per_s: float
    step_s: float
    streams: int
    waiting_tokens: int
    chunk_tokens: int


def most_local_tokens(decode: DecodeRates, prefill: PrefillRates, config: RoutingConfig) -> int:
    """Return up to how many prompt tokens without KV decode should compute itself.

    Args:
      decode: the worker that would compute them.
      prefill: the worker that would otherwise.
      config: bounds.
    """
    if min(decode.tokens_per_s, prefill.tokens_per_s) < LEAST_TOKENS_PER_S:
        return 0  # nothing is known yet, or nothing of use
    token_s = 1.0 / decode.tokens_per_s
    # Behind other prompts it meets the streams that these will be.
    step_s = decode.step_s if decode.streams or decode.waiting_tokens else 0.0
    chunk_tokens: float = decode.chunk_tokens
    if not decode.streams:
        chunk_tokens -= step_s * decode.tokens_per_s  # what their rows will leave of a step
    chunk_s = step_s / max(chunk_tokens, 1.0)
    overtaken_s = min(prefill.tokens_behind / prefill.tokens_per_s, prefill.step_s)
    ahead_s = prefill.tokens_before / prefill.tokens_per_s + overtaken_s
    on_prefill_s = ahead_s + prefill.handover_s
    on_decode_s = JOIN_STEPS * step_s + decode.waiting_tokens * (token_s + chunk_s)
    per_token_s = token_s + chunk_s + config.stream_weight * decode.streams * token_s
    gained_s = on_prefill_s - on_decode_s
    lost_per_token_s = per_token_s - 1.0 / prefill.tokens_per_s
    if gained_s < 0.0:
        return 0
    crossing = gained_s / lost_per_token_s if lost_per_token_s > 0.0 else math.inf
    harmless = math.inf
    # Flat gaps are for readers, as long as no more than they wait for their first token.
    if decode.streams >= max(prefill.waiting_prompts, 1):
        harmless = config.max_gap_growth * step_s * decode.tokens_per_s - decode.waiting_tokens
    return max(0, int(min(crossing, harmless, config.max_local_tokens)))


def is_within_pace(worker: Worker, num_tokens: int, need: Need) -> bool:
    """Return whether a prefill worker has little enough of ours before a prompt of so many tokens,
    by its own pace: at least two of its steps, of which each server has the share that it has of
    the credit."""
    assert worker.capacity is not None, "only welcomed workers are asked"
    assert worker.beat is not None, "nor those that have not said what they do"
    rate = worker.beat.load.prompt_tokens_per_s
    if need.backlog_s is None or rate <= 0.0:
        return True
    share = worker.beat.token_credit / max(worker.capacity.max_waiting_tokens, 1)
    ahead_s = max(need.backlog_s, 2 * worker.capacity.step_s)
    most = (1.0 - need.kept_share) * min(share, 1.0) * rate * ahead_s
    return tokens_before(worker, num_tokens, need, need.overtaken_s * rate) < most


def tokens_before(worker: Worker, num_tokens: int, need: Need, overtaken_tokens: float) -> int:
    """Return the tokens of ours that a worker has to compute before a prompt.

    Args:
      worker: which computes by band, then the shortest first.
      num_tokens: of the prompt.
      need: of its request.
      overtaken_tokens: a prompt of the same band that is longer than this one and than so many is
        computed beside it, and holds it up no more than a part of each step.
    """
    limit = max(num_tokens, overtaken_tokens)
    return sum(
        share.num_tokens
        for share in worker.shares.values()
        if share.band < need.band or (share.band == need.band and share.num_tokens <= limit)
    )


TOKENS_PER_STREAM: Final = 256
"""Prompt tokens that a decode worker must hold for each stream that it has more than the emptiest
one: KV that does not travel is worth a little, a slower step for all its streams is not."""
TIGHT_SHARE: Final = 1 / 8
"""Of a pool: where less than this would stay free, growing sequences soon push one another out."""
MIN_GAIN_TOKENS: Final = 64
"""Less is not worth a thought: what a few tokens save is not felt, and where blocks are is."""


class Need(NamedTuple):
    """What a request asks for.

    Attributes:
      prompt_tokens: to prefill.
      kv_tokens: prompt and replayed tokens, which decode holds from the start.
      fingerprint: of the model that it began with; empty if it has not begun.
      shunned: addresses of workers where it failed.
      is_isolated: it must not share a worker with another isolated request.
      is_suspect: its prompt may be what a worker died of.
      chain: names the prompt's blocks; None if no worker is asked for them.
      kept_share: of each worker, which is kept for others.
      backlog_s: of computing that a prefill worker may have ahead; None for all of its credit.
      overtaken_s: of computing beyond which a prompt does not count for shorter ones.
      band: what is computed before it, and after it.
      input_share: of prefill's credit that inputs may have; 0 for a request for tokens.
      adapter: digest of the adapter that computes it; empty for the base alone.
    """

    prompt_tokens: int
    kv_tokens: int
    fingerprint: str = ""
    shunned: frozenset[str] = frozenset()
    is_isolated: bool = False
    is_suspect: bool = False
    chain: PrefixChain | None = None
    kept_share: float = 0.0
    backlog_s: float | None = None
    overtaken_s: float = math.inf
    band: Band = DEFAULT_BAND
    input_share: float = 0.0
    adapter: bytes = b""


class BrokenPaths:
    """Prefill and decode workers that lost one another, though both answer this server.

    A partition between two workers shows as a transfer that is given up; neither worker is at
    fault, so no breaker counts it. Pairs of lives, each for a while; no more than there are pairs.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self._avoid_s = config.path_avoid_s
        self._until: dict[tuple[PeerId | None, PeerId | None], float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def broke(self, prefill: Worker, decode: Worker, now: float) -> None:
        """Note that KV does not get from one to the other."""
        self._until[prefill.peer_id, decode.peer_id] = now + self._avoid_s

    def is_broken(self, prefill: Worker, decode: Worker, now: float) -> bool:
        """Return whether other workers should be paired instead."""
        until = self._until.get((prefill.peer_id, decode.peer_id))
        return until is not None and now < until

    def forget(self, now: float) -> None:
        """Drop what is long ago."""
        for path in [path for path, until in self._until.items() if until <= now]:
            del self._until[path]


class Pair(NamedTuple):
    """Where it goes; the same worker twice if decode computes the prompt, or prefill a vector."""

    decode: Worker
    prefill: Worker

    @property
    def is_local(self) -> bool:
        """Whether decode computes the prompt."""
        return self.prefill is self.decode and self.decode.role is Role.DECODE

    def of(self, role: Role) -> Worker:
        """Return the one of this role."""
        return self.decode if role is Role.DECODE else self.prefill


class Route(NamedTuple):
    """Where a request goes, and which worker computes its prompt.

    Attributes:
      pair: of workers.
      local_tokens: decode computes the prompt if no more than these have no KV there.
      why: it would be so, and why it would not.
      fork_of: the attempt there with the same prompt; None for none.
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
    """Return where a request goes now, or None if it has to wait.

    Args:
      workers: every worker.
      need: what it asks for.
      paths: which pairs lost one another.
      config: which roles may compute prompts.
      handover_s: what KV took lately, from prefill's first token until decode had it.
      now: the time.
    """
    workers = tuple(workers)
    if need.input_share:
        return _input_route(workers, need)
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


def _input_route(workers: tuple[Worker, ...], need: Need) -> Route | None:
    """Return the prefill worker that computes an input, or None if it has to wait.

    Inputs take no prompt credit, only a part of it beside, so no prompt waits for them. An input
    larger than that part goes alone. An input that failed once shares no worker with another such
    input: one that makes steps fail would otherwise spend the attempts of its whole batch.
    """
    usable = [worker for worker in workers if worker.is_usable]
    admitted = [w for w in _admitted(usable, Role.PREFILL, need) if w.beat is not None]

    def rank(worker: Worker) -> tuple[bool, int, str]:
        return worker.address in need.shunned, _input_tokens(worker), worker.address

    for worker in sorted(admitted, key=rank):
        assert worker.beat is not None, "see above"
        if need.is_suspect and any(share.is_suspect for share in worker.shares.values()):
            continue
        under_way = _input_tokens(worker)
        credit = need.input_share * worker.beat.token_credit
        if not under_way or under_way + need.prompt_tokens <= credit:
            return Route(Pair(worker, worker), 0, (Why.VECTOR, Why.VECTOR))
    return None


def _input_tokens(worker: Worker) -> int:
    """Return the tokens of this server's inputs on a worker."""
    return sum(share.input_tokens for share in worker.shares.values())


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
    """Return whether some workers could take a request now, on any route."""
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
    """Return the decode worker for a request whose prompt it computes, or None."""
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
    # The length of other servers' prompts is not known: they count as overtaken.
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
    """Return the workers to send a request to, or None if it has to wait."""
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
    """Return whether a request would leave hardly anything for others to grow into."""
    assert worker.capacity is not None, "only welcomed workers are asked"
    left = _spare_blocks(worker) - blocks_needed(worker, need)
    return left < TIGHT_SHARE * worker.capacity.num_blocks


def is_model_gone(workers: Iterable[Worker], need: Need, config: RoutingConfig) -> bool:
    """Return whether a request can never go on: workers of a role that it needs are there, all
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
    """Return the workers of a role that may have this request at all, room or not."""
    pool = [w for w in usable if w.role is role]
    left_out = ejected(pool, lambda w: w.breaker)
    return [
        w
        for w in pool
        if w not in left_out
        and need.fingerprint in ("", w.fingerprint)
        and (not need.adapter or need.adapter in w.adapters)
        and not (need.is_isolated and _has_isolated(w))
    ]


def _has_isolated(worker: Worker) -> bool:
    return any(share.is_isolated for share in worker.shares.values())


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
    """Return whether a decode worker has a row and blocks for a request, as far as is known."""
    if worker.beat is None or now < worker.busy_until:
        return False
    # Of few rows at least one is for every class.
    kept_rows = min(int(need.kept_share * worker.beat.row_credit), worker.beat.row_credit - 1)
    if len(worker.shares) >= worker.beat.row_credit - max(kept_rows, 0):
        return False
    # With nothing of ours there, growth is no reason to hold back: what fits may start.
    room = _spare_blocks(worker) if worker.shares else worker.available_blocks
    if worker.shares and worker.capacity is not None:
        room -= int(need.kept_share * worker.capacity.num_blocks)
    return blocks_needed(worker, need) <= room


def _spare_blocks(worker: Worker) -> int:
    """Blocks left once every sequence there has grown by one, so that a new one does not at once
    push out another."""
    return worker.available_blocks - len(worker.shares)
