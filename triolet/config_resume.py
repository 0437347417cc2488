"""Answers that outlive their connection because their client asked for it: how many, how long."""

from __future__ import annotations

from dataclasses import dataclass

from .units import KIB, MIB, SECONDS


@dataclass(frozen=True, slots=True)
class ResumeConfig:
    """Bounds of what a client may come back to."""

    ttl_s: float = 600 * SECONDS
    """How long a finished answer is kept: longer than the official clients go on retrying."""
    grace_s: float = 30 * SECONDS
    """How long an answer goes on that nobody reads: a client that changes networks or restarts is
    back by then. It holds a row and KV meanwhile, so not for longer."""
    away_grace_s: float = 5 * SECONDS
    """The same where the client closed the connection because it goes away (1001), as browsers do:
    a page that is loaded again is back within a second, and a closed tab should hold nothing."""
    buffer_bytes: int = 1 * MIB
    """Of one answer. Beyond, its beginning is forgotten, as far as somebody has read it: 4,000
    chunks of a token each."""
    ahead_bytes: int = 64 * KIB
    """How far an answer runs ahead of whoever reads it fastest; then the tokens wait where they do
    for every client, and so does their credit."""
    max_live: int = 64
    """Answers under way at once; the next is refused with 503."""
    owner_share: float = 0.25
    """Of these: the most that one tenant may have."""
    max_kept: int = 4096
    """Answers in all; beyond it the oldest finished one of the tenant with the most gives way."""
    max_kept_bytes: int = 64 * MIB
    """Of all finished ones together; beyond it the oldest of the tenant with the most bytes."""
    sweep_s: float = 1 * SECONDS
    """How often it is looked whether a time is over."""
