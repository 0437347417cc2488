"""The ten-minute plan: what runs in which order, and how long each part may take.

Pure. What matters most comes first: a kernel that computes something else makes every other figure
worthless. A part that does not fit into what is left of the time is skipped, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOTAL_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the plan.

    Attributes:
      name: in the table.
      most_s: it takes no longer, and must not begin with less left.
      what: for people.
    """

    name: str
    most_s: float
    what: str


STAGES: Final = (
    Stage("kernels", 120.0, "tests/engine/gpu and tests/gpu: kernels, parity, shipping, cancels"),
    Stage("limits", 15.0, "speed of copies and products; which batch sizes agree bit for bit"),
    Stage("small", 100.0, "the 0.5B model: decode, prefill, shipping, each backend"),
    Stage("small peer", 60.0, "transformers' continuous batching on the same model"),
    Stage("large", 140.0, "the 8B model, likewise"),
    Stage("large peer", 75.0, "transformers' continuous batching on the same model"),
    Stage("kills", 90.0, "processes killed under load; every answer compared"),
)


def refusal(stage: Stage, elapsed_s: float, total_s: float) -> str | None:
    """Return why a stage must not begin any more, or None."""
    left_s = total_s - elapsed_s
    if left_s >= stage.most_s:
        return None
    return f"{left_s:.0f} s were left, and it may take {stage.most_s:.0f}"
