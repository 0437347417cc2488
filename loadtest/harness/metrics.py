"""The samples of /metrics."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def samples(metrics: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of each sample."""
    for name, labels, value in _SAMPLE.findall(metrics):
        yield name, labels, float(value)


def total(metrics: str, name: str, label: str = "") -> float:
    """Return the sum of the samples of a name whose labels contain `label`."""
    return sum(value for n, labels, value in samples(metrics) if n == name and label in labels)
