"""Chooses workers for a request: the decode worker, and whether that one or a prefill worker
computes the prompt (conditional disaggregation).

Up to some number of prompt tokens without KV, decode computes them sooner itself. Only decode knows
how many tokens lack KV, so the limit travels in RESERVE and the answer comes back in GRANT.

For n tokens the total waiting time in seconds is compared:

    on decode    1.5 steps until the prompt joins, then n tokens at decode's rate plus the steps
                 that its chunks ride on; each running stream also waits for the n tokens
    on prefill   the tokens ahead of it, n tokens at prefill's rate, and the transfer of the KV

Both are linear in n, so the limit is where they cross, within the configured bounds.

Ahead of a prompt are those that are no longer than it; longer ones are overtaken. So prompts of
equal length that arrive together are divided between both kinds of worker, and a short prompt
behind a long one goes to prefill as if the long one were not there.

Both workers are in one zone if possible: moving KV to another zone costs as much as a wait of
`cross_zone_penalty_s`.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.config import LocalPrefill
from triolet.ids import Role
from triolet.service_class import ANYWHERE, DEFAULT_BAND

from .workers import ejected

if TYPE_CHECKING:
    from collections.abc import Collection, Set

    from triolet.config import RoutingConfig
    from triolet.ids import AttemptKey
    from triolet.service_class import Band, Placement

    from .workers import BrokenPaths, PrefixChain, Worker


JOIN_STEPS: Final = 1.5
"""On average decode's running step is half done when a prompt arrives, and the next one carries the
prompt."""
LEAST_TOKENS_PER_S: Final = 1e-3
"""A slower reported rate is bogus, and dividing by it would be meaningless."""


class Why(StrEnum):
    """Why a prompt went to a worker."""

    OFF = "off"  # prefill: local prefill is disabled
    LONG = "long"  # prefill: decode would take longer, or delay its streams too much
    SUSPECT = "suspect"  # prefill: the prompt may crash workers, and decode has streams to lose
    SHORT = "short"  # decode: done sooner there
    NO_PREFILL = "no_prefill"  # decode: no prefill worker is connected
    ALWAYS = "always"  # decode: local prefill is forced
    VECTOR = "vector"  # prefill: an embedding input; no tokens follow
    FORK = "fork"  # decode: shares the prompt of another choice there


class PrefillRates(NamedTuple):
    """A prefill worker's current rates.

    Attributes:
      tokens_per_s: computing rate.
      step_s: duration of its usual step, the whole cost of overtaking.
      tokens_before: tokens computed before this prompt's.
      tokens_behind: other tokens yet to be computed, of prompts that this one overtakes.
      waiting_prompts: number of this server's prompts there.
      handover_s: time from its first token until decode has all of the KV.
    """

    tokens_per_s: float
    step_s: float
    tokens_before: int
    tokens_behind: int
    waiting_prompts: int
    handover_s: float


class DecodeRates(NamedTuple):
    """A decode worker's current rates.

    Attributes:
      tokens_per_s: prompt tokens per second, beside its streams.
      step_s: duration of a step without prompt tokens.
      streams: running streams.
      waiting_tokens: prompt tokens yet to be computed.
      chunk_tokens: prompt tokens that fit a step.
    """

    tokens_per_s: float
    step_s: float
    streams: int
    waiting_tokens: int
    chunk_tokens: int


def most_local_tokens(decode: DecodeRates, prefill: PrefillRates, config: RoutingConfig) -> int:
    """Return the largest number of prompt tokens without KV that decode should compute itself.

    Args:
      decode: the worker that would compute them.
      prefill: the alternative worker.
      config: bounds.
    """
    if min(decode.tokens_per_s, prefill.tokens_per_s) < LEAST_TOKENS_PER_S:
        return 0  # rates are unknown or useless
    token_s = 1.0 / decode.tokens_per_s
    # Behind other prompts it meets the streams that these will become.
    step_s = decode.step_s if decode.streams or decode.waiting_tokens else 0.0
    chunk_tokens: float = decode.chunk_tokens
    if not decode.streams:
        chunk_tokens -= step_s * decode.tokens_per_s  # reserve what their rows will need of a step
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
    # Even token gaps are for readers, as long as there are at least as many as waiting prompts.
    if decode.streams >= max(prefill.waiting_prompts, 1):
        harmless = config.max_gap_growth * step_s * decode.tokens_per_s - decode.waiting_tokens
    return max(0, int(min(crossing, harmless, config.max_local_tokens)))


def is_within_pace(worker: Worker, num_tokens: int, need: Need) -> bool:
    """Return whether a prefill worker has little enough of our work ahead of a prompt of this
    length, by its own pace: at least two of its steps, scaled by this server's share of the
    credit."""
    assert worker.capacity is not None, "only welcomed workers are asked"
    assert worker.beat is not None, "only workers that sent a heartbeat are asked"
    rate = worker.beat.load.prompt_tokens_per_s
    if need.backlog_s is None or rate <= 0.0:
        return True
    share = worker.beat.token_credit / max(worker.capacity.max_waiting_tokens, 1)
    ahead_s = max(need.backlog_s, 2 * worker.capacity.step_s)
    most = (1.0 - need.kept_share) * min(share, 1.0) * rate * ahead_s
    return tokens_before(worker, num_tokens, need, need.overtaken_s * rate) < most


def tokens_before(worker: Worker, num_tokens: int, need: Need, overtaken_tokens: float) -> int:
    """Return our tokens that a worker computes before a prompt.

    Args:
      worker: computes by band, then shortest first.
      num_tokens: the prompt's tokens.
      need: the request's needs.
      overtaken_tokens: a prompt of the same band that is longer than both this one and this limit
        is computed beside it, and delays it by at most a part of each step.
    """
    limit = max(num_tokens, overtaken_tokens)
    return sum(
        share.num_tokens
        for share in worker.shares.values()
        if share.band < need.band or (share.band == need.band and share.num_tokens <= limit)
    )


TOKENS_PER_STREAM: Final = 256
"""Cached prompt tokens that outweigh one stream more than on the emptiest decode worker: reusing KV
saves a transfer, but a slower step costs all streams there."""
TIGHT_SHARE: Final = 1 / 8
"""Share of a pool: with less than this free, growing sequences soon evict each other."""
MIN_GAIN_TOKENS: Final = 64
"""Smallest cached prefix that matters: fewer tokens save nothing noticeable."""


class Need(NamedTuple):
    """What a request needs from workers.

    Attributes:
      prompt_tokens: prompt tokens to prefill.
      kv_tokens: prompt and replayed tokens, which decode holds from the start.
      fingerprint: the model it started with; empty if it has not started.
      shunned: addresses of workers where it failed.
      is_isolated: it must not share a worker with another isolated request.
      is_suspect: its prompt may have crashed a worker.
      chain: names the prompt's blocks; None if caches do not matter.
      kept_share: share of each worker that is reserved for others.
      backlog_s: computing time that a prefill worker may have ahead; None for all of its credit.
      overtaken_s: computing time beyond which a prompt does not delay shorter ones.
      band: position in the order of computing.
      input_share: share of prefill's credit that inputs may use; 0 for a completion.
      adapter: digest of its adapter; empty for the base model.
      cross_zone_s: longest wait that is better than moving its KV to another zone.
      home_zone: the server's zone; empty for none.
      placement: workers that it may use.
      claimed: those of them that an earlier request waits for.
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
    cross_zone_s: float = 0.0
    home_zone: str = ""
    placement: Placement = ANYWHERE
    claimed: Set[Worker] = frozenset()


class Pair(NamedTuple):
    """The workers of an attempt; the same one twice for local prefill and for embedding."""

    decode: Worker
    prefill: Worker

    @property
    def is_local(self) -> bool:
        """Whether decode computes the prompt."""
        return self.prefill is self.decode and self.decode.role is Role.DECODE

    def of(self, role: Role) -> Worker:
        """Return the worker of this role."""
        return self.decode if role is Role.DECODE else self.prefill


class Route(NamedTuple):
    """The workers of a request, and which of them computes its prompt.

    Attributes:
      pair: the workers.
      local_tokens: decode computes the prompt if at most this many tokens have no KV there.
      why: reason if it does, and reason if it does not.
      fork_of: the attempt there with the same prompt; None for none.
    """

    pair: Pair
    local_tokens: int
    why: tuple[Why, Why]
    fork_of: AttemptKey | None = None


def choose_route(
    workers: Collection[Worker],
    need: Need,
    paths: BrokenPaths,
    config: RoutingConfig,
    handover_s: float,
    now: float,
) -> Route | None:
    """Return the route of a request; None if it must wait.

    Args:
      workers: the workers that it may use.
      need: the request's needs.
      paths: pairs that cannot reach each other.
      config: which roles may compute prompts.
      handover_s: recent time from prefill's first token until decode had the KV.
    """
    if need.input_share:
        return _input_route(workers, need)
    need = need._replace(
        backlog_s=config.backlog_s,
        overtaken_s=config.overtaken_s,
        cross_zone_s=config.cross_zone_penalty_s,
    )
    if config.local_prefill is LocalPrefill.OFF:
        return _over_prefill(workers, need, paths, Why.OFF, now)
    if config.local_prefill is LocalPrefill.ALWAYS:
        return _local(choose_decode(workers, need, now), need, Why.ALWAYS)
    why = Why.SUSPECT if need.is_suspect else Why.LONG
    route = _over_prefill(workers, need, paths, why, now)
    if route is not None and not need.is_suspect:
        decode, prefill = route.pair
        local_tokens = _most_local_tokens(decode, prefill, need, config, handover_s)
        return route._replace(local_tokens=local_tokens)
    grace_s = config.suspect_grace_s if need.is_suspect else config.prefill_grace_s
    if route is None and is_prefill_away(workers, grace_s, now):
        return _local(choose_decode(workers, need, now), need, Why.NO_PREFILL)
    if need.is_suspect:
        return route
    decode_worker = choose_decode(workers, need, now)
    busy = [w for w in workers if w.role is Role.PREFILL and w.is_usable]
    if decode_worker is None or not busy:
        return None
    # Prefill takes no more at the moment; a short prompt need not wait for it.
    least_busy = min(busy, key=lambda worker: worker.waiting_tokens)
    local_tokens = _most_local_tokens(decode_worker, least_busy, need, config, handover_s)
    if tokens_to_compute(decode_worker, need) > local_tokens:
        return None
    return _local(decode_worker, need, Why.SHORT)


def _input_route(workers: Collection[Worker], need: Need) -> Route | None:
    """Return the prefill worker that computes an input; None if it must wait.

    Inputs use a share of the credit beside prompts, so no prompt waits for them. An input larger
    than that share runs alone. An input that failed once shares no worker with another such input:
    one that makes steps fail would otherwise use up the attempts of its whole batch.
    """
    admitted = [w for w in _admitted(workers, Role.PREFILL, need) if w.beat is not None]

    def rank(worker: Worker) -> tuple[bool, int, str]:
        return worker.address in need.shunned, _input_tokens(worker), worker.address

    for worker in sorted(admitted, key=rank):
        assert worker.beat is not None, "filtered above"
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


def is_prefill_away(workers: Collection[Worker], grace_s: float, now: float) -> bool:
    """Return whether no prefill worker that matches a decode worker is, or was until just now,
    connected."""
    models = {w.fingerprint for w in workers if w.role is Role.DECODE and w.is_usable}
    prefills = [w for w in workers if w.role is Role.PREFILL]
    since = [w.missing_since for w in prefills if w.missing_since is not None]
    matching = [w for w in prefills if w.fingerprint in models]
    is_here = any(w.is_connected and not w.is_draining for w in matching)
    return not is_here and (not since or now - max(since) >= grace_s)


def is_ready(workers: Collection[Worker], config: RoutingConfig, now: float) -> bool:
    """Return whether some workers can take a request now, on any route."""
    models = {
        role: {w.fingerprint for w in workers if w.role is role and w.is_usable}
        for role in (Role.PREFILL, Role.DECODE)
    }
    if models[Role.PREFILL] & models[Role.DECODE]:
        return True
    if config.local_prefill is LocalPrefill.OFF or not models[Role.DECODE]:
        return False
    is_always = config.local_prefill is LocalPrefill.ALWAYS
    return is_always or is_prefill_away(workers, config.prefill_grace_s, now)


def choose_decode(workers: Collection[Worker], need: Need, now: float) -> Worker | None:
    """Return the decode worker for a request with local prefill, or None."""
    decodes = [w for w in _admitted(workers, Role.DECODE, need) if has_room(w, need, now)]
    return next(iter(_ranked(decodes, need)), None)


def _over_prefill(
    workers: Collection[Worker], need: Need, paths: BrokenPaths, why: Why, now: float
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
    """Return the limit from the rates that both announced and what this server has sent since."""
    of_decode, of_prefill = decode.load, prefill.load
    # The length of other servers' prompts is unknown: count them as overtaken.
    waiting_tokens = max(of_prefill.waiting_tokens, prefill.waiting_tokens)
    prompts = [share.num_tokens for share in prefill.shares.values() if share.num_tokens]
    longest = counted_tokens(prefill, need)
    if is_across(prefill, decode):
        handover_s += need.cross_zone_s
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
    """Return the number of blocks that hold this many tokens."""
    return -(-num_tokens // block_size)


def choose_pair(
    workers: Collection[Worker], need: Need, paths: BrokenPaths, now: float
) -> Pair | None:
    """Return the workers for a request; None if it must wait. If the best pair spans two zones, an
    equally good decode worker with a prefill worker in its own zone is preferred."""
    prefills = [w for w in _admitted(workers, Role.PREFILL, need) if _has_token_credit(w, need)]
    decodes = [w for w in _admitted(workers, Role.DECODE, need) if has_room(w, need, now)]
    last_choice = across = None
    for decode in _ranked(decodes, need):

        def rank(
            worker: Worker, decode: Worker = decode
        ) -> tuple[bool, tuple[bool, float], bool, str]:
            """Return what is compared, after broken paths: tokens to compute until decode has the
            KV. Workers where it failed come last."""
            tokens: float = worker.waiting_tokens + tokens_to_compute(worker, need)
            if is_far := is_across(worker, decode):
                rate = worker.load.prompt_tokens_per_s
                tokens += need.cross_zone_s * rate if rate else math.inf
            cost = worker.address in need.shunned, tokens
            return paths.is_broken(worker, decode, now), cost, is_far, worker.address

        ranked = [(rank(w), w) for w in prefills if w.fingerprint == decode.fingerprint]
        if not ranked:
            continue
        (is_broken, its_cost, is_far, _), prefill = min(ranked)
        pair = Pair(decode, prefill)
        if is_broken:
            last_choice = last_choice or pair
        elif across is None and is_far:
            across, most, merit = pair, its_cost, _merit(decode, need)
        elif across is None or (not is_far and its_cost <= most and _merit(decode, need) <= merit):
            return pair
    return across or last_choice


def is_across(prefill: Worker, decode: Worker) -> bool:
    """Return whether KV moves between zones on this route."""
    return prefill.site.zone != decode.site.zone


def _merit(decode: Worker, need: Need) -> tuple[bool, bool, int]:
    """Return how well a decode worker suits a request; lower is better."""
    held_tokens = decode.prefixes.held_tokens(need.chain, decode.capacity)
    return decode.address in need.shunned, _is_tight(decode, need), -held_tokens


def tokens_to_compute(worker: Worker, need: Need) -> int:
    """Return how many prompt tokens a worker would probably have to compute."""
    return max(1, need.prompt_tokens - worker.prefixes.held_tokens(need.chain, worker.capacity))


def counted_tokens(worker: Worker, need: Need) -> int:
    """Return the prefill credit that a prompt uses: at least half of its length, because cache
    contents are a guess, and workers refuse what exceeds their credit twofold."""
    return max(tokens_to_compute(worker, need), need.prompt_tokens // 2)


def _ranked(decodes: list[Worker], need: Need) -> list[Worker]:
    """Return decode workers, best first."""
    fewest = min((streams_on(worker) for worker in decodes), default=0)

    def rank(worker: Worker) -> tuple[bool, bool, int, int, bool, int, str]:
        streams = streams_on(worker)
        held_tokens = worker.prefixes.held_tokens(need.chain, worker.capacity)
        gain = held_tokens - TOKENS_PER_STREAM * (streams - fewest)
        return (
            worker.address in need.shunned,
            _is_tight(worker, need),
            -gain if gain >= MIN_GAIN_TOKENS else 0,
            streams,
            need.home_zone not in ("", worker.site.zone),
            -_spare_blocks(worker),
            worker.address,
        )

    return sorted(decodes, key=rank)


def streams_on(worker: Worker) -> int:
    """Return the number of sequences on a worker, this server's and others'."""
    return len(worker.shares) + worker.foreign_streams


def _is_tight(worker: Worker, need: Need) -> bool:
    """Return whether a request would leave too little room for sequences to grow."""
    capacity = worker.capacity
    assert capacity is not None, "only welcomed workers are asked"
    left = _spare_blocks(worker) - blocks_for(need.kv_tokens, capacity.block_size)
    return left < TIGHT_SHARE * capacity.num_blocks


def is_model_gone(workers: Collection[Worker], need: Need, config: RoutingConfig) -> bool:
    """Return whether a request can never continue: a role that it needs has workers, but all with
    another model than the one it started with."""
    if not need.fingerprint:
        return False
    for role in needed_roles(config):
        present = [w.fingerprint for w in workers if w.role is role and w.is_connected]
        if present and need.fingerprint not in present:
            return True
    return False


def needed_roles(config: RoutingConfig) -> tuple[Role, ...]:
    """Return the roles without which no request can run."""
    if config.local_prefill is LocalPrefill.OFF:
        return (Role.PREFILL, Role.DECODE)
    return (Role.DECODE,)


def _admitted(workers: Collection[Worker], role: Role, need: Need) -> list[Worker]:
    """Return the usable workers of a role that this request may use, even if they have no room."""
    pool = [w for w in workers if w.role is role and w.is_usable]
    left_out = ejected(pool)
    return [
        w
        for w in pool
        if (w not in left_out or w.has_share_left)
        and w not in need.claimed
        and need.fingerprint in ("", w.fingerprint)
        and (not need.adapter or need.adapter in w.adapters)
        and not (need.is_isolated and _has_isolated(w))
    ]


def _has_isolated(worker: Worker) -> bool:
    return any(share.is_isolated for share in worker.shares.values())


def _has_token_credit(worker: Worker, need: Need) -> bool:
    """Return whether a prefill worker accepts these tokens: within its credit, or alone if they
    exceed all of its credit."""
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
    # Keep at least one row open to every class.
    kept_rows = min(int(need.kept_share * worker.beat.row_credit), worker.beat.row_credit - 1)
    if len(worker.shares) >= worker.beat.row_credit - max(kept_rows, 0):
        return False
    # If none of ours run there, ignore growth: whatever fits may start.
    room = _spare_blocks(worker) if worker.shares else worker.available_blocks
    if worker.shares and worker.capacity is not None:
        room -= int(need.kept_share * worker.capacity.num_blocks)
    return blocks_needed(worker, need) <= room


def _spare_blocks(worker: Worker) -> int:
    """Return the blocks left once every sequence there has grown by one block, so that a new one
    does not evict another at once."""
    return worker.available_blocks - len(worker.shares)
