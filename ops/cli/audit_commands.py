"""`triolet audit`: show, verify and export the log of administrative actions (ops/audit).

`triolet doctor --ledger` is something else: it checks the blocks and leases of a running fleet.
"""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path  # noqa: TC003 (typer reads annotations)
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from triolet.errors import ConfigError
from triolet.plain_text import one_line
from triolet.units import parse_span

from ..audit.events import Action, AuditEntry, time_text
from ..exit_codes import EXIT_FAILED
from .options import AuditOption  # noqa: TC001 (typer reads annotations)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..audit.verification import LogVerdict


audit_app = typer.Typer(help="Tamper-evident log of administrative actions.", no_args_is_help=True)

SHOWN_DIGITS: Final = 12
"""Digits shown of a digest, enough to tell two states apart."""
DAMAGE_REMEDY: Final = (
    "keep the directory as it is and compare it with a copy or with heads kept elsewhere; start a "
    "new log with --audit and another directory"
)


class ExportFormat(StrEnum):
    """Output formats of an export."""

    JSONL = "jsonl"
    CSV = "csv"


@audit_app.command("show")
def show(
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Earliest: 24h, 7d, 2026-05-01, 2026-05-01T12:00:00Z."),
    ] = None,
    action: Annotated[
        list[str] | None,
        typer.Option(help="Such as tenant.add, or tenant for all its actions; repeatable."),
    ] = None,
    audit: AuditOption = None,
) -> None:
    """Show the entries, oldest first."""
    from ..audit.verification import read_entries, take_snapshot

    earliest = "" if since is None else _earliest(since)
    wanted = _actions(action or ())
    for _, entry in read_entries(take_snapshot(_folder(audit))):
        # All times have the same format, so they sort as text.
        if entry.time >= earliest and (not wanted or _is_wanted(entry.action, wanted)):
            typer.echo(_row(entry))


@audit_app.command("verify")
def verify(
    heads: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Heads kept elsewhere, one per line."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    audit: AuditOption = None,
) -> None:
    """Check every entry against the signed heads; exit with 1 if anything was changed."""
    from ..audit.verification import read_witnesses
    from ..audit.verification import verify as verify_log

    folder = _folder(audit)
    verdict = verify_log(folder, () if heads is None else read_witnesses(heads))
    if as_json:
        typer.echo(msgspec.json.encode(verdict).decode())
    else:
        _tell(folder, verdict)
    if verdict.defects:
        raise typer.Exit(EXIT_FAILED)


@audit_app.command("prove")
def prove(
    index: Annotated[int, typer.Argument(metavar="INDEX", min=0, help="Index of the entry.")],
    audit: AuditOption = None,
) -> None:
    """Print a proof, as JSON, that the newest signed head covers an entry."""
    from ..audit.verification import prove as prove_entry

    typer.echo(msgspec.json.encode(prove_entry(_folder(audit), index)).decode())


@audit_app.command("export")
def export(
    form: Annotated[ExportFormat, typer.Option("--format", help="Output format.")] = (
        ExportFormat.JSONL
    ),
    audit: AuditOption = None,
) -> None:
    """Write all entries to stdout for other programs."""
    from ..audit.verification import read_entries, take_snapshot

    entries = read_entries(take_snapshot(_folder(audit)))
    if form is ExportFormat.JSONL:
        for content, _ in entries:
            typer.echo(content.decode())
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(AuditEntry.__struct_fields__)
    for _, entry in entries:
        values = (getattr(entry, name) for name in AuditEntry.__struct_fields__)
        writer.writerow(
            msgspec.json.encode(value).decode() if isinstance(value, dict) else value
            for value in values
        )


@audit_app.command("head")
def head(audit: AuditOption = None) -> None:
    """Print the newest signed head, to keep elsewhere for `verify --heads`."""
    from ..audit.verification import newest_head, take_snapshot

    line, _ = newest_head(take_snapshot(_folder(audit)))
    typer.echo(line.decode())


def _folder(given: Path | None) -> Path:
    from ..audit.recording import default_folder

    return default_folder() if given is None else given


def _earliest(text: str) -> str:
    span_s = parse_span(text)
    try:
        if span_s is not None:
            return time_text((datetime.now(UTC) - timedelta(seconds=span_s)).timestamp())
        found = datetime.fromisoformat(text)
        # Entries are shown in UTC.
        return time_text((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--since is {text!r}; allowed: a number of s, m, h or d such as 24h, or a time such "
            "as 2026-05-01 or 2026-05-01T12:00:00Z"
        ) from None


def _actions(given: Iterable[str]) -> tuple[str, ...]:
    known = {word for action in Action for word in (action.value, action.value.partition(".")[0])}
    wanted = tuple(given)
    for word in wanted:
        if word not in known:
            raise ConfigError(
                f"--action is {word!r}; allowed: {', '.join(sorted(known))}; a word without a dot "
                "selects all actions of that group"
            )
    return wanted


def _is_wanted(action: str, wanted: tuple[str, ...]) -> bool:
    return any(action == word or action.startswith(f"{word}.") for word in wanted)


def _row(entry: AuditEntry) -> str:
    parts = [str(entry.index), entry.time, entry.actor, entry.action, entry.outcome]
    if entry.subject:
        parts.append(entry.subject)
    for name, value in (("before", entry.before), ("after", entry.after)):
        if value is not None:
            parts.append(f"{name}={value.partition(':')[2][:SHOWN_DIGITS]}")
    parts += [f"{name}={value}" for name, value in (entry.counts or {}).items()]
    if entry.reason is not None:
        parts.append(f'reason="{entry.reason}"')
    if entry.request_id is not None:
        parts.append(f"request={entry.request_id}")
    return one_line("  ".join(parts))


def _tell(folder: Path, verdict: LogVerdict) -> None:
    for defect in verdict.defects:
        place = f"{defect.file}, line {defect.line}" if defect.line else defect.file
        typer.echo(f"wrong: {place}: {defect.what}")
    for note in verdict.notes:
        typer.echo(f"note: {note}")
    trusted = verdict.trusted
    if verdict.defects:
        part = (
            "no signed head can be trusted"
            if trusted is None
            else f"entries 0 to {trusted.size - 1} match the head signed at {trusted.time}"
        )
        typer.echo(f"{folder}: {part}; {DAMAGE_REMEDY}")
        return
    kept = f", {verdict.witnessed} kept elsewhere" if verdict.witnessed else ""
    typer.echo(f"{folder}: {verdict.entries} entries match {verdict.heads} signed heads{kept}")
    if verdict.unsigned:
        typer.echo(
            f"the last {verdict.unsigned} are complete and not yet signed: the next append signs "
            "them"
        )
