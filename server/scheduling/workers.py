"""`Worker`, the server's view of one worker: liveness, circuit breaker, attempts, and a guess of
its prefix cache. Also `BrokenPaths`, pairs of workers that cannot reach each other.

The guess is based on the prompts that were sent to the worker, with the same LRU eviction as there.
A wrong guess changes no answer: decode reports its cached tokens in GRANT, and prefill looks up its
own cache. A hash collision of two prefixes only sends a prompt to the wrong worker. The hash is
Python's hash of bytes, with a new key in each process.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from transport.frames import Load
from transport.liveness import PeerMonitor, PeerState
from triolet.adapter_keys import without_mark
from triolet.errors import LocalProtocolError
from triolet.ids import Role
from triolet.service_class import DEFAULT_BAND

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transport.frames import Capacity, Welcome, WorkerHeartbeat
    from triolet.config import LinkConfig, RecoveryConfig
    from triolet.ids import AttemptKey, PeerId
    from triolet.service_class import Band


class PrefixChain:
    """The blocks of one prompt, each named by a hash of all tokens up to its end.

    Args:
      token_ids: the prompt's tokens.
      cache_key: the cache's key, derived from salt and adapter.
    """

    def __init__(self, token_ids: Iterable[int], cache_key: bytes) -> None:
        self._packed = array("I", token_ids).tobytes()
        self._cache_key = cache_key
        self._names: dict[int, tuple[int, ...]] = {}

    def names(self, block_size: int) -> tuple[int, ...]:
        """Return the names of the full blocks, last block first: the blocks that a worker holds
        are then at the end, where `bisect` finds them by membership alone."""
        names = self._names.get(block_size)
        if names is None:
            names = self._names[block_size] = self._chain(4 * block_size)
        return names

    def _chain(self, block_bytes: int) -> tuple[int, ...]:
        names = []
        name = hash(self._cache_key)
        for end in range(block_bytes, len(self._packed) + 1, block_bytes):
            name = hash((name, self._packed[end - block_bytes : end]))
            names.append(name)
        return tuple(reversed(names))


PrefixHolders: TypeAlias = "dict[int, tuple[Worker, ...]]"
"""The workers of one role that probably hold a prefix block, by the block's name."""


class PrefixIndex:
    """The prefix blocks of prompts sent to a worker recently, since it started.

    Args:
      owner: the worker.

    Attributes:
      holders: index of all workers' blocks, shared by the workers of one role.
    """

    def __init__(self, owner: Worker) -> None:
        self._recent: dict[int, None] = {}  # least recently used first
        self._owner = owner
        self.holders: PrefixHolders = {}

    def __len__(self) -> int:
        return len(self._recent)

    def num_held(self, names: Sequence[int]) -> int:
        """Return how many leading blocks of a chain the worker probably holds."""
        # A prompt's start is evicted after its end, so the held blocks are the first ones.
        return len(names) - bisect_left(names, True, key=self._recent.__contains__)

    def note(self, names: Sequence[int], num_blocks: int) -> None:
        """Record that the worker has these blocks of a chain; drop the oldest beyond its pool of
        `num_blocks`."""
        for name in names:
            if name not in self._recent:
                self.holders[name] = (*self.holders.get(name, ()), self._owner)
            self._recent.pop(name, None)
            self._recent[name] = None
        while len(self._recent) > num_blocks:
            self._drop(next(iter(self._recent)))

    def held_tokens(self, chain: PrefixChain | None, capacity: Capacity | None) -> int:
        """Return how many leading tokens of a prompt a worker of this capacity probably holds."""
        if chain is None or capacity is None:
            return 0
        return capacity.block_size * self.num_held(chain.names(capacity.block_size))

    def keep(self, chain: PrefixChain, capacity: Capacity | None) -> None:
        """Record that a worker of this capacity has the KV of a whole prompt."""
        if capacity is not None:
            self.note(chain.names(capacity.block_size), capacity.num_blocks)

    def clear(self) -> None:
        """Forget all blocks, because the worker restarted or left."""
        for name in tuple(self._recent):
            self._drop(name)

    def _drop(self, name: int) -> None:
        del self._recent[name]
        others = tuple(one for one in self.holders.pop(name) if one is not self._owner)
        if others:
            self.holders[name] = others


MAX_OUTCOMES: Final = 20
"""Number of remembered outcomes; the breaker opens if half of them are failures."""


class BreakerState(Enum):
    """What a worker may be given."""

    CLOSED = "closed"  # anything
    OPEN = "open"  # nothing
    HALF_OPEN = "half_open"  # one attempt at a time, until one has an outcome


class BreakerEvent(Enum):
    """What changes the state of a breaker."""

    TRIPPED = "tripped"  # too many recent outcomes are failures
    COOLED = "cooled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RESET = "reset"  # the worker restarted


_S, _E = BreakerState, BreakerEvent

TRANSITIONS: Final[Mapping[BreakerState, Mapping[BreakerEvent, BreakerState]]] = {
    _S.CLOSED: {
        _E.TRIPPED: _S.OPEN,
        _E.SUCCEEDED: _S.CLOSED,
        _E.FAILED: _S.CLOSED,
        _E.RESET: _S.CLOSED,
    },
    # Attempts that started before it opened, or that it gets because half the pool must stay, prove
    # nothing.
    _S.OPEN: {
        _E.COOLED: _S.HALF_OPEN,
        _E.SUCCEEDED: _S.OPEN,
        _E.FAILED: _S.OPEN,
        _E.RESET: _S.CLOSED,
    },
    _S.HALF_OPEN: {_E.SUCCEEDED: _S.CLOSED, _E.FAILED: _S.OPEN, _E.RESET: _S.CLOSED},
}


def next_state(state: BreakerState, event: BreakerEvent) -> BreakerState:
    """Return the next state.

    Raises:
      LocalProtocolError: no such transition.
    """
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise LocalProtocolError(f"a breaker that is {state.value} cannot be {event.value}")
    return following


class Breaker:
    """The circuit breaker of one worker, reset when the worker restarts.

    Attributes:
      state: the state after the last call.
      opened_at: time when it last opened.
      probe: the attempt that tests the worker while HALF_OPEN.
      share: share of its usual work that the worker gets while its zone returns; else 1.
      confined_at: time when `share` was last 1.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self.state = BreakerState.CLOSED
        self.opened_at = 0.0
        self.probe: AttemptKey | None = None
        self.share = 1.0
        self.confined_at = 0.0
        self._config = config
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=MAX_OUTCOMES)
        self._cooldown_s = config.breaker_cooldown_s

    @property
    def is_admitting(self) -> bool:
        """Whether the worker may get an attempt."""
        is_free_to_try = self.state is BreakerState.HALF_OPEN and self.probe is None
        return self.state is BreakerState.CLOSED or is_free_to_try

    @property
    def is_whole(self) -> bool:
        """Whether the worker may get all of its usual work."""
        return self.share >= 1.0 and (self.state is BreakerState.CLOSED or self.is_admitting)

    @property
    def failed_at(self) -> tuple[bool, float]:
        """Sort key of restricted workers: open breakers before confined ones, then the oldest."""
        is_confined = self.is_admitting
        return is_confined, self.confined_at if is_confined else self.opened_at

    def confine(self, share: float, now: float) -> None:
        """Set the share of its usual work. A restart does not change it."""
        if self.share >= 1.0:
            self.confined_at = now
        self.share = share

    def succeeded(self, now: float) -> None:
        """Record a success of the worker."""
        was = self.state
        self._apply(BreakerEvent.SUCCEEDED)
        if was is BreakerState.HALF_OPEN:
            self._forget()
        elif was is BreakerState.CLOSED:
            self._outcomes.append((now, True))

    def failed(self, now: float) -> None:
        """Record a fault of the worker. Attempts that fail by one fault count once."""
        was = self.state
        self._apply(BreakerEvent.FAILED)
        if was is BreakerState.HALF_OPEN:
            longest_s = self._config.breaker_max_cooldown_s
            self._cooldown_s = min(2 * self._cooldown_s, longest_s)
            self._opened(now)
        elif was is BreakerState.CLOSED:
            self._outcomes.append((now, False))
            if self._is_failing(now):
                self._apply(BreakerEvent.TRIPPED)
                self._opened(now)

    def advance(self, now: float) -> None:
        """Advance to `now`; call at every sweep."""
        if self.state is BreakerState.OPEN and now - self.opened_at >= self._cooldown_s:
            self._apply(BreakerEvent.COOLED)

    def reset(self) -> None:
        """Start over for a restarted worker."""
        self._apply(BreakerEvent.RESET)
        self._forget()

    def begin(self, key: AttemptKey) -> None:
        """Record an attempt that is sent to the worker."""
        if self.state is BreakerState.HALF_OPEN and self.probe is None:
            self.probe = key

    def leave(self, key: AttemptKey) -> None:
        """Record that an attempt left the worker; without an outcome, another may probe."""
        if self.probe == key:
            self.probe = None

    def _is_failing(self, now: float) -> bool:
        oldest = now - self._config.breaker_memory_s
        recent = [is_good for at, is_good in self._outcomes if at >= oldest]
        num_failures = recent.count(False)
        return num_failures >= self._config.breaker_min_failures and 2 * num_failures >= len(recent)

    def _opened(self, now: float) -> None:
        self.opened_at = now
        self.probe = None
        self._outcomes.clear()

    def _forget(self) -> None:
        self._outcomes.clear()
        self._cooldown_s = self._config.breaker_cooldown_s
        self.probe = None

    def _apply(self, event: BreakerEvent) -> None:
        self.state = next_state(self.state, event)


def ejected(pool: Sequence[Worker]) -> list[Worker]:
    """Return the workers to exclude or confine because of their breakers: those that failed first,
    and at most half of each model's workers.

    Args:
      pool: the usable workers of one role.
    """
    shut = [one for one in pool if not one.breaker.is_whole]
    if not shut:
        return shut
    shut.sort(key=lambda one: one.breaker.failed_at)
    sizes = Counter(one.fingerprint for one in pool)
    left_out: list[Worker] = []
    num_out: Counter[str] = Counter()
    for one in shut:
        num_out[one.fingerprint] += 1
        if num_out[one.fingerprint] <= sizes[one.fingerprint] // 2:
            left_out.append(one)
    return left_out


class Site(NamedTuple):
    """Zone and pool of a worker, from its labels.

    Attributes:
      zone: its zone; empty without a label. Workers without one form one zone.
      pool: its pool; empty for the shared one.
    """

    zone: str = ""
    pool: str = ""


@dataclass(slots=True)
class Share:
    """What one attempt uses on a worker.

    Attributes:
      num_blocks: blocks its prompt needs on decode.
      num_tokens: prompt tokens that the worker has yet to compute.
      input_tokens: tokens of an embedding input, which uses no prompt credit.
      is_asked: the worker was sent the attempt; prefill only after decode granted it.
      is_granted: decode has leased the blocks, so its later heartbeats count them.
      is_isolated: the request may crash workers.
      is_suspect: an input that was there when a step raised or the worker died.
      band: position in the order of computing.
    """

    num_blocks: int = 0
    num_tokens: int = 0
    input_tokens: int = 0
    is_asked: bool = False
    is_granted: bool = False
    is_isolated: bool = False
    is_suspect: bool = False
    band: Band = DEFAULT_BAND


class Worker:
    """A worker at one address, across restarts.

    Attributes:
      role: prefill or decode.
      address: the worker's address.
      monitor: whether it is alive.
      breaker: whether to leave it out although it is alive.
      welcome: its last WELCOME; None before.
      peer_id: its current or last identity.
      fingerprint: its model, without adapters; empty before WELCOME.
      site: where it runs.
      adapters: digests of its adapters.
      beat: its last heartbeat since it was greeted.
      busy_until: time until which it gets no lease requests, after it refused one.
      available_blocks: free or reclaimable blocks, minus those reserved since the last heartbeat.
      foreign_streams: other servers' sequences there at the last heartbeat.
      foreign_tokens: other servers' waiting prompt tokens there at the last heartbeat.
      shares: this server's attempts there.
      prefixes: what its prefix cache probably holds.
      missing_since: time when it was lost; None while connected.
      is_missed: it was lost without a farewell and has not answered since.
      trouble: why it does not answer or is not used, according to the link or its GOODBYE; empty
        while connected.
      is_leaving: it is no longer a member; its attempts may finish.
    """

    def __init__(
        self, role: Role, address: str, link: LinkConfig, recovery: RecoveryConfig, now: float
    ) -> None:
        self.role = role
        self.address = address
        self.monitor = PeerMonitor(link, now)
        self.breaker = Breaker(recovery)
        self.welcome: Welcome | None = None
        self.peer_id: PeerId | None = None
        self.fingerprint = ""
        self.site = Site()
        self.adapters: frozenset[bytes] = frozenset()
        self.beat: WorkerHeartbeat | None = None
        self.busy_until = now
        self.available_blocks = 0
        self.foreign_streams = self.foreign_tokens = 0
        self.shares: dict[AttemptKey, Share] = {}
        self.prefixes = PrefixIndex(self)
        self.missing_since: float | None = now
        self.is_missed = False
        self.trouble = ""
        self.is_leaving = False

    def __str__(self) -> str:
        return str(self.peer_id or f"{self.role} at {self.address}")

    @property
    def capacity(self) -> Capacity | None:
        """Its total capacity."""
        return None if self.welcome is None else self.welcome.capacity

    @property
    def load(self) -> Load:
        """Its last reported load."""
        return Load() if self.beat is None else self.beat.load

    @property
    def is_connected(self) -> bool:
        """Whether it has answered and has not been given up."""
        return self.monitor.state in (PeerState.ALIVE, PeerState.SUSPECT)

    @property
    def is_draining(self) -> bool:
        """Whether it accepts no new work."""
        return self.is_leaving or (self.beat is not None and self.beat.is_draining)

    @property
    def is_usable(self) -> bool:
        """Whether it may get new work."""
        beat, monitor = self.beat, self.monitor
        if beat is None or beat.is_draining or self.is_leaving:
            return False
        return monitor.state is PeerState.ALIVE and not monitor.is_stuck

    @property
    def has_share_left(self) -> bool:
        """Whether a confined worker may get one more attempt: always one, and more up to its
        share."""
        if not self.breaker.is_admitting or self.beat is None:
            return False
        used, usual = self.waiting_tokens, self.beat.token_credit
        if self.role is Role.DECODE:
            used, usual = len(self.shares), self.beat.row_credit
        return not self.shares or used < self.breaker.share * usual

    @property
    def waiting_tokens(self) -> int:
        """This server's prompt tokens that the worker has yet to compute."""
        return sum(share.num_tokens for share in self.shares.values())

    def welcomed(self, welcome: Welcome, now: float) -> bool:
        """Apply a WELCOME; return whether the worker restarted and lost its state."""
        is_another_life = self.monitor.greeted(welcome.peer.epoch, now, welcome.capacity.step_s)
        if is_another_life:
            self.beat = None
            self.breaker.reset()
            self.prefixes.clear()
        self.welcome, self.peer_id = welcome, welcome.peer.peer_id
        self.fingerprint = without_mark(welcome.fingerprint)
        labels = welcome.labels
        self.site = Site(labels.get("zone", ""), labels.get("pool", ""))
        self.busy_until = now
        self.missing_since = None
        self.is_missed = False
        self.trouble = ""
        return is_another_life

    def heartbeat(self, beat: WorkerHeartbeat, now: float) -> bool:
        """Apply a heartbeat; return False if it is from another epoch than the greeted one."""
        if not self.monitor.heartbeat(
            beat.epoch, now, progress=beat.progress, has_work=beat.has_work
        ):
            return False
        self.beat = beat
        # This heartbeat counts a lease if and only if its GRANT came before: frames of one link
        # keep their order.
        asked = sum(share.num_blocks for share in self.shares.values() if not share.is_granted)
        self.available_blocks = beat.load.free_blocks + beat.load.cached_blocks - asked
        held = sum(share.is_granted for share in self.shares.values())
        present = beat.load.running + beat.load.paused + beat.load.waiting
        self.foreign_streams = max(0, present - held)
        self.foreign_tokens = max(0, beat.load.waiting_tokens - self.waiting_tokens)
        return True

    @property
    def live_keys(self) -> list[AttemptKey]:
        """Attempts that the worker was sent and that are still wanted."""
        return [key for key, share in self.shares.items() if share.is_asked]

    def reserve(
        self,
        key: AttemptKey,
        *,
        num_blocks: int = 0,
        num_tokens: int = 0,
        input_tokens: int = 0,
        is_isolated: bool = False,
        is_suspect: bool = False,
        band: Band = DEFAULT_BAND,
    ) -> None:
        """Count an attempt that is about to be sent to the worker."""
        self.shares[key] = Share(
            num_blocks,
            num_tokens,
            input_tokens,
            is_isolated=is_isolated,
            is_suspect=is_suspect,
            band=band,
        )
        self.available_blocks -= num_blocks
        self.breaker.begin(key)

    def asked(self, key: AttemptKey) -> None:
        """Record that the worker is sent the attempt now."""
        self.shares[key].is_asked = True

    def granted(self, key: AttemptKey) -> None:
        """Record that decode holds the blocks."""
        if key in self.shares:
            self.shares[key].is_granted = True

    def computed(self, key: AttemptKey) -> None:
        """Record that the prompt is computed; its KV may still be on the way to decode."""
        if key in self.shares:
            self.shares[key].num_tokens = 0

    def release(self, key: AttemptKey, freed_blocks: int = 0) -> bool:
        """Stop counting an attempt; return whether the worker must be notified."""
        self.available_blocks += freed_blocks
        self.breaker.leave(key)
        share = self.shares.pop(key, None)
        return share is not None and share.is_asked

    def discount(self, pause_s: float) -> None:
        """Exclude a pause in which this server did not listen from the worker's timeouts."""
        self.monitor.excuse(pause_s)
        if self.missing_since is not None:
            self.missing_since += pause_s

    def lost(self, now: float, *, is_its_fault: bool = True) -> None:
        """Give the worker up; its attempts must be retried elsewhere."""
        self.monitor.lost()
        if is_its_fault:
            # Counts if the same process comes back; a restarted one starts with a new breaker.
            self.breaker.failed(now)
        self.beat = None
        self.missing_since = now
        self.is_missed = True
        self.shares.clear()


class BrokenPaths:
    """Pairs of prefill and decode workers that cannot reach each other, although both answer this
    server.

    A partition between two workers shows as a transfer that is given up; neither worker is at
    fault, so no breaker counts it. Entries are per pair of worker epochs and expire.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self._avoid_s = config.path_avoid_s
        self._until: dict[tuple[PeerId | None, PeerId | None], float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def broke(self, prefill: Worker, decode: Worker, now: float) -> None:
        """Record that KV cannot be sent from one worker to the other."""
        self._until[prefill.peer_id, decode.peer_id] = now + self._avoid_s

    def is_broken(self, prefill: Worker, decode: Worker, now: float) -> bool:
        """Return whether this pair should be avoided."""
        until = self._until.get((prefill.peer_id, decode.peer_id)) if self._until else None
        return until is not None and now < until

    def forget(self, now: float) -> None:
        """Drop expired entries."""
        for path in [path for path, until in self._until.items() if until <= now]:
            del self._until[path]
