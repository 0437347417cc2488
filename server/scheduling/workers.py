"""One worker through all its lives: liveness, breaker, attempts there, and its prefix cache.

How much of a prompt its prefix cache holds is the server's guess, by what went there. A worker
evicts what was used least recently, and so does the guess. A wrong guess changes no answer: decode
says in GRANT what it holds, and prefill finds what it finds. Two prefixes whose hashes collide send
a prompt to the wrong worker, no more; the hash is Python's own of bytes, keyed anew in each
process.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

from transport.frames import Load
from transport.liveness import PeerMonitor, PeerState
from triolet.adapter_keys import without_mark
from triolet.errors import LocalProtocolError
from triolet.service_class import DEFAULT_BAND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from transport.frames import Capacity, Welcome, WorkerHeartbeat
    from triolet.config import LinkConfig, RecoveryConfig
    from triolet.ids import AttemptKey, PeerId, Role
    from triolet.service_class import Band


class PrefixChain:
    """The blocks of one prompt, each named by all tokens up to its end.

    Args:
      token_ids: of the prompt.
      cache_key: under which its KV is found again: of salt and adapter.
    """

    def __init__(self, token_ids: Iterable[int], cache_key: bytes) -> None:
        self._packed = array("I", token_ids).tobytes()
        self._cache_key = cache_key
        self._names: dict[int, tuple[int, ...]] = {}

    def names(self, block_size: int) -> tuple[int, ...]:
        """Return the names of its full blocks."""
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
        return tuple(names)


class PrefixIndex:
    """What one life of a worker was given lately."""

    def __init__(self) -> None:
        self._recent: dict[int, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._recent)

    def num_held(self, names: Sequence[int]) -> int:
        """Return how many leading blocks it probably holds."""
        # The beginning of a prompt is forgotten after its end, so what is there comes first.
        return bisect_left(names, True, key=lambda name: name not in self._recent)

    def note(self, names: Sequence[int], num_blocks: int) -> None:
        """Take in that it has these; forget what its pool of `num_blocks` has no room for."""
        for name in reversed(names):
            self._recent.pop(name, None)
            self._recent[name] = None
        while len(self._recent) > num_blocks:
            del self._recent[next(iter(self._recent))]

    def held_tokens(self, chain: PrefixChain | None, capacity: Capacity | None) -> int:
        """Return how many leading tokens of a prompt a worker of that capacity probably holds."""
        if chain is None or capacity is None:
            return 0
        return capacity.block_size * self.num_held(chain.names(capacity.block_size))

    def keep(self, chain: PrefixChain, capacity: Capacity | None) -> None:
        """Note that a worker of that capacity has the KV of a whole prompt."""
        if capacity is not None:
            self.note(chain.names(capacity.block_size), capacity.num_blocks)

    def clear(self) -> None:
        """Forget everything: it is another life."""
        self._recent.clear()


T = TypeVar("T")

MAX_OUTCOMES: Final = 20
"""Outcomes that are remembered; half of them must be failures."""


class BreakerState(Enum):
    """What a worker may be given."""

    CLOSED = "closed"  # anything
    OPEN = "open"  # nothing
    HALF_OPEN = "half_open"  # one attempt at a time, until one has an outcome


class BreakerEvent(Enum):
    """What changes it."""

    TRIPPED = "tripped"  # too many of the last outcomes are failures
    COOLED = "cooled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RESET = "reset"  # the worker has a new life


_S, _E = BreakerState, BreakerEvent

TRANSITIONS: Final[Mapping[BreakerState, Mapping[BreakerEvent, BreakerState]]] = {
    _S.CLOSED: {
        _E.TRIPPED: _S.OPEN,
        _E.SUCCEEDED: _S.CLOSED,
        _E.FAILED: _S.CLOSED,
        _E.RESET: _S.CLOSED,
    },
    # What began before it opened, or runs there because half of the pool must stay, proves nothing.
    _S.OPEN: {
        _E.COOLED: _S.HALF_OPEN,
        _E.SUCCEEDED: _S.OPEN,
        _E.FAILED: _S.OPEN,
        _E.RESET: _S.CLOSED,
    },
    _S.HALF_OPEN: {_E.SUCCEEDED: _S.CLOSED, _E.FAILED: _S.OPEN, _E.RESET: _S.CLOSED},
}


def next_state(state: BreakerState, event: BreakerEvent) -> BreakerState:
    """Return the state that follows.

    Raises:
      LocalProtocolError: the table has no such step.
    """
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise LocalProtocolError(f"a breaker that is {state.value} cannot be {event.value}")
    return following


class Breaker:
    """The outcomes of one worker's present life, and what follows from them.

    Attributes:
      state: as of the last call.
      opened_at: when it opened last.
      probe: the attempt that tries the worker, while HALF_OPEN.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self.state = BreakerState.CLOSED
        self.opened_at = 0.0
        self.probe: AttemptKey | None = None
        self._config = config
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=MAX_OUTCOMES)
        self._cooldown_s = config.breaker_cooldown_s

    @property
    def is_admitting(self) -> bool:
        """Whether the worker may be given an attempt."""
        is_free_to_try = self.state is BreakerState.HALF_OPEN and self.probe is None
        return self.state is BreakerState.CLOSED or is_free_to_try

    def succeeded(self, now: float) -> None:
        """Note that an attempt got what it wanted of the worker."""
        was = self.state
        self._apply(BreakerEvent.SUCCEEDED)
        if was is BreakerState.HALF_OPEN:
            self._forget()
        elif was is BreakerState.CLOSED:
            self._outcomes.append((now, True))

    def failed(self, now: float) -> None:
        """Note a fault of the worker. Attempts that fail by one fault count once."""
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
        """Let time pass; to be called at every sweep."""
        if self.state is BreakerState.OPEN and now - self.opened_at >= self._cooldown_s:
            self._apply(BreakerEvent.COOLED)

    def reset(self) -> None:
        """Begin anew, for a new life."""
        self._apply(BreakerEvent.RESET)
        self._forget()

    def begin(self, key: AttemptKey) -> None:
        """Note an attempt that goes to the worker."""
        if self.state is BreakerState.HALF_OPEN and self.probe is None:
            self.probe = key

    def leave(self, key: AttemptKey) -> None:
        """Note that an attempt is over there; without an outcome another one may try."""
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


def ejected(pool: Sequence[T], breaker_of: Callable[[T], Breaker]) -> list[T]:
    """Return the workers of a pool that are left out: their breakers do not admit; at most half of
    the pool. The first to fail stay out; the last to fail are spared.

    Args:
      pool: the workers of one role that could be used.
      breaker_of: the breaker of each.
    """
    shut = [one for one in pool if not breaker_of(one).is_admitting]
    shut.sort(key=lambda one: breaker_of(one).opened_at)
    return shut[: len(pool) // 2]


@dataclass(slots=True)
class Share:
    """What one attempt takes of a worker.

    Attributes:
      num_blocks: blocks that its prompt needs on decode.
      num_tokens: prompt tokens that this worker has still to compute.
      input_tokens: of an input that becomes a vector, which takes no prompt credit.
      is_asked: the worker was told of the attempt. Prefill is not before decode has granted it.
      is_granted: decode has leased the blocks, so its heartbeats from now on count them.
      is_isolated: its request may make workers fail.
      is_suspect: of an input that was there when a step raised or the worker died.
      band: what is computed before it, and after it.
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
    """A worker at one address, through all its lives.

    Attributes:
      role: prefill or decode.
      address: where it is reached.
      monitor: whether it lives.
      breaker: whether it is to be left out although it lives.
      welcome: what it said of itself last; None until it did.
      peer_id: its present or last life.
      fingerprint: of its model, whatever adapters it has; empty until it said.
      adapters: digests of those that it has.
      beat: its last heartbeat in this life.
      busy_until: it refused a lease and is not asked again before.
      available_blocks: free or reclaimable, less what was reserved since the last heartbeat.
      foreign_streams: sequences of other servers there, as of the last heartbeat.
      foreign_tokens: prompt tokens of other servers that waited there, likewise.
      shares: this server's attempts there.
      prefixes: what its prefix cache probably holds.
      missing_since: when it was last seen to be gone; None while it is there.
      is_missed: it was given up without a farewell and has not answered since.
      trouble: why it does not answer or is not used, as far as the link or its GOODBYE says; empty
        while it is there.
      is_leaving: it is no member any more: what it has may end there.
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
        self.adapters: frozenset[bytes] = frozenset()
        self.beat: WorkerHeartbeat | None = None
        self.busy_until = now
        self.available_blocks = 0
        self.foreign_streams = self.foreign_tokens = 0
        self.shares: dict[AttemptKey, Share] = {}
        self.prefixes = PrefixIndex()
        self.missing_since: float | None = now
        self.is_missed = False
        self.trouble = ""
        self.is_leaving = False

    def __str__(self) -> str:
        return str(self.peer_id or f"{self.role} at {self.address}")

    @property
    def capacity(self) -> Capacity | None:
        """What it has in all."""
        return None if self.welcome is None else self.welcome.capacity

    @property
    def load(self) -> Load:
        """What it last said it does."""
        return Load() if self.beat is None else self.beat.load

    @property
    def is_connected(self) -> bool:
        """Whether frames make sense: it has answered and has not been given up."""
        return self.monitor.state in (PeerState.ALIVE, PeerState.SUSPECT)

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new."""
        return self.is_leaving or (self.beat is not None and self.beat.is_draining)

    @property
    def is_usable(self) -> bool:
        """Whether it may be given new work."""
        is_announced = self.beat is not None and not self.is_draining
        is_alive = self.monitor.state is PeerState.ALIVE and not self.monitor.is_stuck
        return is_alive and is_announced

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of this server that the worker has still to compute."""
        return sum(share.num_tokens for share in self.shares.values())

    def welcomed(self, welcome: Welcome, now: float) -> bool:
        """Take in a WELCOME; return whether what an earlier life had is lost."""
        is_another_life = self.monitor.greeted(welcome.peer.epoch, now, welcome.capacity.step_s)
        if is_another_life:
            self.beat = None
            self.breaker.reset()
            self.prefixes.clear()
        self.welcome, self.peer_id = welcome, welcome.peer.peer_id
        self.fingerprint = without_mark(welcome.fingerprint)
        self.busy_until = now
        self.missing_since = None
        self.is_missed = False
        self.trouble = ""
        return is_another_life

    def heartbeat(self, beat: WorkerHeartbeat, now: float) -> bool:
        """Take in a heartbeat; return False if it is not of the greeted life."""
        if not self.monitor.heartbeat(
            beat.epoch, now, progress=beat.progress, has_work=beat.has_work
        ):
            return False
        self.beat = beat
        # A lease whose GRANT came before this heartbeat is counted in it, one that is still to be
        # granted is not: frames of one link keep their order.
        asked = sum(share.num_blocks for share in self.shares.values() if not share.is_granted)
        self.available_blocks = beat.load.free_blocks + beat.load.cached_blocks - asked
        held = sum(share.is_granted for share in self.shares.values())
        present = beat.load.running + beat.load.paused + beat.load.waiting
        self.foreign_streams = max(0, present - held)
        self.foreign_tokens = max(0, beat.load.waiting_tokens - self.waiting_tokens)
        return True

    @property
    def live_keys(self) -> list[AttemptKey]:
        """Attempts that the worker was told of and that are still wanted."""
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
        """Count an attempt that is about to be sent there."""
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
        """Note that the worker is told of the attempt now."""
        self.shares[key].is_asked = True

    def granted(self, key: AttemptKey) -> None:
        """Note that decode holds the blocks."""
        if key in self.shares:
            self.shares[key].is_granted = True

    def computed(self, key: AttemptKey) -> None:
        """Note that the prompt is computed; prefill's blocks may still be under way to decode."""
        if key in self.shares:
            self.shares[key].num_tokens = 0

    def release(self, key: AttemptKey, freed_blocks: int = 0) -> bool:
        """Count an attempt out; return whether the worker has to be told."""
        self.available_blocks += freed_blocks
        self.breaker.leave(key)
        share = self.shares.pop(key, None)
        return share is not None and share.is_asked

    def discount(self, pause_s: float) -> None:
        """Take back time in which this server did not listen."""
        self.monitor.excuse(pause_s)
        if self.missing_since is not None:
            self.missing_since += pause_s

    def lost(self, now: float, *, is_its_fault: bool = True) -> None:
        """Give this life up; what it had has to be done elsewhere."""
        self.monitor.lost()
        if is_its_fault:
            # For the same life, should it come back: a new one begins anew.
            self.breaker.failed(now)
        self.beat = None
        self.missing_since = now
        self.is_missed = True
        self.shares.clear()
