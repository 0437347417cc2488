"""The kinds of faults, the random fault plan of a seed, and counts of faults that occurred."""

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
    from collections.abc import Sequence

    from transport.frames import AttemptFrame


class Fault(StrEnum):
    """A kind of fault."""

    LOSS = "loss"
    DUPLICATION = "duplication"
    REORDER = "reorder"
    DELAY = "delay"
    CORRUPTION = "corruption"
    AFTERLIFE = "afterlife"  # frames outlive their link and reach another epoch of the receiver
    PARTITION = "partition"
    ONE_WAY = "one-way partition"
    CRASH = "crash"
    FREEZE = "freeze"
    ZOMBIE = "zombie"  # frozen for longer than a lease
    WEDGE = "wedge"  # the device hangs, but the process answers
    STEP_ERROR = "step error"
    EXHAUSTION = "pool exhaustion"
    DRAIN = "worker drain"
    LEAVE = "member left"  # a server drops a worker, and later uses it again
    CANCEL = "client cancel"
    STALL = "stalled client"
    SERVER_CRASH = "server crash"
    SERVER_FREEZE = "server freeze"
    ZONE = "zone loss"  # all workers of a zone stop, and come back one by one


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
"""Faults that the injector causes at random times."""

DRAWN: Final = tuple(fault for fault in Fault if fault is not Fault.ZONE)
"""Faults that are drawn together; the fault of a zone needs a fleet with zones."""

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
"""Faults that may occur at any rate without losing an answer."""
SINGLE: Final = tuple(
    fault for fault in TIMED if fault not in HARMLESS and fault is not Fault.SERVER_CRASH
)
"""Faults that may occur once without losing an answer."""
MILD_LATE_S: Final = 50 * MILLISECONDS
SHARE_MILD: Final = 0.25
"""Share of seeds in which every client must get its answer. The others have too many faults."""

CALM: Final = Faults(min_delay_s=0.5 * MILLISECONDS, max_delay_s=4 * MILLISECONDS)
"""Faults of a healthy network."""
SHARE_ENABLED: Final = 0.4
"""Number of kinds in a seed. A few find more bugs than all together, which hide one another."""
MAX_LATE_S: Final = 6 * SECONDS
"""Longest delay of a frame: far longer than leases, well within tombstones."""


LOSABLE: Final = (
    *(Reserve, Grant, Prefill, FirstToken, KvChunk, KvManifest, KvCredit, KvDone),
    *(Tokens, TokenCredit, End, Ended),
)
MOST_SPARED: Final = 6
"""Number of frames of its kind before the lost one, which belongs to the first requests or to a
later one."""
STANDSTILLS_S: Final = (0.4, 0.6, 0.9, 1.1, 1.4, 1.6, 1.9, 2.1, 2.6)
"""Durations on both sides of each limit: heartbeat 0.5, late 1.0, silent 1.5, lease 2.0."""
MOST_APART_S: Final = 0.6
"""Longest time from the loss to the stop: a little more than one heartbeat."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One lost frame, and a process that stops at about the same time.

    Attributes:
      kind: kind of the frame.
      num_spared: number of frames of its kind before it.
      stops_after_s: time from the loss until a process stops.
      stops_s: duration of the stop; 0 for none.
      victim: selects the process.
    """

    kind: type[AttemptFrame | Tokens | TokenCredit]
    num_spared: int
    stops_after_s: float
    stops_s: float
    victim: int


def draw_loss(rng: random.Random) -> Loss:
    """Draw the lost frame and the process that stops."""
    return Loss(
        rng.choice(LOSABLE),
        rng.randrange(MOST_SPARED),
        rng.uniform(0.0, MOST_APART_S),
        rng.choice((0.0, *STANDSTILLS_S)),
        rng.getrandbits(16),
    )


@dataclass(frozen=True, slots=True)
class ZoneLoss:
    """A fault in which all workers of a zone stop.

    Attributes:
      zone: its name.
      begins_s: time until they stop.
      silent_s: time until the first worker continues.
      apart_s: time between two workers.
      is_death: whether they die instead of stopping.
    """

    zone: str
    begins_s: float
    silent_s: float
    apart_s: float
    is_death: bool


def draw_zone_loss(rng: random.Random, zones: Sequence[str]) -> ZoneLoss:
    """Draw which zone falls silent, for how long, and how it returns."""
    return ZoneLoss(
        rng.choice(zones),
        rng.uniform(0.5, 3.0),
        rng.uniform(2.2, 4.0),
        rng.choice((0.0, 0.3, 1.5)),
        rng.random() < 0.5,
    )


@dataclass(slots=True)
class FaultPlan:
    """The faults of one seed.

    Attributes:
      enabled: kinds of faults.
      network: faults of the network.
      every_s: mean time between two faults of the injector.
      once: fault that the injector causes once, or None.
      is_mild: whether every client that stays must get its answer.
      loss: a single lost frame instead, or None.
      zone_loss: the zone that falls silent, or None.
    """

    enabled: frozenset[Fault]
    network: Faults
    every_s: float
    once: Fault | None = None
    is_mild: bool = False
    loss: Loss | None = None
    zone_loss: ZoneLoss | None = None

    @property
    def latest_s(self) -> float:
        """Longest delay of a frame caused by the network."""
        network = self.network
        is_late = network.reorder > 0 or network.duplication > 0
        return network.max_delay_s + (network.reorder_s if is_late else 0.0)


def draw_plan(rng: random.Random) -> FaultPlan:
    """Draw a seed's faults."""
    enabled = frozenset(fault for fault in DRAWN if rng.random() < SHARE_ENABLED)
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
        # A duplicated GOODBYE that arrives long after both sides have reconnected is accepted: real
        # links do not do this, and no epoch distinguishes it from a new one.
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
    """Counts of faults that occurred, because an enabled fault that never occurs proves nothing.

    Attributes:
      asked: seeds in which the kind was enabled.
      happened: occurrences.
      causes: reasons for new attempts.
      routes: which workers computed prompts, and why.
    """

    asked: Counter[Fault] = field(default_factory=Counter)
    happened: Counter[Fault] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add the counts of another run."""
        self.asked += other.asked
        self.happened += other.happened
        self.causes += other.causes
        self.routes += other.routes

    def never_happened(self) -> list[Fault]:
        """Return the kinds that were enabled but never occurred."""
        return [fault for fault in Fault if self.asked[fault] and not self.happened[fault]]
