"""`python -m loadtest.cancels`: close connections at random moments; check that all KV is freed.

Starts SSE and WebSocket streams and plain requests, and closes their sockets with FIN or RST at
random times after the first byte. The time until the blocks are free comes from the workers' log,
and for some further streams from `triolet_kv_blocks` in /metrics. Exit code 0 if afterwards every
block is free, no token was computed for a cancelled request after the running step, no process
holds more resources than before, the audit finds no violation and the server still answers; 1 if
not; 2 if the test could not run.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import trio

from .campaign.misbehaving import CONNECT_DEADLINE_S, Cut, Pace, chat_request, cut_many
from .harness.campaign import as_table, campaign_parser, run_campaign
from .harness.gateway import running_gateway
from .harness.metrics import KvBlocks, blocks_of
from .harness.servers import FleetLog, running_server, seconds_of
from .harness.statistics import milliseconds, percentile

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from .harness.servers import Cost


MIB = 1024 * 1024
MAX_GROWTH_BYTES = 16 * MIB
"""Allowed growth of memory from the first stage to the last, for allocators. 4,000 leaked requests
of 5 KiB would exceed it."""
MAX_GROWTH_COUNT = 2
"""Allowed growth of open files and threads: those of the check itself."""


def growth(stages: Sequence[tuple[str, Mapping[str, Cost]]]) -> list[str]:
    """Return descriptions of resources that grew beyond their bounds."""
    (_, first), (_, last) = stages[0], stages[-1]
    wrongs = []
    for name in sorted(first):
        before, after = first[name], last.get(name)
        if after is None:
            wrongs.append(f"{name} is gone")
            continue
        grown_bytes = after.rss_bytes - before.rss_bytes
        if grown_bytes > MAX_GROWTH_BYTES:
            wrongs.append(f"{name} grew by {grown_bytes / MIB:.0f} MiB")
        for what, grown in (
            ("open files", after.num_fds - before.num_fds),
            ("threads", after.num_threads - before.num_threads),
        ):
            if grown > MAX_GROWTH_COUNT:
                wrongs.append(f"{name} has {grown} more {what}")
    return wrongs


def costs_table(stages: Sequence[tuple[str, Mapping[str, Cost]]]) -> Table:
    """Return one row per process, one column per stage."""
    rows = (
        [name, *(_shown(costs.get(name)) for _, costs in stages)] for name in sorted(stages[0][1])
    )
    columns = ["process", *(stage for stage, _ in stages)]
    return as_table("memory in MiB · open files · threads", columns, rows)


def _shown(cost: Cost | None) -> str:
    if cost is None:
        return "gone"
    return f"{cost.rss_bytes / MIB:.0f} · {cost.num_fds} · {cost.num_threads}"


@dataclass(frozen=True, slots=True)
class StrayTokens:
    """Wasted work for cut requests.

    Attributes:
      cut: requests with a client that disconnected while they ran.
      under_way: for each request on decode, tokens that were computed but never reached the server.
      late_rows: rows of steps that returned after their attempt had ended.
      unaccounted: rows of decode without an attempt, except the late ones.
    """

    cut: int
    under_way: list[int]
    late_rows: int
    unaccounted: int

    @property
    def wrongs(self) -> list[str]:
        """Return descriptions of wasted work that exceeds the running step."""
        wrongs = []
        if self.unaccounted:
            wrongs.append(f"{self.unaccounted} computed tokens belong to no attempt")
        if self.late_rows > self.cut:
            wrongs.append(f"{self.late_rows} late rows for {self.cut} cut requests")
        return wrongs


def stray_tokens(
    entries: Iterable[Mapping[str, Any]], audits: Sequence[Mapping[str, Any]]
) -> StrayTokens:
    """Sum up wasted work.

    Args:
      entries: log lines of the server and its workers.
      audits: the workers' reports in `/fleet/audit`.
    """
    decode = {audit["name"]: audit for audit in audits if audit["role"] == "decode"}
    received: dict[str, int] = {}
    computed: dict[str, int] = {}
    rows = 0
    for entry in entries:
        if entry.get("event") == "request_ended" and entry["outcome"] == "client_gone":
            received[entry["request_id"]] = entry["completion_tokens"]
        elif entry.get("event") == "attempt_ended" and entry["process"] in decode:
            computed[entry["attempt"].split("/")[0]] = entry["num_tokens"]
            # The first token comes with the prompt, from the worker that computed it.
            rows += max(0, entry["num_tokens"] - 1)
    late_rows = sum(audit["late_rows"] for audit in decode.values())
    return StrayTokens(
        cut=len(received),
        under_way=[
            max(0, tokens - received[request_id])
            for request_id, tokens in computed.items()
            if request_id in received
        ],
        late_rows=late_rows,
        unaccounted=sum(_generated(audit) for audit in decode.values()) - rows,
    )


def _generated(audit: Mapping[str, Any]) -> int:
    """Return the tokens that a worker generated for attempts that still existed."""
    total: int = audit["computed_tokens"] - audit["prompt_tokens"] - audit["late_tokens"]
    return total


PERCENTILES = (50, 90, 99, 100)
FINISHED_FIRST = "finished first"


def release_times(cuts: Iterable[Cut], lines: Iterable[str]) -> Mapping[str, list[float]]:
    """Return seconds from closed socket to freed blocks, by the phase of the cut.

    For a request that had not reached a worker, the end is when the server dropped it. A request
    that the server never read (its socket was closed earlier) has nothing to free.
    """
    requests: dict[str, dict[str, Any]] = {}
    freed_at: dict[str, float] = {}
    for line in lines:
        entry = _entry(line)
        if entry.get("event") == "request_ended":
            requests[entry["client_request_id"]] = entry
        elif entry.get("event") == "attempt_ended":
            request_id = entry["attempt"].split("/")[0]
            freed_at[request_id] = max(freed_at.get(request_id, 0.0), seconds_of(entry))
    times: dict[str, list[float]] = defaultdict(list)
    for cut in cuts:
        request = requests.get(cut.name)
        if request is None:
            times["never begun"].append(0.0)
        elif request["outcome"] != "client_gone":
            times[FINISHED_FIRST].append(0.0)
        else:
            ended_at = max(seconds_of(request), freed_at.get(request["request_id"], 0.0))
            times[request["phase"]].append(ended_at - cut.closed_at)
    return times


def release_table(times: Mapping[str, Sequence[float]], url: str) -> Table:
    """Return the times as a table in milliseconds, with one row per phase and one for all.

    Args:
      times: times by phase.
      url: where the requests were sent.
    """
    rows = []
    everything: list[float] = []
    for phase, seconds in sorted(times.items()):
        if phase in {FINISHED_FIRST, "never begun"}:
            rows.append([phase, str(len(seconds)), *("" for _ in PERCENTILES)])
            continue
        everything += seconds
        rows.append(_release_row(phase, seconds))
    if everything:
        rows.append(_release_row("all cancelled", everything))
    columns = ("phase", "requests", *(f"p{p}" if p < 100 else "max" for p in PERCENTILES))
    return as_table(f"closed socket to freed KV blocks, {url}, ms", columns, rows)


def _release_row(name: str, seconds: Sequence[float]) -> list[str]:
    return [name, str(len(seconds)), *milliseconds(seconds, *PERCENTILES, digits=1)]


def _entry(line: str) -> dict[str, Any]:
    """Return a parsed JSON log line, or an empty mapping for any other line."""
    if not line.startswith("{"):
        return {}
    entry: dict[str, Any] = json.loads(line)
    return entry


SERVE_OPTIONS = (
    *("--max-num-seqs", "8", "--kv-pool", "64MiB", "--log-level", "info"),
    *("--set", "worker.engine.poison_freed_blocks=true"),
)
"""Few rows, so that with many clients some requests are cancelled in the queue. The pages of a KV
pool are allocated at their first use, which would look like a leak. A poisoned pool is completely
written before its worker is ready, and the audit finds writes into free blocks."""
WARM_UP = 100
"""Requests cut before the first measurement, while links, threads and allocators warm up."""
STAGES = (0.2, 0.6, 1.0)
"""Shares of the run after which processes are measured. They must not grow after the first one."""
FREE_DEADLINE_S = 30.0
SETTLE_S = 15.0
"""Trio keeps idle threads for 10 s."""
POLL_S = 0.05
WATCH_POLL_S = 0.002
WATCH_APART_S = 0.5
"""Longest random delay of a watched cancel after its blocks were leased: the time between two
heartbeats."""
COSTS_POLL_S = 0.5
"""Interval of the checks, which count every thread and file of every process."""


@dataclass(slots=True)
class Outcome:
    """Result of a run.

    Attributes:
      cuts: each closed socket.
      stages: resources of idle processes, after parts of the run.
      blocks: KV blocks after the run.
      stray: wasted work.
      violations: violations that the audits found.
      answers: whether the server still answers.
      seen_s: times from closed sockets until the metrics showed all blocks free.
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
        """Return descriptions of all failed checks."""
        wrongs = [*self.violations, *self.stray.wrongs, *growth(self.stages[1:])]
        if not self.blocks.is_all_free:
            wrongs.append(f"blocks are still leased: {self.blocks}")
        if not self.answers:
            wrongs.append("the server no longer answers")
        return wrongs


def metrics_of(url: str) -> str:
    """Return the text of /metrics."""
    return httpx2.get(f"{url}/metrics", timeout=CONNECT_DEADLINE_S).raise_for_status().text


def wait_until_free(url: str) -> KvBlocks:
    """Return the blocks by state once none is leased, or as they are at the deadline."""
    give_up = time.monotonic() + FREE_DEADLINE_S
    while True:
        blocks = blocks_of(metrics_of(url))
        if blocks.is_all_free or time.monotonic() > give_up:
            return blocks
        time.sleep(POLL_S)


def times_until_seen(url: str, count: int, seed: int) -> list[float]:
    """Close streams one by one. Return the seconds until the metrics showed all blocks free."""
    where, rng = urlsplit(url), random.Random(seed)
    message = {"role": "user", "content": "Tell me a very long story."}
    more = {"stream": True, "max_tokens": 1000, "ignore_eos": True}
    body = json.dumps({"messages": [message], **more}).encode()
    metrics = httpx2.Client(base_url=url, timeout=CONNECT_DEADLINE_S)

    def wait_for(*, is_all_free: bool) -> None:
        give_up = time.monotonic() + FREE_DEADLINE_S
        while time.monotonic() < give_up:
            if blocks_of(metrics.get("/metrics").text).is_all_free is is_all_free:
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
    """Return the fleet's audit once all workers have answered it. On a busy machine a worker may
    take longer than the server's timeout."""
    give_up = time.monotonic() + FREE_DEADLINE_S
    while True:
        answer = httpx2.get(f"{url}/fleet/audit", timeout=CONNECT_DEADLINE_S)
        document: dict[str, Any] = answer.raise_for_status().json()
        if all(worker["audit"] for worker in document["workers"]) or time.monotonic() > give_up:
            return document
        time.sleep(POLL_S)


def still_answers(url: str) -> bool:
    """Send a request and return whether it is fully answered."""
    asked = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=CONNECT_DEADLINE_S)
    return bool(answer.raise_for_status().json()["choices"][0]["message"]["content"])


def settled_costs(log: FleetLog, before: Mapping[str, Cost] | None) -> Mapping[str, Cost]:
    """Return the resources of processes once idle threads and closed sockets are gone."""
    give_up = time.monotonic() + SETTLE_S
    while time.monotonic() < give_up:
        costs = log.costs()
        if before is not None and not growth([("before", before), ("now", costs)]):
            return costs
        time.sleep(COSTS_POLL_S)
    return log.costs()


def run(
    urls: Sequence[str], log: FleetLog, options: argparse.Namespace, console: Console
) -> Outcome:
    """Cut requests in stages, and check the idle fleet after each stage."""
    url, outcome = urls[0], Outcome()
    pace = Pace(options.count, options.clients, options.seconds)
    before: Mapping[str, Cost] | None = None
    begin = 0
    for share in (0.0, *STAGES):
        end = WARM_UP + int(share * options.count)
        numbers, begin = range(begin, end), end
        began_at = time.monotonic()
        paced = pace if share else None
        cuts = trio.run(cut_many, urls, numbers, options.clients, options.seed, paced)
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
    parser = campaign_parser("cancels", __doc__)
    parser.add_argument("--count", type=int, default=1000, help="requests to cut (1000)")
    parser.add_argument("--clients", type=int, default=24, help="concurrent clients (24)")
    parser.add_argument("--seconds", type=float, default=150, help="duration of the run (150)")
    parser.add_argument(
        "--watched", type=int, default=50, help="further streams, watched in /metrics (50)"
    )
    parser.add_argument(
        "--through", choices=["envoy"], help="cut every second request through this gateway"
    )
    return parser.parse_args(arguments)


def campaign(options: argparse.Namespace, console: Console) -> list[str]:
    """Cut requests of a fleet, print the results and return what was wrong."""
    log = FleetLog(options.out / "server.log")
    with ExitStack() as stack:
        urls = [stack.enter_context(running_server([*SERVE_OPTIONS, *options.serve], log.path))]
        if options.through:
            gateway = running_gateway([urlsplit(urls[0]).netloc], options.out)
            urls.append(stack.enter_context(gateway).url)
            console.print(f"through {options.through}: {urls[1]}")
        outcome = run(urls, log, options, console)
    show(outcome, log, console)
    return outcome.wrongs


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    return run_campaign(parse(arguments), __doc__, campaign)


def show(outcome: Outcome, log: FleetLog, console: Console) -> None:
    """Print the results of a run."""
    lines = log.path.read_text(encoding="utf-8", errors="replace").splitlines()
    for url in dict.fromkeys(cut.url for cut in outcome.cuts):
        cuts = [cut for cut in outcome.cuts if cut.url == url]
        console.print(release_table(release_times(cuts, lines), url))
    console.print(costs_table(outcome.stages))
    stray = outcome.stray
    if stray.under_way:
        shown = [percentile(stray.under_way, percent) for percent in (50, 99, 100)]
        console.print(
            f"tokens on their way when a client disconnected: p50 {shown[0]}, p99 {shown[1]}, "
            f"max {shown[2]}; rows of steps that returned after their attempt had ended: "
            f"{stray.late_rows} of {stray.cut} cut; without an attempt: {stray.unaccounted}"
        )
    if outcome.seen_s:
        seen = milliseconds(outcome.seen_s, 50, 99, 100)
        console.print(
            f"closed socket to free blocks in /metrics, {len(outcome.seen_s)} streams, ms: "
            f"p50 {seen[0]}, p99 {seen[1]}, max {seen[2]}"
        )
    console.print(f"KV blocks afterwards: {outcome.blocks}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
