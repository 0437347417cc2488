"""Rules of the fault matrix's proxy: what to do to which frames, with a count of hits.

A rule that never hit proves that its fault never happened, so every rule counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.frames import AnyFrame


class Way(Enum):
    """Direction on a link."""

    TO_WORKER = auto()
    FROM_WORKER = auto()


class Link(NamedTuple):
    """One connection between two processes, by their names in the fleet.

    Attributes:
      client: the process that connected.
      worker: the process that is bound.
      socket: `control` or `kv`.
    """

    client: str
    worker: str
    socket: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """A frame that arrived at the proxy.

    Attributes:
      at: time by this process's `time.monotonic`.
      link: its two ends.
      way: its direction.
      frame: the frame.
      fate: what the proxy did with it.
    """

    at: float
    link: Link
    way: Way
    frame: AnyFrame
    fate: Fate


class Fate(Enum):
    """What can be done to a frame."""

    PASS = auto()
    DROP = auto()
    HOLD = auto()  # held until the rule is lifted
    DOUBLE = auto()
    ECHO = auto()  # passed now, and once more when the rule is released
    SWAP = auto()  # held until the next frame on this link has passed
    CORRUPT = auto()  # one bit of the payload is flipped
    REWRITE = auto()


Wants: TypeAlias = "Callable[[Link, Way, AnyFrame], bool]"


@dataclass(eq=False)
class Rule:
    """An action on certain frames.

    Attributes:
      fate: the action.
      wants: predicate for the frames.
      limit: maximum number of hits; None for no limit.
      rewrite: for `REWRITE`, returns the new frame.
      hits: number of hits.
    """

    fate: Fate
    wants: Wants
    limit: int | None = None
    rewrite: Callable[[AnyFrame], AnyFrame] | None = None
    hits: int = field(default=0)

    def __str__(self) -> str:
        most = "" if self.limit is None else f" of at most {self.limit}"
        name = self.wants.__qualname__.partition(".")[0]
        return f"{self.fate.name.lower()} {name}: {self.hits} hits{most}"

    def takes(self, link: Link, way: Way, frame: AnyFrame) -> bool:
        """Return whether this frame is hit, and count it."""
        if self.limit is not None and self.hits >= self.limit:
            return False
        if not self.wants(link, way, frame):
            return False
        self.hits += 1
        return True


@dataclass(eq=False)
class Blackout:
    """Links that are blocked, including ZeroMQ's own pings, one way or both.

    Attributes:
      hits: pieces that it swallowed.
    """

    covers: Callable[[Link], bool]
    ways: frozenset[Way] = frozenset(Way)
    hits: int = field(default=0)

    def __str__(self) -> str:
        return f"{'+'.join(sorted(way.name.lower() for way in self.ways))}: {self.hits} pieces"

    def takes(self, link: Link, way: Way) -> bool:
        """Return whether nothing passes here, and count it."""
        if way not in self.ways or not self.covers(link):
            return False
        self.hits += 1
        return True


def turn_a_bit(payload: bytes) -> bytes:
    """Return the payload with one bit in its middle flipped."""
    damaged = bytearray(payload)
    damaged[len(damaged) // 2] ^= 0x10
    return bytes(damaged)


def with_fields(frame: AnyFrame, **changes: object) -> AnyFrame:
    """Return the frame with some fields changed."""
    changed: AnyFrame = msgspec.structs.replace(frame, **changes)
    return changed
