"""Bounds of the fair queue: whose turn it is when more wait than there is room for.

Knows numbers; what they decide is server/fleet/fair_queue.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError


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
