"""The kinds of misfortune, how much of each a seed gets, and proof that it happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from transport.frames import (
    End,
    Ended,
    FirstToken,
    Grant,
    KvChunk,
    KvCredit,
    KvDone,
    KvManifest,
    Prefill,
    Reserve,
    TokenCredit,
    Tokens,
)
from transport.memory_pipe import Faults
from triolet.units import MILLISECONDS, SECONDS

if TYPE_CHECKING:
    import random

    from transport.frames import AttemptFrame


class Fault(StrEnum):
    """Everything that can be switched on."""

    LOSS = "loss"
    DUPLICATION = "duplication"
    REORDER = "reorder"
    DELAY = "delay"
    CORRUPTION = "corruption"
    AFTERLIFE = "afterlife"  # frames outlive their link and meet another life of the receiver
    PARTITION = "partition"
    ONE_WAY = "one-way partition"
    CRASH = "crash"
    FREEZE = "freeze"
    ZOMBIE = "zombie"  # frozen for longer than a lease
    WEDGE = "wedge"  # the device stands still, the process answers
    STEP_ERROR = "step error"
    EXHAUSTION = "pool exhaustion"
    DRAIN = "worker drain"
    LEAVE = "member left"  # a server uses a worker no more, and after a while again
    CANCEL = "client cancel"
    STALL = "stalled client"
    SERVER_CRASH = "server crash"
    SERVER_FREEZE = "server freeze"


TIMED: Final = (
    Fault.PARTITION,
    Fault.ONE_WAY,
    Fault.CRASH,
    Fault.FREEZE,
    Fault.ZOMBIE,
    Fault.WEDGE,
    Fault.STEP_ERROR,
    Fault.DRAIN,
    Fault.LEAVE,
    Fault.SERVER_CRASH,
    Fault.SERVER_FREEZE,
)
"""Those that the injector brings about at random moments."""

HARMLESS: Final = frozenset(
    {
        Fault.DUPLICATION,
        Fault.DELAY,
        Fault.AFTERLIFE,
        Fault.EXHAUSTION,
        Fault.DRAIN,
        Fault.LEAVE,
        Fault.CANCEL,
        Fault.STALL,
    }
)
"""What may happen all the time and costs no client an answer."""
SINGLE: Final = tuple(
    fault for fault in TIMED if fault not in HARMLESS and fault is not Fault.SERVER_CRASH
)
"""What may happen once, whatever it strikes, and costs no client an answer."""
MILD_LATE_S: Final = 50 * MILLISECONDS
SHARE_MILD: Final = 0.25
"""Seeds in which no client may go without an answer; the others suffer more than can be cured."""

CALM: Final = Faults(min_delay_s=0.5 * MILLISECONDS, max_delay_s=4 * MILLISECONDS)
"""What a healthy network does."""
SHARE_ENABLED: Final = 0.4
"""How many kinds a seed has. Few at a time find more than all at once, where one hides another."""
MAX_LATE_S: Final = 6 * SECONDS
"""The latest that a frame comes: far beyond leases, well within tombstones."""


LOSABLE: Final = (
    *(Reserve, Grant, Prefill, FirstToken, KvChunk, KvManifest, KvCredit, KvDone),
    *(Tokens, TokenCredit, End, Ended),
)
MOST_SPARED: Final = 6
"""Frames of its kind that pass before the one that is lost: of the first requests, or of a later
one among others."""
STANDSTILLS_S: Final = (0.4, 0.6, 0.9, 1.1, 1.4, 1.6, 1.9, 2.1, 2.6)
"""On both sides of each bound: a heartbeat 0.5, late 1.0, silent 1.5, a lease 2.0."""
MOST_APART_S: Final = 0.6
"""From the loss to the standstill: a little more than one heartbeat."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One frame that is lost, and a process that stands still about then.

    Attributes:
      kind: of the frame.
      num_spared: so many of its kind pass before.
      stops_after_s: from the loss until a process stands still.
      stops_s: for how long; 0 for not at all.
      victim: chooses the process, among all.
    """

    kind: type[AttemptFrame | Tokens | TokenCredit]
    num_spared: int
    stops_after_s: float
    stops_s: float
    victim: int


def draw_loss(rng: random.Random) -> Loss:
    """Draw which frame is lost, and what stands still then."""
    return Loss(
        rng.choice(LOSABLE),
        rng.randrange(MOST_SPARED),
        rng.uniform(0.0, MOST_APART_S),
        rng.choice((0.0, *STANDSTILLS_S)),
        rng.getrandbits(16),
    )


@dataclass(slots=True)
class FaultPlan:
    """What one seed suffers.

    Attributes:
      enabled: these kinds.
      network: what the network does meanwhile.
      every_s: mean time between two faults of the injector.
      once: the injector brings this about one time; None for nothing.
      is_mild: no client that stays may go without an answer.
      loss: the one frame that is lost instead; None for none.
    """

    enabled: frozenset[Fault]
    network: Faults
    every_s: float
    once: Fault | None = None
    is_mild: bool = False
    loss: Loss | None = None

    @property
    def latest_s(self) -> float:
        """The latest that a frame may come, as far as the network is to blame."""
        network = self.network
        is_late = network.reorder > 0 or network.duplication > 0
        return network.max_delay_s + (network.reorder_s if is_late else 0.0)


def draw_plan(rng: random.Random) -> FaultPlan:
    """Draw a seed's misfortune."""
    enabled = frozenset(fault for fault in Fault if rng.random() < SHARE_ENABLED)
    once, is_mild = None, rng.random() < SHARE_MILD
    if is_mild:
        once = rng.choice((None, *SINGLE))
        enabled &= HARMLESS

    def share(fault: Fault, most: float) -> float:
        drawn = rng.uniform(most / 10, most)
        return drawn if fault in enabled else 0.0

    slow_s = rng.choice((20, 80, 300)) * MILLISECONDS
    late_s = rng.choice((0.05, 0.3, 1.0, MAX_LATE_S))
    if is_mild:
        # A GOODBYE that comes again when both have long made it up is believed: no real link does
        # that, and no epoch tells it from a new one.
        late_s = min(late_s, MILD_LATE_S)
    network = Faults(
        min_delay_s=CALM.min_delay_s,
        max_delay_s=slow_s if Fault.DELAY in enabled else CALM.max_delay_s,
        loss=share(Fault.LOSS, 0.06),
        duplication=share(Fault.DUPLICATION, 0.15),
        reorder=share(Fault.REORDER, 0.15),
        reorder_s=late_s,
        corruption=share(Fault.CORRUPTION, 0.3),
    )
    return FaultPlan(enabled, network, rng.uniform(0.3, 2.0), once, is_mild)


@dataclass(slots=True)
class Tally:
    """What really happened, by kind: a fault that was asked for and never came proves nothing.

    Attributes:
      asked: seeds that had the kind switched on.
      happened: how often each came about.
      causes: why attempts were begun anew.
      routes: which workers computed prompts, and why.
    """

    asked: Counter[Fault] = field(default_factory=Counter)
    happened: Counter[Fault] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add another run's."""
        self.asked += other.asked
        self.happened += other.happened
        self.causes += other.causes
        self.routes += other.routes

    def never_happened(self) -> list[Fault]:
        """Return the kinds that were asked for and never came about."""
        return [fault for fault in Fault if self.asked[fault] and not self.happened[fault]]
