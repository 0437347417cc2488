"""Processes of one kind on one machine: what each is told of the others."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError
from .units import SECONDS

MAX_LENDERS = 256
"""Workers of one machine, far above what its cores can use: each looks at all others before each
of its steps."""


@dataclass(frozen=True, slots=True)
class SiblingConfig:
    """One server among several that share a port.

    The kernel gives each new connection to one of them; what is asked of all of them, such as the
    metrics, the one that was asked puts together.
    """

    name: str
    """Its own, unique among them."""
    own_fd: int
    """A bound Unix socket by which this very server is reached, as `listen_fd` held by whoever
    started it."""
    paths: tuple[tuple[str, str], ...]
    """Name and path of the own socket of each, this one among them."""
    ask_timeout_s: float = 3.0 * SECONDS
    """For an answer of another one, which comes from memory, or is an audit: above
    `audit_timeout_s`. One that is being restarted is left out."""


@dataclass(frozen=True, slots=True)
class LendingConfig:
    """One worker among several that have shared out the cores of a machine evenly.

    Who has nothing to compute leaves its cores to the others, for a step at a time.
    """

    path: str
    """A file in which they tell one another by locks, so that nothing is left of who died."""
    place: int
    """Its own, from 0."""
    places: int
    """How many there are."""

    def __post_init__(self) -> None:
        if not 0 <= self.place < self.places <= MAX_LENDERS:
            raise ConfigError(
                f"lending is place {self.place} of {self.places}; allowed: 0 to one less than "
                f"their number, which is at most {MAX_LENDERS}"
            )
