"""What a worker has done since its epoch began. Only rises; read by heartbeats and tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Drop(StrEnum):
    """Why a frame was not acted upon."""

    STALE = "stale"  # it names no live lease, or another life
    STRANGER = "stranger"  # its sender has not said HELLO
    FOREIGN = "foreign"  # the attempt is another server's
    REJECTED = "rejected"  # it asks for what cannot be
    FORGED = "forged"  # its MAC is not by the key of its attempt
    UNEXPECTED = "unexpected"  # not a frame for this listener


@dataclass(slots=True)
class Counters:
    """Named as in `transport.frames.Load`, which carries them.

    Attributes:
      kv_shared_bytes: those of `kv_bytes` that went through no socket.
      prompt_tokens: those of `computed_tokens` that decode computed of prompts.
      borrowed_steps: those of `steps` that used others' cores.
      late_rows: attempts' parts of steps that returned after the attempt had ended.
      late_tokens: what these had computed, prompts' tokens not counted.
      speculative_rows: rows that carried guesses.
      speculative_proposed: guesses that they carried.
      speculative_accepted: guesses that were the token that was chosen.
      busy_s: that the device was in steps, drafts included.
      busy_row_s: the same, each step times its rows.
      dropped: frames that were not acted upon.
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
        """Frames that were not acted upon, whatever the reason."""
        return self.dropped.total()

    def dropped_by_reason(self) -> dict[str, int]:
        """Return the same by reason, in plain words."""
        return {reason.value: count for reason, count in self.dropped.items()}

    def used_device(self, elapsed_s: float, num_rows: int = 0) -> None:
        """Count time of the device: a step with so many rows, or drafts."""
        self.busy_s += elapsed_s
        self.busy_row_s += elapsed_s * num_rows

    def drop(self, reason: Drop) -> None:
        """Count a frame that is not acted upon."""
        self.dropped[reason] += 1
