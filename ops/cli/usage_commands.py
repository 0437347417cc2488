"""`triolet usage`, which prints totals of the usage ledger, and `triolet tenant usage`, which
fetches the limits and usage of tenants from a running server.
"""

from __future__ import annotations

import csv
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import httpx2
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from triolet.errors import ConfigError
from triolet.plain_text import one_line
from triolet.units import NANOS, parse_span
from triolet.usage_database import FIELDS, usage_by

from ..api_key import key_headers, key_remedy
from ..exit_codes import EXIT_FAILED, CommandFailed
from ..http_trust import verify_for

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN: Final = "/v1/usage"
EVERYBODYS: Final = "/fleet/usage"
TIMEOUT_S: Final = 30.0
"""Reading ten thousand tenants from Redis takes some seconds."""


def show_usage(url: str, *, as_json: bool) -> None:
    """Print the usage of all tenants with an operator's key, or of one tenant with its key.

    Raises:
      CommandFailed: the server did not return usage.
    """
    answer = _get(url, EVERYBODYS)
    if answer.status_code == httpx2.codes.FORBIDDEN:
        answer = _get(url, OWN)
    if answer.status_code != httpx2.codes.OK:
        raise CommandFailed(
            f"{url} answers {answer.status_code}: {one_line(answer.text)[:200]}"
            + (f"; {remedy}" if (remedy := key_remedy(answer.status_code)) else ""),
            EXIT_FAILED,
        )
    document: dict[str, Any] = msgspec.json.decode(answer.content)
    rows: Sequence[dict[str, Any]] = document.get("data", [document])
    if as_json:
        typer.echo(msgspec.json.encode(rows).decode())
        return
    table = Table("tenant", "plan", "requests left", "tokens left", "in flight", "tokens", "spent",
                  box=None, pad_edge=False)  # fmt: skip
    for row in sorted(rows, key=lambda row: str(row["tenant"])):
        limits, left, month = row["limits"], row["remaining"], row["this_month"]
        table.add_row(
            row["tenant"],
            row["plan"],
            _of(left["requests"], limits["requests_per_minute"]),
            _of(left["tokens"], limits["tokens_per_minute"]),
            _of(row["in_flight"], limits["max_concurrent"]),
            str(month["tokens"]),
            _of(round(month["spent"], 6), limits["budget"]),
        )
    Console(highlight=False).print(table)
    if missing := words_for_missing(rows):
        typer.echo(missing)


def words_for_missing(rows: Sequence[dict[str, Any]]) -> str:
    """Return a sentence about servers missing from the rows, or an empty string."""
    counted = min((row["servers"]["counted"] for row in rows), default=0)
    servers = max((row["servers"]["all"] for row in rows), default=0)
    if counted >= servers:
        return ""
    return f"Counts {counted} of {servers} servers: the others did not answer."


def _of(value: float | None, limit: float | None) -> str:
    shown = "" if value is None else f"{value:g}"
    return shown if limit is None else f"{shown} of {limit:g}"


def _get(url: str, path: str) -> httpx2.Response:
    try:
        return httpx2.get(
            httpx2.URL(url).join(path),
            headers=key_headers(),
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=verify_for(url),
        )
    except (httpx2.TransportError, httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise CommandFailed(
            f"{url} does not answer: {error}; give the address of a running server with --url",
            EXIT_FAILED,
        ) from None


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
