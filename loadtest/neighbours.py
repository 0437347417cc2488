"""Measure how much one tenant's chats suffer from another tenant that attacks within all limits.

Uses one fleet with the demo model. The victim sends one short streamed chat after the other, alone
and during each attack in turns, because a machine's speed varies. Each attack runs in a separate
process with a low priority. The medians of paired rounds are compared.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import trio
from rich.table import Table

from .harness.lines import LineProcess
from .harness.progress import progress
from .harness.servers import running_server
from .harness.statistics import milliseconds, percentile
from .harness.streams import CHAT, Clients, Stream, StreamBrokenError, post
from .harness.tenants import key_of, write_tenants
from .hostile_clients import Watch, watch_health
from .neighbour_attacks import ATTACKER, ATTACKS, SPENT

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

VICTIM: Final = "victim"
GENEROUS: Final = (
    "requests_per_minute = 1000000\ntokens_per_minute = 1000000000000\nmax_concurrent = 1000\n"
    "max_running = 8"
)
PLANS: Final = {
    VICTIM: GENEROUS,
    ATTACKER: GENEROUS,
    SPENT: "requests_per_minute = 6\ntokens_per_minute = 1000000\nmax_concurrent = 100",
}
VICTIM_TOKENS: Final = 48
LEAD_S: Final = 1.0
"""Seconds from the start of an attack until the victim is measured."""
SETTLE_S: Final = 1.0
"""Seconds of rest after an attack."""
MAX_TTFT_RATIO: Final = 2.0
MAX_GAP_RATIO: Final = 2.0
MAX_HEALTH_S: Final = 0.25
TABLE_COLUMNS: Final = 120
"""Width of a table in a file."""
HOW_TO_READ: Final = (
    "alone / attacked: medians of all streams; a worst gap is the longest between events of one "
    "stream. Ratios are attacked / alone, the median of the rounds'. Answered: to the attacker. "
    f"Targets: first token and worst gap at most {MAX_TTFT_RATIO:g} and {MAX_GAP_RATIO:g} times "
    f"alone, /health/live within {1000 * MAX_HEALTH_S:.0f} ms at p99. Attackers run on this "
    "machine's cores, with nice 10."
)


@dataclass(slots=True)
class Half:
    """The victim's measurements, alone or during an attack.

    Attributes:
      ttfts_s: time to first token of each stream.
      worst_gaps_s: longest gap of each stream.
      failures: error answers.
      health: results of liveness checks.
    """

    ttfts_s: list[float] = field(default_factory=list)
    worst_gaps_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    health: Watch = field(default_factory=Watch)

    def take(self, stream: Stream) -> None:
        """Record a finished stream."""
        try:
            stream.check()
        except StreamBrokenError as error:
            self.failures.append(str(error))
            return
        if stream.ttft_s is None or not stream.gaps_s:
            self.failures.append(f"no tokens: {stream.body[:200]!r}")
            return
        self.ttfts_s.append(stream.ttft_s)
        self.worst_gaps_s.append(max(stream.gaps_s))


@dataclass(slots=True)
class Beside:
    """All rounds of one attack.

    Attributes:
      rounds: pairs of halves, alone and attacked.
      answered: answers to the attacker, by status.
    """

    rounds: list[tuple[Half, Half]] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)

    @property
    def ttft_ratio(self) -> float:
        """Median ratio of first tokens; infinite if half of the rounds had no answer."""
        return median(_ratio(one.ttfts_s, other.ttfts_s) for one, other in self.rounds)

    @property
    def gap_ratio(self) -> float:
        """Median ratio of worst gaps; infinite if half of the rounds had no answer."""
        return median(_ratio(one.worst_gaps_s, other.worst_gaps_s) for one, other in self.rounds)

    @property
    def health_s(self) -> list[float]:
        """Delays of /health/live during the attack."""
        return [delay_s for _, beside in self.rounds for delay_s in beside.health.delays_s]

    @property
    def failures(self) -> list[str]:
        """Failures of the victim and of liveness checks during the attack."""
        halves = [beside for _, beside in self.rounds]
        return [text for half in halves for text in (*half.failures, *half.health.failures)]


def _ratio(alone: Sequence[float], beside: Sequence[float]) -> float:
    if not alone or not beside:
        return float("inf")
    return percentile(beside, 50) / percentile(alone, 50)


def victims_chat(number: int, *, has_schema: bool) -> bytes:
    """Return a short streamed chat with a unique prompt."""
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"What is {number}?"}],
        "max_tokens": VICTIM_TOKENS,
        "seed": number,
        "stream": True,
        "ignore_eos": True,
    }
    if has_schema:
        schema = {"type": "object", "properties": {f"n{number}": {"type": "string"}}}
        named = {"name": "one", "schema": schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    return post(CHAT, asked, {"authorization": f"Bearer {key_of(VICTIM)}"})


async def watch(url: str, seconds: float, numbers: Iterator[int], *, has_schema: bool) -> Half:
    """Send chats for some seconds, one after the other, and check the server's liveness."""
    half = Half()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_health, url, half.health)
        async with Clients(url).reading() as clients:
            until = trio.current_time() + seconds
            while trio.current_time() < until:
                try:
                    half.take(await clients.ask(victims_chat(next(numbers), has_schema=has_schema)))
                except StreamBrokenError as error:
                    half.failures.append(str(error))
        nursery.cancel_scope.cancel()
    return half


def besieged(url: str, name: str, rounds: int, seconds: float, numbers: Iterator[int]) -> Beside:
    """Send chats alone and during one attack, in turns."""
    beside = Beside()
    has_schema = ATTACKS[name].meets_schemas
    command = ["nice", "-n", "10", sys.executable, "-m", "loadtest.neighbour_attacks", url, name]
    with LineProcess(command) as attacker:

        async def half() -> Half:
            return await watch(url, seconds, numbers, has_schema=has_schema)

        attacker.ask(seconds=0)  # builds the bodies
        for _ in range(rounds):
            alone = trio.run(half)
            attacker.tell(seconds=LEAD_S + seconds)
            trio.run(trio.sleep, LEAD_S)
            attacked = trio.run(half)
            beside.answered.update(attacker.answer())
            beside.rounds.append((alone, attacked))
            trio.run(trio.sleep, SETTLE_S)
    return beside


def row_of(name: str, beside: Beside) -> list[str]:
    """Return the table row of an attack."""
    alone = [half for half, _ in beside.rounds]
    attacked = [half for _, half in beside.rounds]
    cells = [name]
    for ratio, values in ((beside.ttft_ratio, "ttfts_s"), (beside.gap_ratio, "worst_gaps_s")):
        both = [
            milliseconds([s for half in halves for s in getattr(half, values)], 50, digits=1)[0]
            for halves in (alone, attacked)
        ]
        cells += [" / ".join(both), f"{ratio:.2f}"]
    gaps_s = [gap_s for half in attacked for gap_s in half.worst_gaps_s]
    cells += milliseconds(gaps_s, 100) + milliseconds(beside.health_s, 99, 100)
    cells += [", ".join(f"{number} x {what}" for what, number in sorted(beside.answered.items()))]
    return cells


def table_of(seen: Mapping[str, Beside]) -> Table:
    """Return one row per attack."""
    table = Table(title="a tenant's chats during another's attacks, in ms", caption=HOW_TO_READ)
    for name in ("attack", "first token", "ratio", "worst gap", "ratio", "max gap",
                 "health p99", "max", "answered"):  # fmt: skip
        is_text = name.endswith(("attack", "answered"))
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for name, beside in seen.items():
        table.add_row(*row_of(name, beside))
    return table


def wrongs_of(seen: Mapping[str, Beside]) -> list[str]:
    """Return descriptions of missed goals."""
    wrongs = []
    for name, beside in seen.items():
        for what, ratio, most in (
            ("the first token", beside.ttft_ratio, MAX_TTFT_RATIO),
            ("the worst gap", beside.gap_ratio, MAX_GAP_RATIO),
        ):
            if ratio > most:
                wrongs.append(f"{name}: {what} took {ratio:.2f} times as long; at most {most:g}")
        if beside.health_s and (p99_s := percentile(beside.health_s, 99)) > MAX_HEALTH_S:
            wrongs.append(f"{name}: /health/live took {1000 * p99_s:.0f} ms at p99")
        if beside.failures:
            wrongs.append(f"{name}: {len(beside.failures)} failed: {beside.failures[0]}")
    return wrongs


def run_neighbours(options: Namespace, names: Sequence[str], console: Console) -> list[str]:
    """Run some attacks against a fleet, print the table and return the missed goals."""
    rounds, seconds = options.rounds, options.seconds
    serve = ["--tenants", str(write_tenants(options.out, PLANS)), *options.serve]
    seen: dict[str, Beside] = {}
    numbers = count(1)
    with running_server(serve, options.out / "neighbours.log") as url:
        for name in names:
            seen[name] = beside = besieged(url, name, rounds, seconds, numbers)
            progress(
                f"neighbour: {name}: first token {beside.ttft_ratio:.2f} times, "
                f"worst gap {beside.gap_ratio:.2f} times that alone; {dict(beside.answered)}"
            )
    console.print(table_of(seen), width=max(console.width, TABLE_COLUMNS), crop=False)
    return wrongs_of(seen)
