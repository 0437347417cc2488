"""`python -m loadtest.bench.burst`: 2,048 embeddings at once on a machine that is busy otherwise.

A fleet shares its cores with processes that only compute. Again and again one client asks for the
vectors of 2,048 inputs of one token, of which every server process could make itself a standstill:
workers would be given up while they live, and the prompt would be suspected of their deaths. The
server counts the turns of its own event loop (turn_counter).

How to read it: no worker may be lost, no prompt be convicted, and no turn take more than 20 ms of
the loop's own CPU time. `wall ms` is how long that turn lasted, and `longest wall ms` the longest
of all: both hold what other processes on the same cores took meanwhile, so they judge the machine
and not the server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from ..harness.progress import announce, progress
from ..harness.report import BENCH, Ratio, Report, describe, finish, line_of
from ..harness.servers import ROOT, TAKES_ALL, FleetLog, ServerProcess, running
from ..harness.streams import Clients, post
from ..harness.turn_counter import COMMAND, VARIABLE, TurnFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEMO: Final = ROOT / "triolet" / "demo"
INPUTS: Final = 2048
"""As many as one request may have."""
LONGEST_TURN_MS: Final = 20.0
COMPUTE: Final = "while True: pass"
ENCODINGS: Final = ("base64", "float")
WORST, ITS_WALL, LONGEST = "longest turn, CPU ms", "wall ms", "longest wall ms"


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """Keep so many cores busy."""
    with ExitStack() as stack:
        for _ in range(num_processes):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", COMPUTE]))
            stack.callback(process.kill)
        yield


async def ask(url: str, encoding: str) -> float:
    """Ask for all vectors, check that they are there, and return the seconds."""
    request = post("/v1/embeddings", {"input": ["0"] * INPUTS, "encoding_format": encoding})
    async with Clients(url).reading() as clients:
        began_at = trio.current_time()
        answer = await clients.ask(request)
        seconds = trio.current_time() - began_at
    if len(json.loads(answer.body)["data"]) != INPUTS:
        raise RuntimeError(f"the server answered {answer.body[:200]!r}")
    return seconds


def one_round(number: int, url: str, log: FleetLog, turns: TurnFile) -> dict[str, Any]:
    """Return the row of one round."""
    events = ("worker_lost", "request_quarantined", "stood_still")
    before = [len(log.of(event)) for event in events]
    turns.write()
    encoding = ENCODINGS[number % len(ENCODINGS)]
    seconds = trio.run(ask, url, encoding)
    lost, convicted, pauses = (
        len(log.of(event)) - seen for event, seen in zip(events, before, strict=True)
    )
    seen = turns.read()
    return {
        "round": number + 1,
        "encoding": encoding,
        "seconds": seconds,
        "workers lost": lost,
        "prompts convicted": convicted,
        "standstills": pauses,
        "turns": seen.turns,
        WORST: 1e3 * seen.cpu_s,
        ITS_WALL: 1e3 * seen.wall_s,
        LONGEST: 1e3 * seen.longest_wall_s,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description="2,048 embeddings beside busy processes")
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--busy", type=int, default=3, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    announce(__doc__)
    folder = BENCH / "burst"
    folder.mkdir(parents=True, exist_ok=True)
    turns = TurnFile(folder / "turns")
    server = ServerProcess(
        [*COMMAND, "serve", options.model, *TAKES_ALL],
        folder / "serve.log",
        {**os.environ, VARIABLE: str(folder / "turns")},
    )
    rows: list[dict[str, Any]] = []
    with running(server):
        trio.run(ask, server.url, ENCODINGS[0])  # what is made once is made here
        with busy(options.busy):
            for number in range(options.rounds):
                rows.append(one_round(number, server.url, server.log, turns))
                progress(line_of(rows[-1]))
    ratios = {
        "workers lost": Ratio(sum(row["workers lost"] for row in rows), ceiling=0),
        "prompts convicted": Ratio(sum(row["prompts convicted"] for row in rows), ceiling=0),
        "longest turn of all rounds, ms of CPU": Ratio(
            max(row[WORST] for row in rows), ceiling=LONGEST_TURN_MS
        ),
    }
    report = Report("burst", describe(1), rows, ratios, {}, (("round", "encoding"), WORST))
    return finish(report)


if __name__ == "__main__":
    sys.exit(main())
