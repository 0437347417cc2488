"""`triolet doctor --ledger URL`: checks the KV blocks, leases and requests of a running fleet.

Fetches an audit from the server and checks its invariants here. States that are wrong only if they
last are checked twice. Each violation is printed with its remedy.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

import httpx2
import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from triolet.audit import FleetAudit
from triolet.config import require
from triolet.errors import said_by
from triolet.invariants import check_invariants
from triolet.plain_text import one_line
from triolet.units import show_size

from ..api_key import key_headers, key_remedy
from ..exit_codes import EXIT_BAD_INPUT, EXIT_FAILED, CommandFailed
from ..http_trust import verify_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.audit import LeaseAudit, ProcessFacts, ServerAudit, WorkerAudit, WorkerView
    from triolet.invariants import Violation

PATH: Final = "/fleet/audit"
TIMEOUT_S: Final = 10.0
"""A server answers within a second plus its own pauses, even if workers do not answer."""
MARGIN_S: Final = 0.5
SILENCE_S: Final = 2.0
"""Wait before asking a silent worker again. The server waits for one second, which a worker on a
busy machine may exceed."""
ATTEMPT_CHARACTERS: Final = 34
"""Width of `REQUEST_ID/NUMBER`. It is never cut, because operators search logs for it."""
SHOWN_LEASES: Final = 20
"""Leases shown per worker, oldest first: a leaked lease is old."""


def run_ledger(url: str, *, as_json: bool, sleep: Callable[[float], None] = time.sleep) -> int:
    """Fetch, check and print the audit. Return the exit code: 0 if nothing is wrong, else 1.

    Raises:
      CommandFailed: the server did not return an audit; the exit code is 2.
    """
    audit = fetch_audit(url)
    patience_s = doubtful_for_s(audit)
    if patience_s > 0:
        sys.stderr.write(f"a worker or a frame may be late; checking again in {patience_s:.1f} s\n")
        sleep(patience_s)
        audit = fetch_audit(url)
    violations = check_invariants(audit)
    silent = [view for view in audit.workers if view.audit is None]
    is_well = not violations and not silent
    if as_json:
        document = {
            "ok": is_well,
            "violations": violations,
            **msgspec.structs.asdict(audit),
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    else:
        show_ledger(audit, violations, Console(highlight=False))
    return 0 if is_well else EXIT_FAILED


def fetch_audit(url: str) -> FleetAudit:
    """Fetch the audit of a fleet from a server's base address.

    Raises:
      CommandFailed: no server answers, or the response is not an audit.
    """
    url = url.rstrip("/")
    try:
        is_web = httpx2.URL(url).scheme in {"http", "https"}
    except httpx2.InvalidURL:
        is_web = False
    require(is_web, "--ledger", url, "a base address such as http://127.0.0.1:8000")
    try:
        answer = httpx2.get(
            f"{url}{PATH}",
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=verify_for(url),
            headers=key_headers(),
        )
    except httpx2.TransportError as error:
        raise CommandFailed(
            f"{url} does not answer ({one_line(said_by(error))}); check that the server process "
            "is running and that this is its port. `/health/live` reports whether its event loop "
            "responds",
            EXIT_BAD_INPUT,
        ) from error
    if answer.status_code != httpx2.codes.OK:
        raise CommandFailed(
            f"{url}{PATH} answers {answer.status_code}: {_complaint(answer)}"
            + (f"; {remedy}" if (remedy := key_remedy(answer.status_code)) else ""),
            EXIT_BAD_INPUT,
        )
    try:
        return FleetAudit.from_json(answer.content)
    except ValueError as error:
        message = (
            f"{url}{PATH} is not an audit ({one_line(str(error))}); check that the server has the "
            "same release of Triolet"
        )
        raise CommandFailed(message, EXIT_BAD_INPUT) from error


def doubtful_for_s(audit: FleetAudit) -> float:
    """Return the seconds after which a doubtful state, if it persists, is a violation."""
    views = [view for each in (audit, *audit.siblings) for view in each.workers]
    return max(
        (
            SILENCE_S if view.audit is None else view.audit.lease_ttl_s + audit.grace_s + MARGIN_S
            for view in views
            if view.audit is None or view.unknown or view.missing
        ),
        default=0.0,
    )


def show_ledger(audit: FleetAudit, violations: Sequence[Violation], console: Console) -> None:
    """Print the state of the servers, of each worker and its leases, and the violations."""
    console.print()
    for each in (audit, *audit.siblings):
        console.print(_server_line(each.server))
    console.print()
    console.print(_workers_table(audit.workers))
    console.print()
    for view in audit.workers:
        if view.audit is not None:
            console.print(_beside(view.name, view.audit))
    for view in audit.workers:
        if view.audit is not None and view.audit.num_leases:
            shown = view.audit.leases[:SHOWN_LEASES]
            for server in dict.fromkeys(lease.server for lease in shown):
                heading = f"Leases on {one_line(view.name)} of {one_line(server)}"
                console.print()
                console.print(Text(heading, style="bold"))
                console.print(_leases_table([one for one in shown if one.server == server]))
            more = view.audit.num_leases - min(SHOWN_LEASES, len(view.audit.leases))
            if more:
                console.print(f"… and {more} newer ones; --json lists more")
    console.print()
    for violation in violations:
        console.print(_violation(violation))
    _sum_up(audit, violations, console)
    console.print()


def _sum_up(audit: FleetAudit, violations: Sequence[Violation], console: Console) -> None:
    silent = [view for view in audit.workers if view.audit is None]
    for view in silent:
        words = Text("! ", style="bold yellow")
        words.append(one_line(view.name), style="bold")
        words.append(f" did not answer the audit: {one_line(view.silence)}", style="default")
        words.append(
            "\n→ restart it if it does not recover within seconds; its requests continue on other "
            "workers",
            style="cyan",
        )
        console.print(words)
    if violations:
        console.print(f"[bold red]Violations: {len(violations)}.[/] Follow the remedy of each.")
    elif silent:
        console.print("[bold yellow]No violations, but some workers did not answer.[/]")
    else:
        console.print("[bold green]All blocks, leases and requests are consistent.[/]")


def _server_line(server: ServerAudit) -> Text:
    line = Text(one_line(server.name), style="bold")
    line.append(
        f"  {server.received} requests received, {server.accepted} accepted, "
        f"{sum(server.rejected.values())} rejected, {sum(server.ended.values())} ended; "
        f"{server.waiting} queued, {server.running} running; {server.connections} connections"
        f"{', draining' if server.is_draining else ''}; {_process(server.process)}",
        style="default",
    )
    return line


def _workers_table(views: Sequence[WorkerView]) -> Table:
    names = ("worker", "state", "free / total blocks", "cached", "leased", "leases", "in step")
    columns = (Column(name, no_wrap=True) for name in names)
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for view in views:
        audit = view.audit
        name, state = Text(one_line(view.name), style="bold"), Text(one_line(view.state))
        if audit is None:
            table.add_row(name, state, *["?"] * 5)
            continue
        pool = audit.pool
        table.add_row(
            name,
            state,
            f"{pool.free_blocks} / {pool.total_blocks}",
            str(pool.cached_blocks),
            _leased(audit),
            str(audit.num_leases),
            str(audit.rows),
        )
    return table


def _beside(name: str, audit: WorkerAudit) -> Text:
    """Return the line about a worker's process, KV transfers and dropped frames."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in audit.dropped.items())
    line = Text(one_line(name), style="bold")
    line.append(
        f"  {_process(audit.process)}; KV in transfer: "
        f"{show_size(audit.windows.kv_under_way_bytes)}; "
        f"frames dropped: {one_line(dropped) or 'none'}",
        style="default",
    )
    return line


def _leased(audit: WorkerAudit) -> str:
    draft = audit.draft_pool
    return str(audit.pool.leased_blocks) + (f" + {draft.leased_blocks} draft" if draft else "")


def _leases_table(leases: Sequence[LeaseAudit]) -> Table:
    names = ("state", "blocks", "age", "renewed", "deadline in", "tokens")
    table = Table(
        Column("attempt", no_wrap=True, min_width=ATTEMPT_CHARACTERS),
        *(Column(name, overflow="fold") for name in names),
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for lease in leases:
        window = "" if lease.allowed is None else f" of {lease.allowed}"
        table.add_row(
            Text(one_line(lease.attempt)),
            Text(one_line(lease.state)),
            str(lease.num_blocks),
            f"{lease.age_s:.1f} s",
            f"{lease.renewed_ago_s:.1f} s ago",
            f"{lease.remaining_s:.0f} s",
            f"{lease.num_tokens}{window}",
        )
    return table


def _violation(violation: Violation) -> Text:
    words = Text("✗ ", style="bold red")
    words.append(f"{violation.invariant} {one_line(violation.where)}: ", style="bold default")
    words.append(f"{one_line(violation.what)}\n  {violation.meaning}\n", style="default")
    words.append(f"→ {violation.remedy}\n", style="cyan")
    return words


def _process(process: ProcessFacts) -> str:
    known = [
        f"pid {process.pid}" if process.pid is not None else "",
        f"{process.open_fds} files" if process.open_fds is not None else "",
        f"{process.tasks} tasks" if process.tasks is not None else "",
        show_size(process.rss_bytes) if process.rss_bytes is not None else "",
    ]
    return ", ".join(fact for fact in known if fact) or "unknown"


def _complaint(answer: httpx2.Response) -> str:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = "the response is not from a Triolet server"
    return one_line(message)[:300]
