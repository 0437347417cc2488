"""`triolet usage`: prints totals of the usage ledger, grouped by the fields of `--by`."""

from __future__ import annotations

import csv
import sys
import time
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from triolet.errors import ConfigError
from triolet.units import NANOS, parse_span
from triolet.usage_database import FIELDS, usage_by

if TYPE_CHECKING:
    from collections.abc import Sequence

SUMS: Final = ("requests", "prompt", "cached", "completion", "reasoning", "price")
"""Columns after those of `--by`: requests, tokens by kind, price in the operator's currency."""


def run_usage(directory: str | None, by: str, since: str, *, as_csv: bool) -> None:
    """Print the totals of a ledger.

    Args:
      directory: directory of the ledger; None if the settings name none.
      by: comma-separated fields.
      since: a number of s, m, h or d.
      as_csv: print CSV.

    Raises:
      ConfigError: a field or the time is invalid, or no ledger exists.
    """
    fields = [field.strip() for field in by.split(",")]
    if any(field not in FIELDS for field in fields) or len({*fields}) < len(fields):
        raise ConfigError(
            f"--by is {by!r}; allowed: {', '.join(FIELDS)}, each once, comma-separated"
        )
    span_s = parse_span(since)
    if span_s is None:
        raise ConfigError(f"--since is {since!r}; allowed: a number of s, m, h or d such as 7d")
    if directory is None:
        raise ConfigError(
            "no usage ledger is named; give the --usage-dir or the --config of the servers"
        )
    rows = [
        (*row[:-1], f"{row[-1] / NANOS:.9f}".rstrip("0").rstrip("."))
        for row in usage_by(directory, fields, time.time() - span_s)
    ]
    _print_csv(fields, rows) if as_csv else _print_table(fields, rows)


def _print_csv(fields: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow((*fields, *SUMS))
    writer.writerows(rows)


def _print_table(fields: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
    table = Table(*fields, *SUMS, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False).print(table)
