"""Counters of a worker since its epoch began, for heartbeats and audits. They only rise."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Drop(StrEnum):
    """Why a frame was ignored."""

    STALE = "stale"  # it names no live lease, or another epoch
    STRANGER = "stranger"  # its sender has sent no HELLO
    FOREIGN = "foreign"  # the attempt belongs to another server
    REJECTED = "rejected"  # its request is invalid
    FORGED = "forged"  # its MAC does not match the attempt's key
    UNEXPECTED = "unexpected"  # not a frame for this listener


@dataclass(slots=True)
class Counters:
    """Named as in `transport.frames.Load`, which carries them.

    Attributes:
      kv_shared_bytes: part of `kv_bytes` that went through no socket.
      prompt_tokens: part of `computed_tokens`: prompt tokens that decode computed.
      borrowed_steps: part of `steps` that used borrowed cores.
      late_rows: rows of steps that returned after their attempt had ended.
      late_tokens: tokens computed in them, without prompt tokens.
      speculative_rows: rows with guesses.
      speculative_proposed: guesses in them.
      speculative_accepted: guesses equal to the chosen token.
      busy_s: time that the device spent in steps, including drafts.
      busy_row_s: the same, each step times its rows.
      dropped: frames ignored.
    """

    steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    kv_bytes: int = 0
    kv_shared_bytes: int = 0
    bad_digests: int = 0
    preemptions: int = 0
    local_prompts: int = 0
    borrowed_steps: int = 0
    late_rows: int = 0
    late_tokens: int = 0
    speculative_rows: int = 0
    speculative_proposed: int = 0
    speculative_accepted: int = 0
    busy_s: float = 0.0
    busy_row_s: float = 0.0
    dropped: Counter[Drop] = field(default_factory=Counter)

    @property
    def stale_frames(self) -> int:
        """Number of ignored frames, for any reason."""
        return self.dropped.total()

    def dropped_by_reason(self) -> dict[str, int]:
        """Return the ignored frames by reason, in plain words."""
        return {reason.value: count for reason, count in self.dropped.items()}

    def used_device(self, elapsed_s: float, num_rows: int = 0) -> None:
        """Add time of the device: a step with this many rows, or drafts."""
        self.busy_s += elapsed_s
        self.busy_row_s += elapsed_s * num_rows

    def drop(self, reason: Drop) -> None:
        """Count an ignored frame."""
        self.dropped[reason] += 1
