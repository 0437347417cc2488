"""`python -m loadtest.stalled`: clients that stop reading; what they cost everybody else.

In turns, without and with: some readers stream answers all the time; then many clients, over SSE
and WebSocket, begin the heaviest streams there are and stop reading. Only once the decode worker
says that all of them are paused does the second measurement begin, and it counts only if they still
are at its end. Then the stall bound ends them, and the next round begins.

How to read the table: "without" and "with" are the same readers on the same machine seconds apart,
so their ratio says what stalled clients cost; "while they come" has their prompts and first tokens
computed as well, which is work and no stall. A ratio within 1.10 and a growth below 64 MiB are the
promise. Memory is counted from before the first of them came, so the first round is a server's that
has served few; each later one should get by with what the first took. On a machine that does other
work the p99 of single rounds tells how much to believe.
Exit code 1 if not all stalled, memory grew too much, a block is still held, or an answer differed.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import httpx2
import trio
from rich.table import Table

from .campaign.misbehaving import new_readers, read_on, stall
from .harness.campaign import campaign_parser, exit_code
from .harness.metrics import KvBlocks, blocks_of, total
from .harness.progress import announce, progress
from .harness.servers import running_server
from .harness.statistics import milliseconds, percentile

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.console import Console

    from .campaign.misbehaving import Reader, Stalled


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
    return Scrape(
        int(total(metrics, "process_resident_memory_bytes")),
        int(total(metrics, "triolet_worker_sequences", 'state="paused"')),
        int(total(metrics, "triolet_requests_total", 'outcome="stalled"')),
        int(total(metrics, "triolet_connections")),
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
            rounds = [milliseconds(gaps, 99, digits=1)[0] for gaps in self.gaps[phase]]
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


READER_TOKENS = 900
"""Long answers: each new one begins with a prompt, whose computation all others feel."""
STALL_TOKENS = 900
"""More than any buffer on the way takes, and within the demo model's context."""
BEGINNING_AT_ONCE = 32
"""Connections that are made at the same time; more would only wait for one another."""
STALL_DEADLINE_S = 240.0
"""Until all are paused: the machine may be slow, the work is a few hundred tokens each."""
END_DEADLINE_S = 60.0
"""Beyond the stall bound: until the last of them has been ended and its blocks are free."""
POLL_S = 0.25
SCRAPE_TIMEOUT_S = 30.0


async def scrape(url: str) -> Scrape:
    """Ask the server. Costs it some milliseconds, and so is not done inside a measurement."""
    async with httpx2.AsyncClient(base_url=url, timeout=SCRAPE_TIMEOUT_S) as client:
        return read_scrape((await client.get("/metrics")).raise_for_status().text)


class Experiment:
    """One run against one server.

    Args:
      url: of the server.
      clients: how many stall.
      readers: who read on.
      window_s: length of one measurement.
      stall_timeout_s: the server's own.
    """

    def __init__(
        self,
        url: str,
        clients: int,
        readers: Sequence[Reader],
        window_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._run = StallRun(clients, len(readers))
        self._url = url
        self._readers = readers
        self._window_s = window_s
        self._stall_timeout_s = stall_timeout_s

    async def rounds(self, count: int) -> StallRun:
        """Measure in turns and return what came of it."""
        async with trio.open_nursery() as nursery:
            for reader in self._readers:
                nursery.start_soon(reader.run, self._url)
            await trio.sleep(self._window_s / 2)  # everybody's first steps are slower
            for _ in range(count):
                await self._round()
            nursery.cancel_scope.cancel()
        await self._until(lambda seen: seen.blocks.is_all_free, END_DEADLINE_S)
        run = self._run
        run.blocks = (await scrape(self._url)).blocks
        run.answers = sum(reader.num_answers for reader in self._readers)
        run.inexact = sum(len(reader.texts) > 1 for reader in self._readers)
        return run

    async def _round(self) -> None:
        run = self._run
        await self._measure(WITHOUT)
        before = await scrape(self._url)
        run.resident_before = run.resident_before or before.resident_bytes
        began_at = trio.current_time()
        clients = await self._stall_all()
        seen = await self._until(lambda seen: seen.paused >= run.clients, STALL_DEADLINE_S)
        self._note(COMING, began_at)
        await self._measure(WITH)
        after = await scrape(self._url)
        paused = min(seen.paused, after.paused)
        run.paused = min(run.paused or paused, paused)
        run.resident.append(max(seen.resident_bytes, after.resident_bytes))
        ended = before.stalled + run.clients
        await self._until(
            lambda seen: (
                seen.stalled >= ended
                and seen.paused == 0
                and seen.connections <= len(self._readers) + 1
            ),
            self._stall_timeout_s + END_DEADLINE_S,
        )
        with trio.move_on_after(END_DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for client in clients:
                    nursery.start_soon(read_on, client)
        how = Counter(f"{client.kind} {client.ended or 'open'}" for client in clients)
        run.ended = dict(Counter(run.ended) + how)

    async def _stall_all(self) -> list[Stalled]:
        clients: list[Stalled] = []
        seats = trio.CapacityLimiter(BEGINNING_AT_ONCE)

        async def one(number: int) -> None:
            async with seats:
                clients.append(await stall(self._url, number, STALL_TOKENS))

        async with trio.open_nursery() as nursery:
            for number in range(self._run.clients):
                nursery.start_soon(one, number)
        return clients

    async def _measure(self, phase: str) -> None:
        began_at = trio.current_time()
        await trio.sleep(self._window_s)
        self._note(phase, began_at)

    def _note(self, phase: str, began_at: float) -> None:
        now = trio.current_time()
        progress(f"{phase}: {now - began_at:.0f} s")
        self._run.gaps[phase].append(
            [
                gap
                for reader in self._readers
                for at, gap in reader.gaps
                if began_at + gap <= at <= now
            ]
        )

    async def _until(self, condition: Callable[[Scrape], bool], deadline_s: float) -> Scrape:
        """Return the first scrape that fulfils it, or the last one before the deadline."""
        give_up = trio.current_time() + deadline_s
        while True:
            seen = await scrape(self._url)
            if condition(seen) or trio.current_time() >= give_up:
                return seen
            await trio.sleep(POLL_S)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = campaign_parser("stalled", __doc__)
    parser.add_argument("--clients", type=int, default=200, help="that stop reading (200)")
    parser.add_argument("--readers", type=int, default=4, help="that read on (4)")
    parser.add_argument("--rounds", type=int, default=3, help="without and with, in turns (3)")
    parser.add_argument("--window", type=float, default=10.0, help="seconds measured (10)")
    parser.add_argument(
        "--stall-timeout", type=float, default=60.0, help="the server's, long enough for all (60)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    options = parse(arguments)
    announce(__doc__)
    serve = ["--set", f"server.stall_timeout_s={options.stall_timeout}", *options.serve]
    readers = new_readers(options.readers, READER_TOKENS)

    def campaign(console: Console) -> list[str]:
        with running_server(serve, options.out / "server.log") as url:
            experiment = Experiment(
                url, options.clients, readers, options.window, options.stall_timeout
            )
            run = trio.run(experiment.rounds, options.rounds)
        console.print(run.table())
        for line in run.lines():
            console.print(line, markup=False)
        return run.failures()

    return exit_code(options.out, campaign)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
