"""The bounds of going on after faults, each beside its reason; a part of the server's config."""

from __future__ import annotations

from dataclasses import dataclass

from .units import SECONDS


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """How a server goes on after faults (server/fleet/recovery.py)."""

    breaker_min_failures: int = 3
    """Faults of one worker, within its last outcomes, before it is left out: one is chance, two
    may be one cause."""
    breaker_memory_s: float = 30.0 * SECONDS
    """An outcome older than this says nothing of a worker."""
    breaker_cooldown_s: float = 1.0 * SECONDS
    """How long a worker is left out before one request tries it. Doubles with each trial in a row
    that fails."""
    breaker_max_cooldown_s: float = 30.0 * SECONDS
    """A worker that was repaired is back within this time."""
    retry_share: float = 0.1
    """Retries that each accepted request pays for: with one request in ten tried again a fleet is
    sick, and more retries would make it sicker."""
    retry_burst: float = 20.0
    """Most retries that are saved up, and what a server starts with."""
    retry_floor_per_s: float = 1.0
    """Retries that a server with few requests may have all the same."""
    path_avoid_s: float = 10.0 * SECONDS
    """A prefill and a decode worker that lost one another are not paired again for this long where
    there are others."""
    quarantine_s: float = 600.0 * SECONDS
    """A prompt that killed workers is refused for this long: a client that repeats it gives up
    earlier, and a repaired worker gets its chance."""
    max_quarantined: int = 1024
    """Prompts in quarantine; a digest each. At the bound the oldest is forgotten first."""
