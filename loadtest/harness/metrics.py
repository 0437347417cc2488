"""Parse the text of /metrics, and sum up the KV blocks in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS: Final = "triolet_kv_blocks"
_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def samples(metrics: str) -> Iterator[tuple[str, str, float]]:
    """Yield the name, labels and value of each sample."""
    for name, labels, value in _SAMPLE.findall(metrics):
        yield name, labels, float(value)


def total(metrics: str, name: str, label: str = "") -> float:
    """Return the sum of a metric's samples with `label` in their labels."""
    return sum(value for n, labels, value in samples(metrics) if n == name and label in labels)


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """KV blocks of all pools by state."""

    free: int
    cached: int
    leased: int

    @property
    def is_all_free(self) -> bool:
        """Return whether no block is leased; cached ones can be evicted at once."""
        return self.leased == 0 and self.free + self.cached > 0

    def __str__(self) -> str:
        return f"{self.free} free, {self.cached} cached, {self.leased} leased"


def blocks_of(metrics: str) -> KvBlocks:
    """Return the sums over all workers from the text of /metrics."""
    states = ("free", "cached", "leased")
    return KvBlocks(*(int(total(metrics, BLOCKS, f'state="{state}"')) for state in states))
