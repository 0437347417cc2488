"""`python -m loadtest.soak`: everything at once, for minutes, and nothing may be wrong.

Clients read streams over SSE and WebSocket and whole answers, others leave in the middle, others
stop reading; every now and then a worker is killed, stopped or told to leave. All the while the
fleet is audited, and every whole answer is compared with one that was given in peace. Exit code 0
if nothing was wrong, 1 if something was, 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from rich.console import Console
from rich.table import Table

from .campaign.processes import FleetLog, HasNotHappenedError
from .campaign.soaking import Soak, SoakPlan
from .cancel_report import percentile
from .server_process import ServerDidNotStartError, running_server

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
STALL_TIMEOUT_S = 3.0
"""Shorter than the product's, so that many clients get to be cut off."""
SERVE_OPTIONS = (
    *("--prefill", "2", "--decode", "2", "--max-num-seqs", "8", "--kv-pool", "64MiB"),
    *("--set", f"server.stall_timeout_s={STALL_TIMEOUT_S}", "--log-level", "info"),
)
MAX_SHOWN = 20


def table_of(soak: Soak) -> Table:
    """Return what was done, a line each."""
    table = Table(title="what the soak did", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for what, count in soak.done.items():
        table.add_row(what, str(count))
    for fault in sorted({injected.fault for injected in soak.injected}):
        count = sum(injected.fault == fault for injected in soak.injected)
        table.add_row(f"faults: {fault}", str(count))
    if soak.silences_s:
        shown = (f"{1000 * percentile(soak.silences_s, percent):.0f}" for percent in (50, 99, 100))
        table.add_row("longest silence of a stream, ms: p50, p99, max", ", ".join(shown))
    return table


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.soak",
        description="Load a fleet with everything at once while its workers die.",
        epilog="Options after -- go to `triolet serve`, for example: -- --dtype bfloat16",
    )
    parser.add_argument("--minutes", type=float, default=5, help="of load with faults (5)")
    parser.add_argument("--every", type=float, default=20, help="seconds between faults (20)")
    parser.add_argument("--readers", type=int, default=6, help="clients that read to the end (6)")
    parser.add_argument("--asks", type=int, default=60, help="different requests (60)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (1)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak")
    parser.add_argument("serve", nargs="*", metavar="SERVE-OPTION", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    options = parse(arguments)
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    log = FleetLog(options.out / "server.log")
    plan = SoakPlan(
        seconds=options.minutes * 60,
        fault_every_s=options.every,
        readers=options.readers,
        asks=options.asks,
        seed=options.seed,
        stall_timeout_s=STALL_TIMEOUT_S,
    )
    try:
        with running_server([*SERVE_OPTIONS, *options.serve], log.path) as url:
            soak = Soak(url, log, plan, lambda line: console.print(line, soft_wrap=True))
            trio.run(soak.run)
    except (ServerDidNotStartError, HasNotHappenedError) as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        return 2
    report = {"done": soak.done, "wrongs": soak.wrongs, "injected": [*map(asdict, soak.injected)]}
    (options.out / "soak.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    console.print(table_of(soak))
    for wrong in soak.wrongs[:MAX_SHOWN]:
        console.print(f"WRONG {wrong}", style="red", soft_wrap=True, markup=False)
    console.print(f"{len(soak.wrongs)} things were wrong" if soak.wrongs else "nothing was wrong")
    return 1 if soak.wrongs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
