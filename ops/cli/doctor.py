"""`triolet doctor`: runs every check and shows what was found, as a table or as JSON."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from triolet.config import EngineConfig

from ..private_directory import parent_directory
from .arguments import engine_arguments
from .check_machine import (
    check_cpu,
    check_kernels,
    check_memory,
    check_open_files,
    check_packages,
    check_python,
    check_torch,
    torch_unloaded,
)
from .check_places import check_links, check_model, check_port
from .finding import Finding, Status
from .options import DEFAULT_HOST, DEFAULT_PORT

if TYPE_CHECKING:
    from pathlib import Path

MARKS: Final = {
    Status.OK: Text("✓", style="green"),
    Status.WARN: Text("!", style="bold yellow"),
    Status.FAIL: Text("✗", style="bold red"),
}
WORKER_OVERHEAD_BYTES: Final = 400 * 1024 * 1024
"""What a worker's process takes beside weights and pool; measured with the CPU build of torch."""


class Wanted(NamedTuple):
    """What is to be served, and where."""

    model: Path | None
    host: str
    port: int
    engine: EngineConfig


def run_doctor(wanted: Wanted, *, as_json: bool) -> bool:
    """Check and show; return whether nothing failed."""
    findings = examine(wanted)
    is_well = all(finding.status is not Status.FAIL for finding in findings)
    if as_json:
        rows = [finding._asdict() for finding in findings]
        sys.stdout.write(json.dumps({"ok": is_well, "findings": rows}, indent=2) + "\n")
    else:
        show(findings, serve_command(wanted), Console(highlight=False))
    return is_well


def examine(wanted: Wanted) -> list[Finding]:
    """Return what every check found. torch, which takes seconds to load, is loaded only where
    nothing else keeps Triolet from serving."""
    engine = wanted.engine
    model_finding, found = check_model(wanted.model, engine)
    loaded_bytes = 0 if found is None else found.loaded_bytes
    # Of two workers.
    wanted_bytes = 2 * (loaded_bytes + engine.kv_pool_bytes + WORKER_OVERHEAD_BYTES)
    machine = [
        check_python(),
        check_packages(),
        check_cpu(),
        check_kernels(),
        check_memory(wanted_bytes),
    ]
    places = [
        check_open_files(),
        *check_links(parent_directory()),
        check_port(wanted.host, wanted.port),
        model_finding,
    ]
    has_failed = any(finding.status is Status.FAIL for finding in (*machine, *places))
    return [*machine, *([torch_unloaded()] if has_failed else check_torch()), *places]


def serve_command(wanted: Wanted) -> str:
    """Return the command that serves what was looked at."""
    command = ["triolet", "serve"]
    if wanted.model is not None:
        command.append(str(wanted.model))
    if wanted.host != DEFAULT_HOST:
        command += ["--host", wanted.host]
    if wanted.port != DEFAULT_PORT:
        command += ["--port", str(wanted.port)]
    usual = _options(EngineConfig())
    command += [
        word for option in _options(wanted.engine) if option not in usual for word in option
    ]
    return shlex.join(command)


def _options(engine: EngineConfig) -> list[tuple[str, ...]]:
    """Return the options of a worker, each with its value."""
    found: list[tuple[str, ...]] = []
    for word in engine_arguments(engine):
        if word.startswith("--"):
            found.append((word,))
        else:
            found[-1] = (*found[-1], word)
    return found


def show(findings: list[Finding], command: str, console: Console) -> None:
    """Print the table and one line that sums it up, with the command that serves."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        seen = Text(finding.detail)
        if finding.remedy:
            seen.append(f"\n→ {finding.remedy}", style="cyan")
        table.add_row(MARKS[finding.status], finding.subject, seen)
    console.print()
    console.print(table)
    failed = sum(finding.status is Status.FAIL for finding in findings)
    warned = sum(finding.status is Status.WARN for finding in findings)
    console.print()
    if failed:
        console.print(f"[bold red]{failed} to mend[/] before Triolet can serve.")
    elif warned:
        console.print(f"[bold yellow]Triolet can serve[/]; {warned} could be better. Serve with:")
    else:
        console.print("[bold green]All well.[/] Serve with:")
    if not failed:
        console.print(Text(f"  {command}"), soft_wrap=True)
    console.print()
