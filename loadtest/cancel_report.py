"""What a run of cancelled requests showed: from log lines and metrics to a table.

Knows the two log lines that it reads (the server's `request_ended`, the workers' `attempt_ended`)
and one metric; opens no sockets.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PERCENTILES = (50, 90, 99, 100)
Number = TypeVar("Number", int, float)
FINISHED_FIRST = "finished first"
_BLOCKS = re.compile(r'^triolet_kv_blocks\{.*?state="(\w+)".*?\} (\S+)$', re.MULTILINE)


class CutRequest(Protocol):
    """A request whose socket was closed."""

    @property
    def name(self) -> str:
        """The id that the client gave it."""
        ...

    @property
    def closed_at(self) -> float:
        """Seconds since the epoch."""
        ...


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Blocks of all pools by state."""

    free: int
    cached: int
    leased: int

    @property
    def is_all_free(self) -> bool:
        """Whether no block is held by anybody; what is cached gives way at once."""
        return self.leased == 0 and self.free + self.cached > 0

    def __str__(self) -> str:
        return f"{self.free} free, {self.cached} cached, {self.leased} leased"


def blocks_of(metrics: str) -> KvBlocks:
    """Return the sums over all workers from the text of /metrics."""
    sums: dict[str, int] = defaultdict(int)
    for state, value in _BLOCKS.findall(metrics):
        sums[state] += int(float(value))
    return KvBlocks(sums["free"], sums["cached"], sums["leased"])


def release_times(cuts: Iterable[CutRequest], lines: Iterable[str]) -> Mapping[str, list[float]]:
    """Return seconds from closed socket to freed blocks, by the phase that the cut came in.

    A request that no worker knew yet counts until the server let go of it. One that the server
    never saw (its socket was closed before its bytes were read) has nothing to free.
    """
    requests: dict[str, dict[str, Any]] = {}
    freed_at: dict[str, float] = {}
    for line in lines:
        entry = _entry(line)
        if entry.get("event") == "request_ended":
            requests[entry["client_request_id"]] = entry
        elif entry.get("event") == "attempt_ended":
            request_id = entry["attempt"].split("/")[0]
            freed_at[request_id] = max(freed_at.get(request_id, 0.0), _seconds(entry))
    times: dict[str, list[float]] = defaultdict(list)
    for cut in cuts:
        request = requests.get(cut.name)
        if request is None:
            times["never begun"].append(0.0)
        elif request["outcome"] != "client_gone":
            times[FINISHED_FIRST].append(0.0)
        else:
            ended_at = max(_seconds(request), freed_at.get(request["request_id"], 0.0))
            times[request["phase"]].append(ended_at - cut.closed_at)
    return times


def release_table(times: Mapping[str, Sequence[float]]) -> Table:
    """Return times as a table in milliseconds, one row per phase and one for all."""
    table = Table(title="closed socket to freed KV blocks, ms")
    for heading in ("phase", "requests", *(f"p{p}" if p < 100 else "max" for p in PERCENTILES)):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    everything: list[float] = []
    for phase, seconds in sorted(times.items()):
        if phase in {FINISHED_FIRST, "never begun"}:
            table.add_row(phase, str(len(seconds)), *("" for _ in PERCENTILES))
            continue
        everything += seconds
        table.add_row(phase, str(len(seconds)), *_milliseconds(seconds))
    if everything:
        table.add_row("all cancelled", str(len(everything)), *_milliseconds(everything))
    return table


def percentile(values: Sequence[Number], percent: int) -> Number:
    """Return the nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[max(0, -(-percent * len(ranked) // 100) - 1)]


def _milliseconds(seconds: Sequence[float]) -> list[str]:
    return [f"{1000 * percentile(seconds, p):.1f}" for p in PERCENTILES]


def _entry(line: str) -> dict[str, Any]:
    """Return a JSON log line, or nothing for any other line."""
    if not line.startswith("{"):
        return {}
    entry: dict[str, Any] = json.loads(line)
    return entry


def _seconds(entry: Mapping[str, str]) -> float:
    return datetime.fromisoformat(entry["timestamp"]).timestamp()
