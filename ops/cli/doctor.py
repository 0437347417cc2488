"""`triolet doctor`: runs every check and prints the findings as a table or as JSON."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from triolet.errors import ConfigError

from ..models.adapters import with_adapters
from ..models.model_directory import with_pool_share
from ..models.several import each_model, name_of
from ..models.stored import with_stored_model
from ..private_directory import parent_directory
from ..supervisor.prepare import require_auto
from ..supervisor.starter import available_gpus
from .check_machine import (
    Finding,
    FindingStatus,
    check_cpu,
    check_kernels,
    check_memory,
    check_open_files,
    check_packages,
    check_python,
    check_torch,
    torch_unloaded,
)
from .check_places import check_links, check_model, check_port, failed_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..settings.form import Settings

MARKS: Final = {
    FindingStatus.OK: Text("✓", style="green"),
    FindingStatus.WARN: Text("!", style="bold yellow"),
    FindingStatus.FAIL: Text("✗", style="bold red"),
}
WORKER_OVERHEAD_BYTES: Final = 400 * 1024 * 1024
"""Memory of a worker process beyond weights and KV pool; measured with the CPU build of torch."""


class WantedFleet(NamedTuple):
    """The fleet to check.

    Attributes:
      settings: settings of the fleet.
      words: command-line arguments and options with the same meaning, for remedies.
    """

    settings: Settings
    words: Sequence[str] = ()


def run_doctor(wanted: WantedFleet, *, as_json: bool) -> bool:
    """Run the checks and print the findings. Return whether none failed."""
    findings, port = examine(wanted)
    is_well = all(finding.status is not FindingStatus.FAIL for finding in findings)
    if as_json:
        rows = [finding._asdict() for finding in findings]
        sys.stdout.write(json.dumps({"ok": is_well, "findings": rows}, indent=2) + "\n")
    else:
        show(findings, serve_command(wanted, port), Console(highlight=False))
    return is_well


def examine(wanted: WantedFleet) -> tuple[list[Finding], int]:
    """Return all findings, and a port on which a server can listen. Torch takes seconds to load, so
    it is loaded only if no other check failed."""
    server = wanted.settings.server
    each = each_model(wanted.settings)
    num_workers = sum(own.fleet.prefill + own.fleet.decode for own in each)
    models = [check_stored(own, num_workers) for own in each]
    sizes = [num_bytes for _, num_bytes in models]
    machine = [
        check_python(),
        check_packages(),
        check_cpu(),
        check_kernels(),
        check_memory(sum(sizes) if all(sizes) else None),
    ]
    on_port, port = check_port(server.host, server.port)
    places = [
        check_open_files(),
        *check_links(parent_directory()),
        on_port,
        *(finding for findings, _ in models for finding in findings),
        *check_auto(wanted.settings),
    ]
    has_failed = any(finding.status is FindingStatus.FAIL for finding in (*machine, *places))
    of_torch = [torch_unloaded()] if has_failed else check_torch()
    return [*machine, *of_torch, *places], port


def check_auto(settings: Settings) -> list[Finding]:
    """Check the ladder of `model: auto`. Return nothing if it is off and no tenants are set."""
    ladder = settings.server.auto.ladder
    if ladder is None and settings.server.tenants.file is None:
        return []
    try:
        require_auto(settings)
    except ConfigError as error:
        cause, _, remedy = str(error).partition("; ")
        return [Finding("Tenants, auto", FindingStatus.FAIL, cause, remedy)]
    chosen = "model `auto` is off" if ladder is None else f"`auto` selects from {', '.join(ladder)}"
    return [Finding("Tenants, auto", FindingStatus.OK, chosen)]


def check_stored(settings: Settings, num_workers: int) -> tuple[list[Finding], int]:
    """Check one model for prefill and decode workers. Return the findings, and the bytes of memory
    that one worker of each kind needs together (0 if the model cannot be served).

    Args:
      settings: settings of this model.
      num_workers: number of workers of all models, which share the memory for KV pools.
    """
    wanted_bytes, num_gpus = 0, len(available_gpus())
    try:
        with (
            with_stored_model(settings, is_served=False) as found_model,
            with_adapters(found_model, is_served=False) as stored,
        ):
            for worker in (stored.prefill, stored.decode):
                engine = with_pool_share(worker.engine, num_workers, num_gpus)
                findings, found = check_model(stored.fleet.model, engine)
                if found is None:
                    wanted_bytes = 0
                    break
                pool_bytes = found.engine.kv_pool_bytes or 0
                wanted_bytes += found.loaded_bytes + found.adapter_bytes + pool_bytes
                wanted_bytes += WORKER_OVERHEAD_BYTES
    except ConfigError as error:
        findings, wanted_bytes = [failed_model(str(error))], 0
    name = name_of(settings)
    return [one._replace(subject=f"{one.subject} {name}".strip()) for one in findings], wanted_bytes


def serve_command(wanted: WantedFleet, port: int) -> str:
    """Return the command that serves the checked fleet.

    Args:
      wanted: the checked fleet.
      port: a free port; differs from the wanted one if that is in use.
    """
    words = list(wanted.words)
    if port != wanted.settings.server.port:
        if "--port" in words:
            place = words.index("--port")
            del words[place : place + 2]
        words += ["--port", str(port)]
    return shlex.join(["triolet", "serve", *words])


def show(findings: list[Finding], command: str, console: Console) -> None:
    """Print the findings as a table, a summary, and the command that serves."""
    table = Table(
        Column(),
        Column(style="bold", no_wrap=True),
        Column(overflow="fold"),
        box=None,
        padding=(0, 2, 0, 0),
        show_header=False,
    )
    for finding in findings:
        seen = Text(finding.detail)
        if finding.remedy:
            seen.append(f"\n→ {finding.remedy}", style="cyan")
        table.add_row(MARKS[finding.status], finding.subject, seen)
    console.print()
    console.print(table)
    failed = sum(finding.status is FindingStatus.FAIL for finding in findings)
    warned = sum(finding.status is FindingStatus.WARN for finding in findings)
    console.print()
    if failed:
        console.print(f"[bold red]{failed} to fix[/] before Triolet can serve.")
    elif warned:
        console.print(f"[bold yellow]Triolet can serve[/], with {warned} warnings. Serve with:")
    else:
        console.print("[bold green]All checks passed.[/] Serve with:")
    if not failed:
        console.print(Text(f"  {command}"), soft_wrap=True)
    console.print()
