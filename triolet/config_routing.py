"""Bounds of where a prompt is computed: by a prefill worker, or by decode itself.

Knows numbers; what they decide is server/fleet/routing.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .errors import ConfigError
from .units import MILLISECONDS, SECONDS


class LocalPrefill(StrEnum):
    """When decode computes a prompt itself."""

    OFF = "off"
    """Never: without a prefill worker requests wait, and are refused in the end."""
    AUTO = "auto"
    """Where it is short and costs its streams less than the way over a prefill worker takes, and
    whenever no prefill worker is there."""
    ALWAYS = "always"
    """Every prompt: prefill workers get nothing."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """What conditional disaggregation may cost."""

    local_prefill: LocalPrefill = LocalPrefill.AUTO
    max_local_tokens: int = 256
    """Prompt tokens without KV beyond which a prefill worker computes, whatever the rates say: a
    rate is a guess about the next second, and a long prompt lasts longer than that."""
    max_gap_growth: float = 0.5
    """A prompt that decode computes beside running streams may lengthen a step by this share of
    it: gaps within one and a half of their usual length are what disaggregation is for."""
    stream_weight: float = 0.25
    """What a second that a running stream waits for its next token counts, beside one that a
    client waits for its first: readers are behind their streams, and do not see a short wait."""
    prefill_grace_s: float = 1.0 * SECONDS
    """How long after the last prefill worker was lost its return is waited for, before decode
    computes long prompts too: most of a restart on the same machine. It also covers the start, when
    decode may be met first."""

    suspect_grace_s: float = 10.0 * SECONDS
    """The same for a prompt that may be what the last one died of: a restart, slow ones included.
    Prefill has nothing but prompts to lose, decode has streams."""

    backlog_s: float = 250 * MILLISECONDS
    """Of computing, by its own measured pace, that a prefill worker is given ahead, all servers
    together; the rest waits here, where classes, tenants and deadlines decide who goes first. Some
    steps, so that a worker never waits for the next prompt."""

    overtaken_s: float = 1.0 * SECONDS
    """A prompt that computes for longer is no reason to keep shorter ones back: the worker computes
    them beside it. Whatever is shorter is done in its turn, or those that come after it by their
    tenants' shares would be before it."""

    def __post_init__(self) -> None:
        for name, value in (
            ("max_local_tokens", self.max_local_tokens),
            ("max_gap_growth", self.max_gap_growth),
            ("stream_weight", self.stream_weight),
            ("prefill_grace_s", self.prefill_grace_s),
            ("suspect_grace_s", self.suspect_grace_s),
            ("backlog_s", self.backlog_s),
            ("overtaken_s", self.overtaken_s),
        ):
            if value < 0:
                raise ConfigError(f"{name} is {value!r}; allowed: >= 0")
