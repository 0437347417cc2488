"""`python -m loadtest.cancels`: close connections at random moments; see that all KV comes back.

Streams over SSE and WebSocket and whole answers are begun and their sockets closed, politely or
not, at any time from the first byte on. The time from the closed socket to the freed blocks is
taken from the workers' log, by this machine's clock; of some streams more it is also taken
where operators see it, from `triolet_kv_blocks` of /metrics. Exit code 0 if afterwards every block
is free, no token was computed in vain beyond the running step, no process holds more than
before, the audit objects to nothing and the server still answers; 1 if not; 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import trio
from rich.console import Console

from .campaign.processes import FleetLog
from .cancel_report import KvBlocks, blocks_of, percentile, release_table, release_times
from .cut_clients import CONNECT_DEADLINE_S, Cut, Pace, cut_many
from .flatness import costs_table, growth
from .raw_requests import chat_request
from .server_process import ServerDidNotStartError, running_server
from .stray_tokens import StrayTokens, stray_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .campaign.processes import Cost

ROOT = Path(__file__).parents[1]
SERVE_OPTIONS = ("--max-num-seqs", "8", "--kv-pool", "64MiB", "--log-level", "info")
"""Few rows, so that with many clients some requests are cancelled while they are queued. A small
pool, all of which is touched soon: memory that is taken later is then nobody's pool."""
WARM_UP = 100
"""Cut before the first look: links, threads and allocators have to get going."""
STAGES = (0.2, 0.6, 1.0)
"""Shares of the run after which processes are looked at; from the first on they may not grow."""
FREE_DEADLINE_S = 30.0
SETTLE_S = 15.0
"""Trio keeps idle threads for 10 s."""
POLL_S = 0.05
WATCH_POLL_S = 0.002
WATCH_APART_S = 0.5
"""Of a watched cancel, up to which it comes at random after its blocks were seen to be leased: the
time between two heartbeats, one of which has shown them."""
COSTS_POLL_S = 0.5
"""Every thread and file of every process is counted each time."""


@dataclass(slots=True)
class Outcome:
    """What a run showed.

    Attributes:
      cuts: each closed socket.
      stages: what processes held at rest, after so much of the run.
      blocks: afterwards.
      stray: tokens for nobody.
      violations: that the audits found.
      answers: whether the server still does.
      seen_s: from closed sockets until the metrics showed all blocks free.
    """

    cuts: list[Cut] = field(default_factory=list)
    stages: list[tuple[str, Mapping[str, Cost]]] = field(default_factory=list)
    blocks: KvBlocks = field(default_factory=lambda: KvBlocks(0, 0, 0))
    stray: StrayTokens = field(default_factory=lambda: StrayTokens(0, [], 0, 0))
    violations: list[str] = field(default_factory=list)
    answers: bool = False
    seen_s: list[float] = field(default_factory=list)

    @property
    def wrongs(self) -> list[str]:
        """Everything for which the run does not count as passed."""
        wrongs = [*self.violations, *self.stray.wrongs, *growth(self.stages[1:])]
        if not self.blocks.is_all_free:
            wrongs.append(f"blocks are still held: {self.blocks}")
        if not self.answers:
            wrongs.append("the server does not answer any more")
        return wrongs


def wait_until_free(url: str) -> KvBlocks:
    """Return the blocks by state once none is leased, or as they are at the deadline."""
    give_up = time.monotonic() + FREE_DEADLINE_S
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=CONNECT_DEADLINE_S) as answer:
            blocks = blocks_of(answer.read().decode())
        if blocks.is_all_free or time.monotonic() > give_up:
            return blocks
        time.sleep(POLL_S)


def times_until_seen(url: str, count: int, seed: int) -> list[float]:
    """Close streams one after the other; return the seconds until the metrics showed it."""
    where, rng = urlsplit(url), random.Random(seed)
    message = {"role": "user", "content": "Tell me a very long story."}
    more = {"stream": True, "max_tokens": 1000, "ignore_eos": True}
    body = json.dumps({"messages": [message], **more}).encode()
    metrics = http.client.HTTPConnection(where.netloc, timeout=CONNECT_DEADLINE_S)

    def wait_for(*, is_all_free: bool) -> None:
        give_up = time.monotonic() + FREE_DEADLINE_S
        while time.monotonic() < give_up:
            metrics.request("GET", "/metrics")
            if blocks_of(metrics.getresponse().read().decode()).is_all_free is is_all_free:
                return
            time.sleep(WATCH_POLL_S)

    times = []
    for number in range(count):
        address = (where.hostname or "", where.port or 80)
        with socket.create_connection(address, CONNECT_DEADLINE_S) as stream:
            stream.sendall(chat_request(f"watched-{number}", where.netloc, body))
            wait_for(is_all_free=False)
            time.sleep(rng.uniform(0, WATCH_APART_S))
        closed_at = time.monotonic()
        wait_for(is_all_free=True)
        times.append(time.monotonic() - closed_at)
    metrics.close()
    return times


def audit(url: str) -> dict[str, Any]:
    """Return what the fleet says of itself, once all of its workers do: on a busy machine one may
    take longer than the server waits for it."""
    give_up = time.monotonic() + FREE_DEADLINE_S
    while True:
        with urllib.request.urlopen(f"{url}/fleet/audit", timeout=CONNECT_DEADLINE_S) as answer:
            document: dict[str, Any] = json.load(answer)
        if all(worker["audit"] for worker in document["workers"]) or time.monotonic() > give_up:
            return document
        time.sleep(POLL_S)


def still_answers(url: str) -> bool:
    """Ask one more question and read the whole answer."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8})
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        body.encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=CONNECT_DEADLINE_S) as answer:
        return bool(json.load(answer)["choices"][0]["message"]["content"])


def settled_costs(log: FleetLog, before: Mapping[str, Cost] | None) -> Mapping[str, Cost]:
    """Return what processes hold once idle threads and closed sockets are gone."""
    give_up = time.monotonic() + SETTLE_S
    while time.monotonic() < give_up:
        costs = log.costs()
        if before is not None and not growth([("before", before), ("now", costs)]):
            return costs
        time.sleep(COSTS_POLL_S)
    return log.costs()


def run(url: str, log: FleetLog, options: argparse.Namespace, console: Console) -> Outcome:
    """Cut requests, stage by stage, and look at the fleet at rest after each."""
    outcome = Outcome()
    pace = Pace(options.count, options.clients, options.seconds)
    before: Mapping[str, Cost] | None = None
    begin = 0
    for share in (0.0, *STAGES):
        end = WARM_UP + int(share * options.count)
        numbers, begin = range(begin, end), end
        began_at = time.monotonic()
        paced = pace if share else None
        cuts = trio.run(cut_many, url, numbers, options.clients, options.seed, paced)
        outcome.cuts += cuts
        elapsed_s = time.monotonic() - began_at
        outcome.blocks = wait_until_free(url)
        costs = settled_costs(log, before)
        before = before or (costs if share else None)
        outcome.stages.append((f"{share:.0%}" if share else "warm", costs))
        outcome.violations += [str(violation) for violation in audit(url)["violations"]]
        console.print(f"{len(outcome.cuts)} cut, the last {len(cuts)} in {elapsed_s:.0f} s")
    outcome.seen_s = times_until_seen(url, options.watched, options.seed)
    audits = [worker["audit"] for worker in audit(url)["workers"] if worker["audit"]]
    outcome.stray = stray_tokens(log.entries(), audits)
    outcome.answers = still_answers(url)
    return outcome


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.cancels", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="requests to cut (1000)")
    parser.add_argument("--clients", type=int, default=24, help="at the same time (24)")
    parser.add_argument(
        "--seconds", type=float, default=150, help="clients hurry to be done within these (150)"
    )
    parser.add_argument("--watched", type=int, default=50, help="more, watched in /metrics (50)")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments (1)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cancels")
    parser.add_argument("serve", nargs="*", metavar="SERVE-OPTION", help="for `triolet serve`")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    options = parse(arguments)
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    log = FleetLog(options.out / "server.log")
    try:
        with running_server([*SERVE_OPTIONS, *options.serve], log.path) as url:
            outcome = run(url, log, options, console)
    except ServerDidNotStartError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        return 2
    lines = log.path.read_text(encoding="utf-8", errors="replace").splitlines()
    console.print(release_table(release_times(outcome.cuts, lines)))
    console.print(costs_table(outcome.stages))
    stray = outcome.stray
    if stray.under_way:
        shown = [percentile(stray.under_way, percent) for percent in (50, 99, 100)]
        console.print(
            f"tokens that were under way when a client left: p50 {shown[0]}, p99 {shown[1]}, "
            f"max {shown[2]}; rows of a step that returned after its attempt had ended: "
            f"{stray.late_rows} of {stray.cut} cut; belonging to no attempt: {stray.unaccounted}"
        )
    if outcome.seen_s:
        seen = [f"{1000 * percentile(outcome.seen_s, percent):.0f}" for percent in (50, 99, 100)]
        console.print(
            f"closed socket to free blocks in /metrics, {len(outcome.seen_s)} streams, ms: "
            f"p50 {seen[0]}, p99 {seen[1]}, max {seen[2]}"
        )
    console.print(f"KV blocks afterwards: {outcome.blocks}")
    for wrong in outcome.wrongs:
        console.print(f"WRONG {wrong}", style="red", soft_wrap=True, markup=False)
    return 1 if outcome.wrongs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
