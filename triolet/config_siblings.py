"""Several servers on one port of one machine: what each is told of the others."""

from __future__ import annotations

from dataclasses import dataclass

from .units import SECONDS


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
