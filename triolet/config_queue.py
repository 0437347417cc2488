"""Bounds of the fair queue, and of what is shared fairly before it: threads, grammars, bodies."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError
from .units import KIB, MIB, SECONDS


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """How those who wait share what there is."""

    fair: bool = True
    """Classes, then tenants by weight, then deadlines. Without it: class, priority, arrival,
    whoever asks; limits of tenants at dispatch (`max_running`, `kv_share`) are not kept either."""
    min_class_share: float = 0.05
    """Of what the classes above it are given, while it waits: so much of it a lower class has for
    certain. One request in twenty keeps a class from standing still for as long as a flood above it
    lasts, and costs those above, all three classes below them waiting, an eighth."""
    expected_completion_tokens: int = 256
    """Of a tenant whose completions nobody has seen yet, or as many as the request allows if these
    are fewer. What was really used is settled at the end."""
    completion_memory: float = 0.1
    """How far one completion moves what is expected of the tenant's next one: some ten of them."""

    head_start_tokens: int = 4096
    """By weight, that a tenant which asks for less than its share may be ahead of those who ask for
    more: a few requests at once go before theirs, also on workers, as if they were not there. Many
    do not, so it changes shares by no more than this."""

    spare_rows_share: float = 0.125
    """Of all decode rows, that tenants with more than their share leave free while others are there
    or were just now: who comes seldom finds a row at once, instead of waiting for an answer to end.
    With one tenant alone every row is used."""

    def __post_init__(self) -> None:
        for name in ("min_class_share", "completion_memory", "spare_rows_share"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value!r}; allowed: 0 to 1")
        if self.head_start_tokens < 0:
            raise ConfigError(f"head_start_tokens is {self.head_start_tokens}; allowed: >= 0")
        if self.expected_completion_tokens < 1:
            raise ConfigError(
                f"expected_completion_tokens is {self.expected_completion_tokens}; allowed: >= 1"
            )


@dataclass(frozen=True, slots=True)
class TurnsConfig:
    """Lines for the threads that parse, render and tokenise: one line for each tenant, or for each
    client address where there are no tenants (server/turns.py)."""

    max_waiting: int = 4096
    """Jobs that wait in all lines: as many as there may be connections."""
    max_waiting_each: int = 1024
    """Jobs of one tenant or address that wait: as many requests as one class may have queued. The
    next one gets a 429, and jobs of others do not notice."""
    recent_s: float = 10.0 * SECONDS
    """So long after the last job of any other key a key leaves one thread free: a running job
    cannot be interrupted, and the largest conversations take 0.1 s. With one key alone all threads
    are used."""

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_waiting_each"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: >= 1")
        if self.recent_s < 0:
            raise ConfigError(f"recent_s is {self.recent_s}; allowed: >= 0")


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """What is decided on a request before its body is read (server/door.py)."""

    max_body_bytes: int = 256 * MIB
    """Of all bodies that are being received, or wait to be parsed and tokenised: a sixteenth of a
    machine with 4 GiB. Beyond it a large body gets a 503 before it is read."""
    max_body_bytes_each: int = 64 * MIB
    """Of one tenant, or of one address where there are no tenants: four bodies of the largest size,
    and a quarter of `max_body_bytes`, so that four have to come together to fill it. Beyond it a
    large body gets a 429 before it is read."""
    small_body_bytes: int = 64 * KIB
    """Bodies up to here are counted and never refused, so that large ones keep no ordinary question
    out. As many as there may be connections hold 256 MiB."""
    body_retry_s: float = 1.0 * SECONDS
    """When to come again with a body for which there is no room: most arrive within a second."""
    refusals_per_s: float = 20.0
    """Requests of one tenant or address that are refused at the door at once, and in each second.
    More of them wait for their answer: a client that comes again the moment it is refused would
    take the event loop's time from others, at a millisecond a refusal."""
    max_refusal_wait_s: float = 2.0 * SECONDS
    """The longest that a refusal waits. Clients that heed `retry-after` wait that long anyway."""
    refusals_logged_per_s: float = 10.0
    """Log lines about refused requests, at once and in each second, by the application and by the
    edge each: enough to see what a misconfigured client does, and 20 MB in an hour of attack."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_body_bytes_each", "small_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: >= 1")
        for name in ("body_retry_s", "refusals_per_s", "refusals_logged_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: > 0")
        if self.max_refusal_wait_s < 0:
            raise ConfigError(f"max_refusal_wait_s is {self.max_refusal_wait_s}; allowed: >= 0")
