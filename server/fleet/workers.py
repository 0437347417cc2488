"""One worker as the server sees it: who it is, how it does, what it may still be given.

Knows what the worker announced and what this server has sent there since; refuses to choose among
workers (dispatch.py) and to know sequences. Credit and free blocks are spent here, at dispatch,
instead of being asked for: the next heartbeat corrects what was guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transport.frames import Load
from transport.liveness import PeerMonitor, PeerState
from triolet.service_class import DEFAULT_BAND

from .breaker import Breaker
from .prefixes import PrefixIndex

if TYPE_CHECKING:
    from transport.frames import Capacity, Welcome, WorkerHeartbeat
    from triolet.config import LinkConfig
    from triolet.config_recovery import RecoveryConfig
    from triolet.ids import AttemptKey, PeerId, Role
    from triolet.service_class import Band


@dataclass(slots=True)
class Share:
    """What one attempt takes of a worker.

    Attributes:
      num_blocks: blocks that its prompt needs on decode.
      num_tokens: prompt tokens that this worker has still to compute.
      is_asked: the worker was told of the attempt. Prefill is not before decode has granted it.
      is_granted: decode has leased the blocks, so its heartbeats from now on count them.
      is_on_probation: its request may be what workers fail by.
      band: what is computed before it, and after it.
    """

    num_blocks: int = 0
    num_tokens: int = 0
    is_asked: bool = False
    is_granted: bool = False
    is_on_probation: bool = False
    band: Band = DEFAULT_BAND


class Worker:
    """A worker at one address, through all its lives.

    Attributes:
      role: prefill or decode.
      address: where it is reached.
      monitor: whether it lives.
      breaker: whether it is to be left out although it lives.
      welcome: what it said of itself last; None until it did.
      beat: its last heartbeat in this life.
      busy_until: it refused a lease and is not asked again before.
      available_blocks: free or reclaimable, less what was reserved since the last heartbeat.
      foreign_streams: sequences of other servers there, as of the last heartbeat.
      foreign_tokens: prompt tokens of other servers that waited there, likewise.
      shares: this server's attempts there.
      inputs: the same of inputs that become vectors, and their tokens.
      prefixes: what its prefix cache probably holds.
      missing_since: when it was last seen to be gone; None while it is there.
      trouble: why it does not answer or is not used, as far as the link or its GOODBYE says; empty
        while it is there.
    """

    def __init__(
        self, role: Role, address: str, link: LinkConfig, recovery: RecoveryConfig, now: float
    ) -> None:
        self.role = role
        self.address = address
        self.monitor = PeerMonitor(link, now)
        self.breaker = Breaker(recovery)
        self.welcome: Welcome | None = None
        self.beat: WorkerHeartbeat | None = None
        self.busy_until = now
        self.available_blocks = 0
        self.foreign_streams = self.foreign_tokens = 0
        self.shares: dict[AttemptKey, Share] = {}
        self.inputs: dict[AttemptKey, int] = {}
        self.prefixes = PrefixIndex()
        self.missing_since: float | None = now
        self.trouble = ""

    def __str__(self) -> str:
        return str(self.peer_id or f"{self.role} at {self.address}")

    @property
    def peer_id(self) -> PeerId | None:
        """Its present or last life."""
        return None if self.welcome is None else self.welcome.peer.peer_id

    @property
    def fingerprint(self) -> str:
        """Of the model that it computes with."""
        return "" if self.welcome is None else self.welcome.fingerprint

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
        return self.beat is not None and self.beat.is_draining

    @property
    def is_usable(self) -> bool:
        """Whether it may be given new work."""
        is_announced = self.beat is not None and not self.beat.is_draining
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
        self.welcome = welcome
        self.busy_until = now
        self.missing_since = None
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
        return [key for key, share in self.shares.items() if share.is_asked] + list(self.inputs)

    def reserve(
        self,
        key: AttemptKey,
        *,
        num_blocks: int = 0,
        num_tokens: int = 0,
        is_on_probation: bool = False,
        band: Band = DEFAULT_BAND,
    ) -> None:
        """Count an attempt that is about to be sent there."""
        self.shares[key] = Share(
            num_blocks,
            num_tokens,
            is_on_probation=is_on_probation,
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

    def excuse(self, absence_s: float) -> None:
        """Take back time in which this server did not listen."""
        self.monitor.excuse(absence_s)
        if self.missing_since is not None:
            self.missing_since += absence_s

    def lost(self, now: float, *, is_its_fault: bool = True) -> None:
        """Give this life up; what it had has to be done elsewhere."""
        self.monitor.lost()
        if is_its_fault:
            # For the same life, should it come back: a new one begins anew.
            self.breaker.failed(now)
        self.beat = None
        self.missing_since = now
        self.shares.clear()
        self.inputs.clear()
