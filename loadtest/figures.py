"""Record the times of each stream, and compute percentiles as rows of a table. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .harness.statistics import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """Record of a finished stream.

    Attributes:
      protocol: "SSE" or "WS".
      prompt: kind of prompt (see harness/prompts.py).
      failure: why it failed; None if it succeeded.
      tokens: completion tokens in the server's usage.
      ttft_s: time from sending to the first text, None without text.
      itl_s: mean time between tokens, None if the text came in one piece.
      tokens_per_s: tokens divided by the whole duration of the stream, including waiting.
    """

    protocol: str
    prompt: str
    failure: str | None
    tokens: int
    ttft_s: float | None
    itl_s: float | None
    tokens_per_s: float | None


class StreamClock:
    """Records the arrival times of the pieces of a stream."""

    def __init__(self, now_s: float) -> None:
        self._sent_s = now_s
        self._first_s: float | None = None
        self._last_s = now_s

    def piece(self, now_s: float) -> None:
        """Record a piece of text. It may contain several tokens."""
        if self._first_s is None:
            self._first_s = now_s
        self._last_s = now_s

    def record(self, protocol: str, prompt: str, tokens: int, failure: str | None) -> StreamRecord:
        """Return the record of the stream.

        The mean time between tokens is computed from the first and the last text, because servers
        may merge tokens into one piece: single gaps would show the merging.
        """
        ttft_s = itl_s = tokens_per_s = None
        if self._first_s is not None:
            ttft_s = self._first_s - self._sent_s
            duration_s = self._last_s - self._sent_s
            if tokens > 1 and self._last_s > self._first_s:
                itl_s = (self._last_s - self._first_s) / (tokens - 1)
            if tokens > 0 and duration_s > 0:
                tokens_per_s = tokens / duration_s
        return StreamRecord(protocol, prompt, failure, tokens, ttft_s, itl_s, tokens_per_s)


PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of one protocol.

    Attributes:
      name: such as "SSE TTFT".
      unit: "ms" or "tokens/s".
      count: number of streams.
      percentiles: values for PERCENTILES. For tokens/s low is bad: 99 % of streams exceed p99.
    """

    name: str
    unit: str
    count: int
    percentiles: tuple[float, ...]


def rows(records: Sequence[StreamRecord]) -> list[Row]:
    """Return the rows of successful streams for the table."""
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
                sign = -1 if unit == "tokens/s" else 1  # low is bad
                signed = [sign * value for value in values]
                points = tuple(sign * percentile(signed, percent) for percent in PERCENTILES)
                table.append(Row(f"{protocol} {name}", unit, len(values), points))
    return table


def failures(records: Sequence[StreamRecord]) -> Counter[str]:
    """Return the number of failures by protocol and reason."""
    return Counter(f"{r.protocol}: {r.failure}" for r in records if r.failure is not None)
