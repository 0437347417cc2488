"""Bounds of the local process supervisor, each beside its reason."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import KIB, MILLISECONDS, SECONDS


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """How `triolet serve` keeps its processes alive on one machine."""

    restart_delay_s: float = 100 * MILLISECONDS
    """Before the first restart: a worker that was killed should be back before its clients notice,
    and its sockets are gone by then."""
    max_restart_delay_s: float = 10.0 * SECONDS
    """The delay doubles with each death in a row up to this, so that a worker that keeps dying
    does not eat the machine."""
    stable_s: float = 30.0 * SECONDS
    """A process that was ready for this long starts with a clean record."""
    max_failed_starts: int = 3
    """Deaths in a row before ready, after which trying again is no answer."""
    start_silence_s: float = 120.0 * SECONDS
    """A process that starts and reports nothing for this long is wedged. Reading one shard of a
    large model from a slow disk takes less."""
    ready_timeout_s: float = 60.0 * SECONDS
    """From the last process's ready to the first 200 of /health/ready: they only have to meet."""
    ready_poll_s: float = 50 * MILLISECONDS
    worker_exit_s: float = 5.0 * SECONDS
    """A worker that has not left this long after SIGTERM is killed: its streams are over."""
    output_drain_s: float = 1.0 * SECONDS
    """What a dead process wrote is read for this long; more can only come from a process that it
    left behind."""
    max_line_bytes: int = 64 * KIB
    """Longest line of a child's output that is read; the rest of a longer one is dropped."""


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """How a known model's file is fetched."""

    deadline_s: float = 900.0 * SECONDS
    """For the whole download: 100 MB at 1 Mbit/s take a little less."""
    silence_s: float = 15.0 * SECONDS
    """pip gives a connection up that brings nothing for so long, and tries once more."""
    poll_s: float = 200 * MILLISECONDS
    """How often the progress is looked at, and whether another process has it."""
