"""`triolet doctor`: runs every check and shows what was found, as a table or as JSON.

Knows which checks there are and in which order; what they look at is theirs.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from triolet.config import EngineConfig

from .check_machine import (
    check_cpu,
    check_kernels,
    check_memory,
    check_open_files,
    check_packages,
    check_python,
    check_torch,
)
from .check_places import check_links, check_model, check_port
from .finding import Finding, Status
from .private_directory import parent_directory

if TYPE_CHECKING:
    from pathlib import Path

MARKS: Final = {
    Status.OK: Text("✓", style="green"),
    Status.WARN: Text("!", style="bold yellow"),
    Status.FAIL: Text("✗", style="bold red"),
}
WORKER_OVERHEAD_BYTES: Final = 400 * 1024 * 1024
"""What a worker's process takes beside weights and pool; measured with the CPU build of torch."""


def run_doctor(model: Path | None, host: str, port: int, *, as_json: bool) -> bool:
    """Check and show; return whether nothing failed."""
    findings = examine(model, host, port)
    is_well = all(finding.status is not Status.FAIL for finding in findings)
    if as_json:
        rows = [finding._asdict() for finding in findings]
        sys.stdout.write(json.dumps({"ok": is_well, "findings": rows}, indent=2) + "\n")
    else:
        show(findings, Console(highlight=False))
    return is_well


def examine(model: Path | None, host: str, port: int) -> list[Finding]:
    """Return what every check found."""
    model_finding, found = check_model(model)
    weight_bytes = 0 if found is None else found.weight_bytes
    # Two workers; bfloat16 weights may become float32 ones.
    wanted_bytes = 2 * (2 * weight_bytes + EngineConfig().kv_pool_bytes + WORKER_OVERHEAD_BYTES)
    return [
        check_python(),
        check_packages(),
        check_cpu(),
        check_kernels(),
        check_memory(wanted_bytes),
        *check_torch(),
        check_open_files(),
        *check_links(parent_directory()),
        check_port(host, port),
        model_finding,
    ]


def show(findings: list[Finding], console: Console) -> None:
    """Print the table and one line that sums it up."""
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
        console.print(f"[bold yellow]Triolet can serve[/]; {warned} could be better.")
    else:
        console.print("[bold green]All well.[/] Serve with: triolet serve")
    console.print()
