"""`python -m loadtest.hostile`: run every kind of hostile client, and check its effect on others.

Attacks a fleet that it starts. Exit code 0 if /health/live always answered and its p99 was within
the bound, no process grew beyond its bound, files and tasks were back to normal soon after each
attack, names sent by clients did not become metrics, and at the end no block, connection or secret
is left anywhere; 1 if not; 2 if nothing could run.

Then runs hostile tenants that stay within all limits against another fleet, and measures a victim's
chats. See neighbours.py for the goals.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from .cancels import audit, metrics_of, still_answers, wait_until_free
from .harness.campaign import ROOT, as_table, campaign_parser, run_campaign
from .harness.progress import progress
from .harness.servers import FleetLog, cost_of, running_server
from .harness.statistics import milliseconds, percentile
from .hostile_clients import ATTACKS, CANARY, besiege
from .neighbour_attacks import ATTACKS as NEIGHBOURS
from .neighbours import run_neighbours

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from .harness.servers import Cost
    from .hostile_clients import Watch

SERVE_OPTIONS = ("--max-num-seqs", "8", "--kv-pool", "64MiB", "--log-level", "info",
                 "--set", "server.stall_timeout_s=3")  # fmt: skip
MAX_P99_S = 0.25
"""Many times shorter than the timeout of a load balancer's health check."""
MAX_GROWTH_BYTES = 64 * 1024 * 1024
MAX_SETTLE_S = 5.0
"""Seconds after an attack until the server's files and tasks must be back to normal."""
SETTLE_DEADLINE_S = 30.0
POLL_S = 0.1
MEMORY_POLL_S = 0.02
MAX_NEW_SERIES = 60
"""Metric series that all attacks together may add, because some error statuses occur for the first
time."""
MIB = 1024 * 1024
COLUMNS = ("attack", "asked", "p50", "p99", "max", "failed", "settled, s", "most, MiB", "left, MiB",
           "new series")  # fmt: skip


def in_a_process(name: str) -> Callable[[str], Awaitable[None]]:
    """Return an attack that runs in a separate process."""

    async def attack(url: str) -> None:
        command = [sys.executable, "-m", "loadtest.hostile_clients", url, name]
        # Real attackers would not use this machine's CPU; a process keeps them off this event loop.
        await trio.run_process(["nice", "-n", "10", *command], cwd=ROOT)

    return attack


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effect of one attack.

    Attributes:
      watch: observations of the liveness client.
      settled_s: time from the end until files and tasks were as before; infinite if never.
      most_bytes: peak growth of the server's memory.
      left_bytes: growth of its memory at the end.
      new_series: number of new metric series.
    """

    watch: Watch
    settled_s: float
    most_bytes: int
    left_bytes: int
    new_series: int


def table_of(seen: Mapping[str, Outcome]) -> Table:
    """Return one row per attack."""
    rows = []
    for name, outcome in seen.items():
        watch = outcome.watch
        shown = milliseconds(watch.delays_s, 50, 99, 100)
        rest = [str(len(watch.failures)), f"{outcome.settled_s:.1f}"]
        memory = [f"{size / MIB:+.0f}" for size in (outcome.most_bytes, outcome.left_bytes)]
        rows.append([name, str(len(watch.delays_s)), *shown, *rest, *memory,
                     str(outcome.new_series)])  # fmt: skip
    return as_table("/health/live during the attack, in ms", COLUMNS, rows)


def holdings(url: str) -> tuple[int, int, int]:
    """Return the server's open files, tasks and memory in bytes."""
    process = audit(url)["server"]["process"]
    return process["open_fds"], process["tasks"], process["rss_bytes"]


def settled(url: str, before: tuple[int, int, int]) -> tuple[float, int]:
    """Wait until files and tasks are as before. Return the duration and the memory at its end."""
    began_at = time.monotonic()
    while True:
        now = holdings(url)
        elapsed_s = time.monotonic() - began_at
        if now[0] <= before[0] and now[1] <= before[1]:
            return elapsed_s, now[2]
        if elapsed_s > SETTLE_DEADLINE_S:
            return float("inf"), now[2]
        time.sleep(POLL_S)


def series_of(url: str) -> int:
    """Return the number of metric series."""
    return sum(not line.startswith("#") for line in metrics_of(url).splitlines())


async def watch_memory(log: FleetLog, seen: list[int]) -> None:
    """Record the server's memory repeatedly until cancelled."""
    pid = log.pids()["server"]
    while True:
        if cost := cost_of(pid):
            seen.append(cost.rss_bytes)
        await trio.sleep(MEMORY_POLL_S)


async def attacked(url: str, log: FleetLog, name: str) -> tuple[Watch, int]:
    """Run an attack. Return the liveness client's observations and the server's peak memory."""
    seen: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_memory, log, seen)
        watch = await besiege(url, in_a_process(name))
        nursery.cancel_scope.cancel()
    return watch, max(seen)


def wrongs_of(
    seen: Mapping[str, Outcome], before: Mapping[str, Cost], after: Mapping[str, Cost]
) -> list[str]:
    """Return descriptions of exceeded bounds."""
    wrongs = []
    for name, outcome in seen.items():
        watch = outcome.watch
        if outcome.settled_s > MAX_SETTLE_S:
            wrongs.append(f"{name}: files or tasks were left after {outcome.settled_s:.1f} s")
        if watch.failures:
            wrongs.append(f"{name}: /health/live failed: {watch.failures[0]}")
        if outcome.left_bytes > MAX_GROWTH_BYTES:
            wrongs.append(f"{name}: {outcome.left_bytes / MIB:.0f} MiB were not released")
        p99_s = percentile(watch.delays_s, 99)
        if p99_s > MAX_P99_S:
            wrongs.append(f"{name}: /health/live took {1000 * p99_s:.0f} ms at p99")
    new_series = sum(outcome.new_series for outcome in seen.values())
    if new_series > MAX_NEW_SERIES:
        wrongs.append(f"{new_series} new series of metrics")
    for name, cost in before.items():
        if name not in after:
            wrongs.append(f"{name} is gone")
        elif (grown := after[name].rss_bytes - cost.rss_bytes) > MAX_GROWTH_BYTES:
            wrongs.append(f"{name} grew by {grown / MIB:.0f} MiB")
    return wrongs


def secrets_told(url: str, log: Path) -> list[str]:
    """Return the places that contain the canary."""
    places = {"log": log.read_text(errors="replace"), "metrics": metrics_of(url)}
    places["audit"] = json.dumps(audit(url))
    return [f"a secret is in the {place}" for place, text in places.items() if CANARY in text]


def run(url: str, log: FleetLog, only: Sequence[str], console: Console) -> list[str]:
    """Run all attacks and return what was wrong."""
    still_answers(url)
    before = log.costs()
    held = holdings(url)
    series = series_of(url)
    seen = {}
    for attack in ATTACKS:
        name = attack.__name__
        if name not in only:
            continue
        progress(f"attack: {name}")
        watch, most_bytes = trio.run(attacked, url, log, name)
        settled_s, left_bytes = settled(url, held)
        new_series = series_of(url) - series
        series += new_series
        seen[name] = Outcome(
            watch, settled_s, most_bytes - held[2], left_bytes - held[2], new_series
        )
    blocks = wait_until_free(url)
    wrongs = wrongs_of(seen, before, log.costs())
    wrongs += [str(violation) for violation in audit(url)["violations"]]
    wrongs += secrets_told(url, log.path)
    console.print(table_of(seen))
    for name, cost in log.costs().items():
        grown = (cost.rss_bytes - before[name].rss_bytes) / MIB if name in before else 0.0
        console.print(f"{name}: {cost.rss_bytes / MIB:.0f} MiB, {grown:+.0f} since the start")
    console.print(f"KV blocks afterwards: {blocks}")
    if not still_answers(url):
        wrongs.append("the server no longer answers")
    return wrongs


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = campaign_parser("hostile", __doc__)
    names = [*(attack.__name__ for attack in ATTACKS), *NEIGHBOURS]
    parser.add_argument("--only", nargs="+", default=names, metavar="ATTACK", choices=names,
                        help=f"of {', '.join(names)} (all)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds per neighbour (5)")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of half a round (4)")
    return parser.parse_args(arguments)


def campaign(options: argparse.Namespace, console: Console) -> list[str]:
    """Let clients attack one fleet and tenants another. Return what was wrong."""
    wrongs = []
    if not NEIGHBOURS.keys() >= set(options.only):
        log = FleetLog(options.out / "server.log")
        with running_server([*SERVE_OPTIONS, *options.serve], log.path) as url:
            wrongs += run(url, log, options.only, console)
    if beside := [name for name in NEIGHBOURS if name in options.only]:
        wrongs += run_neighbours(options, beside, console)
    return wrongs


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    return run_campaign(parse(arguments), __doc__, campaign)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
