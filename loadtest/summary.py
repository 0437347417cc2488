"""Percentiles of a run's streams, as rows of a table. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .stream_times import StreamRecord

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one protocol.

    Attributes:
      name: such as "SSE TTFT".
      unit: "ms" or "tokens/s".
      count: streams that it was taken from.
      percentiles: by PERCENTILES. For tokens/s the bad end is the low one: p99 is what 99 % exceed.
    """

    name: str
    unit: str
    count: int
    percentiles: tuple[float, ...]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed.

    Args:
      ordered: ascending, at least one.
      percent: 0 < percent <= 100.
    """
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def rows(records: Sequence[StreamRecord]) -> list[Row]:
    """Return what is to be shown of the streams that ended well."""
    table = []
    for protocol in sorted({record.protocol for record in records}):
        good = [r for r in records if r.protocol == protocol and r.failure is None]
        figures = (
            ("TTFT", "ms", [r.ttft_s * 1000 for r in good if r.ttft_s is not None]),
            ("ITL", "ms", [r.itl_s * 1000 for r in good if r.itl_s is not None]),
            ("tokens/s", "tokens/s", [r.tokens_per_s for r in good if r.tokens_per_s is not None]),
        )
        for name, unit, values in figures:
            if values:
                ordered = sorted(values, reverse=unit == "tokens/s")
                points = tuple(percentile(ordered, percent) for percent in PERCENTILES)
                table.append(Row(f"{protocol} {name}", unit, len(values), points))
    return table


def failures(records: Sequence[StreamRecord]) -> Counter[str]:
    """Return how often each failure came, by protocol and reason."""
    return Counter(f"{r.protocol}: {r.failure}" for r in records if r.failure is not None)
