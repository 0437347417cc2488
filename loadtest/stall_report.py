"""What a run with stalled clients showed: from times and sizes to a table. Opens no sockets."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from .cancel_report import KvBlocks, blocks_of, percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

KIB = 1024
MIB = 1024 * KIB
MAX_GROWTH_BYTES = 64 * MIB
MAX_GROWTH_PER_ROUND_BYTES = 4 * MIB
"""From the first to the last: what allocators move by. 21 KiB that each of 200 clients leaves
behind are more."""
MAX_RATIO = 1.10

WITHOUT, COMING, WITH = "without", "while they come", "with"
PHASES = (WITHOUT, COMING, WITH)
"""In the order of a round."""

_SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Scrape:
    """What /metrics said at one moment.

    Attributes:
      resident_bytes: memory of the server's process.
      paused: streams whose client does not read, as decode workers count them.
      stalled: streams that the server has ended for that, since its start.
      connections: open, the one that asks among them.
      blocks: KV of all pools.
    """

    resident_bytes: int
    paused: int
    stalled: int
    connections: int
    blocks: KvBlocks


def read_scrape(metrics: str) -> Scrape:
    """Return what matters here from the text of /metrics."""
    sums: dict[str, float] = defaultdict(float)
    for name, labels, value in _SAMPLE.findall(metrics):
        for mark in ("", 'state="paused"', 'outcome="stalled"'):
            if mark in labels:
                sums[name + mark] += float(value)
    return Scrape(
        int(sums["process_resident_memory_bytes"]),
        int(sums['triolet_worker_sequencesstate="paused"']),
        int(sums['triolet_requests_totaloutcome="stalled"']),
        int(sums["triolet_connections"]),
        blocks_of(metrics),
    )


@dataclass(slots=True)
class StallRun:
    """What was measured.

    Attributes:
      clients: that stalled in each round.
      readers: that read on.
      gaps: by phase, for each round the gaps between writes of all readers, in seconds.
      resident_before: bytes, with the readers at work and nobody stalled yet.
      resident: bytes, the most that was seen in each round.
      paused: the fewest paused streams that were seen at the ends of a window with stalled clients.
      ended: how the stalled connections ended, by kind.
      blocks: once all was over.
      answers: that the readers read whole.
      inexact: readers whose answers to the same question differed.
    """

    clients: int
    readers: int
    gaps: Mapping[str, list[list[float]]] = field(
        default_factory=lambda: {phase: [] for phase in PHASES}
    )
    resident_before: int = 0
    resident: list[int] = field(default_factory=list)
    paused: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    blocks: KvBlocks = field(default_factory=lambda: KvBlocks(0, 0, 0))
    answers: int = 0
    inexact: int = 0

    @property
    def growth_bytes(self) -> int:
        """What stalled clients cost the server's process."""
        return max(self.resident, default=0) - self.resident_before

    @property
    def growth_per_round_bytes(self) -> float:
        """What each round added to the one before: what nobody gave back."""
        if len(self.resident) < 2:
            return 0.0
        return (self.resident[-1] - self.resident[0]) / (len(self.resident) - 1)

    def ratio(self, percent: int) -> float:
        """Return the percentile with stalled clients over the one without, median over rounds."""
        return self._median(WITH, percent) / self._median(WITHOUT, percent)

    def failures(self) -> list[str]:
        """Return what did not come out as promised, apart from times, which are the machine's."""
        found = []
        if self.paused < self.clients:
            found.append(f"only {self.paused} of {self.clients} clients were stalled")
        if self.growth_bytes >= MAX_GROWTH_BYTES:
            found.append(f"the server grew by {self.growth_bytes / MIB:.0f} MiB")
        if self.growth_per_round_bytes >= MAX_GROWTH_PER_ROUND_BYTES:
            more = self.growth_per_round_bytes / MIB
            found.append(f"each round the server grew by {more:.0f} MiB more")
        if not self.blocks.is_all_free:
            found.append(f"KV blocks are still held: {self.blocks}")
        if self.inexact:
            found.append(f"{self.inexact} readers got different answers to the same question")
        if not self.answers:
            found.append("no reader read an answer to its end")
        return found

    def table(self) -> Table:
        """Return the times between writes, in milliseconds."""
        table = Table(title=f"between tokens of {self.readers} readers, ms (median of rounds)")
        for heading in (f"{self.clients} stalled clients", "p50", "p99", "per round, p99", "gaps"):
            table.add_column(heading, justify="left" if heading[0].isdigit() else "right")
        for phase in PHASES:
            rounds = [_milliseconds(gaps, 99) for gaps in self.gaps[phase]]
            table.add_row(
                phase,
                f"{1000 * self._median(phase, 50):.1f}",
                f"{1000 * self._median(phase, 99):.1f}",
                " ".join(rounds),
                str(sum(map(len, self.gaps[phase]))),
            )
        return table

    def lines(self) -> Iterable[str]:
        """Yield what the table does not say."""
        for percent in (50, 99):
            ratio = self.ratio(percent)
            verdict = "within" if ratio <= MAX_RATIO else "beyond"
            yield f"p{percent} with / without: {ratio:.2f} ({verdict} {MAX_RATIO:.2f})"
        rounds = " ".join(f"{most / MIB:.1f}" for most in self.resident)
        yield (
            f"the server's memory: {self.resident_before / MIB:.1f} MiB, by round {rounds}: "
            f"{self.growth_bytes / MIB:+.1f} MiB, {self.growth_bytes / self.clients / KIB:.0f} KiB "
            "a client"
        )
        yield f"stalled connections ended: {self.ended}"
        yield f"answers read whole: {self.answers}, all exact: {not self.inexact}"
        yield f"KV blocks afterwards: {self.blocks}"

    def _median(self, phase: str, percent: int) -> float:
        return median(percentile(gaps, percent) for gaps in self.gaps[phase])


def _milliseconds(gaps: Sequence[float], percent: int) -> str:
    return f"{1000 * percentile(gaps, percent):.0f}"
