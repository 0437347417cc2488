"""What a GPU could do at best: bytes that a decode step must read, operations that a prompt takes.

Pure arithmetic. Peaks are the makers' for a whole card; a share of them is what a benchmark states.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .model import Shape

BYTES: Final = 2
"""Of a number in bf16."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """A card's limits.

    Attributes:
      bytes_per_s: of its memory.
      flops: dense, bf16, per second.
    """

    bytes_per_s: float
    flops: float


KNOWN: Final = {
    "H200": Peaks(4.8e12, 989e12),
    "H100": Peaks(3.35e12, 989e12),
    "A100": Peaks(2.04e12, 312e12),
    "L40S": Peaks(0.864e12, 362e12),
    "L4": Peaks(0.3e12, 121e12),
}
"""The first name that a card's own contains counts."""


def peaks_of(name: str) -> Peaks | None:
    """Return the limits of a card, None if it is not known."""
    return next((peaks for known, peaks in KNOWN.items() if known in name), None)


def num_parameters(shape: Shape) -> int:
    """Return the parameters that a token is multiplied with; a tied embedding once."""
    return sum(prod(size) for size in shape.tensors().values())


def decode_ceiling(shape: Shape, batch: int, context: int, peaks: Peaks) -> float:
    """Return tokens per second if a step did nothing but read weights and KV, or multiply."""
    num_bytes = num_parameters(shape) * BYTES + batch * context * shape.kv_bytes_per_token
    step_s = max(num_bytes / peaks.bytes_per_s, 2 * num_parameters(shape) * batch / peaks.flops)
    return batch / step_s


def prefill_ceiling(shape: Shape, peaks: Peaks) -> float:
    """Return prompt tokens per second if nothing but the matrices took time."""
    return peaks.flops / (2 * num_parameters(shape))
