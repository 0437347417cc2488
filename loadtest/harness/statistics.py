"""Percentiles, and their format in tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Number = TypeVar("Number", int, float)


def percentile(values: Iterable[Number], percent: float) -> Number:
    """Return the nearest-rank percentile: the least value that `percent` of values do not exceed.

    That is x[ceil(n * percent / 100)] of the n sorted values, counted from 1; percent 0 gives the
    smallest.

    Source: definition 1 of Hyndman and Fan, "Sample Quantiles in Statistical Packages", 1996.
    """
    ranked = sorted(values)
    return ranked[max(0, -int(-percent * len(ranked) // 100) - 1)]


def milliseconds(seconds: Sequence[float], *percents: float, digits: int = 0) -> list[str]:
    """Return percentiles in milliseconds as text, or dashes without values."""
    if not seconds:
        return ["-"] * len(percents)
    return [f"{1000 * percentile(seconds, percent):.{digits}f}" for percent in percents]
