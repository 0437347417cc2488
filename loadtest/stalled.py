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

import argparse
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from rich.console import Console

from .server_process import ServerDidNotStartError, running_server
from .stall_clients import new_readers, read_on, stall
from .stall_report import COMING, WITH, WITHOUT, Scrape, StallRun, read_scrape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .stall_clients import Reader, Stalled

ROOT = Path(__file__).parents[1]
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

    def fetch() -> str:
        with urllib.request.urlopen(f"{url}/metrics", timeout=SCRAPE_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text

    return read_scrape(await trio.to_thread.run_sync(fetch))


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
    parser = argparse.ArgumentParser(prog="python -m loadtest.stalled", description=__doc__)
    parser.add_argument("--clients", type=int, default=200, help="that stop reading (200)")
    parser.add_argument("--readers", type=int, default=4, help="that read on (4)")
    parser.add_argument("--rounds", type=int, default=3, help="without and with, in turns (3)")
    parser.add_argument("--window", type=float, default=10.0, help="seconds measured (10)")
    parser.add_argument(
        "--stall-timeout", type=float, default=60.0, help="the server's, long enough for all (60)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "stalled")
    parser.add_argument("serve", nargs="*", metavar="SERVE-OPTION", help="for `triolet serve`")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    options = parse(arguments)
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    serve = ["--set", f"server.stall_timeout_s={options.stall_timeout}", *options.serve]
    try:
        with running_server(serve, options.out / "server.log") as url:
            experiment = Experiment(
                url,
                options.clients,
                new_readers(options.readers, READER_TOKENS),
                options.window,
                options.stall_timeout,
            )
            run = trio.run(experiment.rounds, options.rounds)
    except ServerDidNotStartError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        return 2
    console.print(run.table())
    for line in run.lines():
        console.print(line, markup=False)
    for failure in run.failures():
        console.print(f"failed: {failure}", style="red", markup=False)
    return 1 if run.failures() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
