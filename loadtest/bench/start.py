"""`python -m loadtest.bench.start`: measure how long clients wait for a model that is not running.

Whole fleets over HTTP, with and without templates (processes with the imports done) and snapshots
(packed weights). Fleets take turns, so that other load on the machine affects all of them.
Measured:

- start: from `triolet serve` to ready and a first token.
- crash: from SIGKILL of the decode worker to the first token of a new request.
- wake: from a request for a sleeping model to its first token: no worker runs, its files are in the
  page cache, and the server has its tokenizer loaded.
- staged: a wake without a snapshot of the weights: the model is on disk but has never run.

Besides the wall-clock seconds, the CPU seconds of the busiest new worker are reported: they hardly
depend on other load and are a lower bound for an idle machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ..harness.control import admin_of
from ..harness.lines import LineProcess
from ..harness.progress import announce, progress
from ..harness.report import BENCH, Ratio, Report, describe, finish
from ..harness.servers import TRIOLET, ServerProcess, cpu_s_of, running, seconds_of, wait_until
from ..harness.streams import COMPLETIONS, Clients, completion, post
from .engine import PEERS
from .model import SAID, written_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEMO: Final = "demo"
LARGE: Final = "large"
"""Name of the sleeping model: only fleets with named models have a control process."""
PROMPT: Final = (10, 11, 12, 13)
"""Token ids that every model here has."""
REQUEST: Final = post(COMPLETIONS, completion(PROMPT, 4, stream=True))
LARGE_REQUEST: Final = post(COMPLETIONS, completion(PROMPT, 2, stream=True, **SAID))
"""Requests to the demo model and to the model with random weights."""
WAIT_S: Final = 60.0
STABLE_S: Final = 0.2
"""Value of `supervisor.stable_s`: a later crash counts as the first one."""
REST_S: Final = (0.7, 1.3)
"""Seconds between two measurements, at varying moments relative to heartbeats."""
GOALS: Final = {"crash": 0.7, "wake": 0.3, "staged": 1.5, "start": 2.5}
"""Goals in seconds, on two otherwise idle cores."""
LLAMA: Final = "llama.cpp q8"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fleet to compare.

    Attributes:
      name: its name in tables.
      has_templates: whether processes are forked from a template with the imports done.
      has_snapshots: whether packed weights are stored.
    """

    name: str
    has_templates: bool = True
    has_snapshots: bool = True

    def options(self, packed: Path) -> list[str]:
        """Return options of `triolet serve`."""
        assignments = (
            f"supervisor.templates={str(self.has_templates).lower()}",
            f"supervisor.stable_s={STABLE_S}",
            f"worker.engine.snapshots.keep={str(self.has_snapshots).lower()}",
            f"worker.engine.snapshots.folder={packed}",
        )
        return [word for one in assignments for word in ("--set", one)]


OURS: Final = Kind("triolet")
KINDS: Final = (
    OURS,
    Kind("without snapshots", has_snapshots=False),
    Kind("without templates", has_templates=False),
)


class Wait(NamedTuple):
    """The wait of a client.

    Attributes:
      seconds: time to its first token.
      cpu_s: CPU time of the busiest new worker; None if unknown.
    """

    seconds: float
    cpu_s: float | None = None


def first_token_at(url: str, request: bytes) -> float:
    """Request a short answer and return the time of its first token, in seconds since the epoch.

    Raises:
      TimeoutError: no token came.
    """
    with closing(Clients(url)) as clients:
        stream = clients.begin(request)
        if not clients.read_until(time.monotonic() + WAIT_S, lambda: bool(stream.times)):
            raise TimeoutError(f"no token within {WAIT_S:.0f} s")
        at = time.time()
        clients.read_until(time.monotonic() + WAIT_S, lambda: stream.is_whole)
        stream.check()
    return at


class Fleet:
    """A running fleet.

    Args:
      server: its process, ready.
      request: a request to its model.
      model: name of the model; empty if it has none.
    """

    def __init__(self, server: ServerProcess, request: bytes, model: str = "") -> None:
        self._server = server
        self._request = request
        self._model = model
        prefix = f"{model}." if model else ""
        self._workers = (f"{prefix}prefill-0", f"{prefix}decode-0")
        first_token_at(server.url, request)

    def crash(self) -> Wait:
        """Kill the decode worker and wait for a first token."""
        killed_at = time.time()
        victim = self._workers[1]
        os.kill(self._server.log.pids()[victim], signal.SIGKILL)
        return self._wait_since(killed_at, [victim])

    def wake(self) -> Wait:
        """Put the model to sleep, send a request, and wait for a first token."""
        trio.run(self._sleep)
        return self._wait_since(time.time(), self._workers)

    async def _sleep(self) -> None:
        async with admin_of(self._server.url) as admin:
            await admin.sleep(self._model)

    def _wait_since(self, began_at: float, started: Sequence[str]) -> Wait:
        token_at = first_token_at(self._server.url, self._request)
        pids = self._server.log.pids()
        return Wait(token_at - began_at, max(cpu_s_of(pids[name]) for name in started))

    def settle(self) -> None:
        """Wait until all processes have been ready for `supervisor.stable_s`."""
        log = self._server.log

        def is_sound() -> bool:
            ready = log.of("process_ready")
            newest = {line["name"]: line for line in ready}
            return all(
                len([one for one in ready if one["name"] == name])
                == len(log.of("process_started", name=name))
                and time.time() - seconds_of(newest[name]) > STABLE_S
                for name in self._workers
            )

        trio.run(wait_until, is_sound, WAIT_S, "all workers are ready")


def started(options: Sequence[str], log: Path) -> Wait:
    """Start a fleet of the demo model and wait until it is ready and for a first token."""
    began_at = time.time()
    server = ServerProcess([*TRIOLET, "serve", DEMO, *options], log)
    with running(server):
        return Wait(first_token_at(server.url, REQUEST) - began_at)


def llama(model: Path, log: Path) -> Wait:
    """Start llama.cpp in a separate process, without HTTP, and wait for a first token."""
    peer = next(peer for peer in PEERS if peer.name == LLAMA)
    command = [str(peer.python), "-m", peer.module, str(model), *peer.arguments]
    with log.open("w") as output:
        began_at = time.time()
        with LineProcess([*command, "--threads", "2"], log=output) as process:
            process.answer()  # it prints its version once the model is loaded
            process.ask(begin={"batch": 1, "context": len(PROMPT), "most_steps": 1})
            return Wait(time.time() - began_at, cpu_s_of(process.pid))


class Measured:
    """Measured seconds, by measurement and kind of fleet."""

    def __init__(self) -> None:
        self.waits: defaultdict[tuple[str, str], list[Wait]] = defaultdict(list)

    def add(self, what: str, kind: str, wait: Wait) -> None:
        """Record a measurement."""
        self.waits[what, kind].append(wait)
        load = os.getloadavg()[0]
        progress(f"{what}, {kind}: {wait.seconds:.2f} s (load {load:.1f})")

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each measurement and kind."""
        rows = []
        for (what, kind), waits in self.waits.items():
            seconds = [wait.seconds for wait in waits]
            cpu_s = [wait.cpu_s for wait in waits if wait.cpu_s is not None]
            row = {"what": what, "of": kind, "median_s": round(median(seconds), 3)}
            row |= {"least_s": round(min(seconds), 3), "most_s": round(max(seconds), 3)}
            row |= {"cpu_s": round(median(cpu_s), 3) if cpu_s else None, "samples": len(waits)}
            rows.append(row)
        return rows

    def ratios(self) -> dict[str, Ratio]:
        """Return the goals in seconds, and the other kinds relative to the default one."""
        found = {of: median(wait.seconds for wait in waits) for of, waits in self.waits.items()}
        ratios = {
            f"seconds of {what}": Ratio(found[what, OURS.name], ceiling=goal)
            for what, goal in GOALS.items()
            if (what, OURS.name) in found
        }
        for (what, kind), seconds in found.items():
            if kind != OURS.name and (what, OURS.name) in found:
                # Templates and snapshots cost memory and disk, so they must not cost time too.
                ratios[f"{what}: triolet vs {kind}"] = Ratio(
                    found[what, OURS.name] / seconds, ceiling=1.0
                )
        return ratios


def rests(count: int) -> Iterator[float]:
    """Yield the pause before each measurement."""
    most, least = max(REST_S), min(REST_S)
    for number in range(count):
        yield least + (most - least) * number / max(1, count - 1)


def run(arguments: argparse.Namespace) -> Report:
    """Measure everything."""
    machine = describe(threads=len(os.sched_getaffinity(0)))
    logs = BENCH / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    model: Path = arguments.model or written_model("150m")
    measured, skipped = Measured(), {}
    peer = next(peer for peer in PEERS if peer.name == LLAMA)
    why_not = peer.why_not()
    if why_not is not None:
        skipped[LLAMA] = why_not
    packed = BENCH / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    turns = arguments.repetitions
    for number in range(turns):
        for kind in (OURS, KINDS[2]):
            name = f"start-{kind.name.replace(' ', '-')}"
            wait = started(kind.options(packed), logs / f"{name}-{number}.log")
            measured.add("start", kind.name, wait)
        if why_not is None:
            measured.add("wake", LLAMA, llama(model, logs / "start-llama.log"))
    crashes(measured, packed, logs, turns)
    wakes(measured, model, packed, logs, turns)
    shown = {"model": model.name, "repetitions": turns, "load_after": os.getloadavg()[0]}
    return Report(
        "start",
        machine | shown,
        measured.rows(),
        measured.ratios(),
        skipped,
    )


def crashes(measured: Measured, packed: Path, logs: Path, turns: int) -> None:
    """Kill decode workers of the demo model."""
    kinds = (OURS, KINDS[2])
    with ExitStack() as stack:
        fleets = {}
        for kind in kinds:
            log = logs / f"crash-{kind.name.replace(' ', '-')}.log"
            server = ServerProcess([*TRIOLET, "serve", DEMO, *kind.options(packed)], log)
            fleets[kind] = Fleet(stack.enter_context(running(server)), REQUEST)
        for rest_s in rests(turns):
            for kind, fleet in fleets.items():
                fleet.settle()
                time.sleep(rest_s)
                measured.add("crash", kind.name, fleet.crash())


def wakes(measured: Measured, model: Path, packed: Path, logs: Path, turns: int) -> None:
    """Put a larger model to sleep and wake it, with and without its snapshot."""
    with ExitStack() as stack:
        fleets = {}
        for kind in KINDS:
            log = logs / f"wake-{kind.name.replace(' ', '-')}.log"
            command = [*TRIOLET, "serve", f"{LARGE}={model}", *kind.options(packed)]
            server = ServerProcess(command, log)
            fleets[kind] = Fleet(stack.enter_context(running(server)), LARGE_REQUEST, LARGE)
        for rest_s in rests(turns):
            for kind, fleet in fleets.items():
                fleet.settle()
                time.sleep(rest_s)
                measured.add("wake", kind.name, fleet.wake())
            fleets[OURS].settle()
            for snapshot in packed.glob("*.packed"):
                snapshot.unlink()
            measured.add("staged", OURS.name, fleets[OURS].wake())


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="directory (default: the 150M model)")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    announce(__doc__)
    return finish(run(arguments))


if __name__ == "__main__":
    sys.exit(main())
