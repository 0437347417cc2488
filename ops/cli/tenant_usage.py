"""`triolet tenant usage`: fetches the limits and usage of tenants from a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import httpx2
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from triolet.plain_text import one_line

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
