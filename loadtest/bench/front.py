"""`python -m loadtest.bench.front`: compare the CPU per streamed token of HTTP servers.

Every server gets the same clients, a separate core, and the same workers, which compute nothing
and run in another process (front_source). Servers take turns, and medians over rounds are compared.
In each round a server first holds idle streams, then a few streams, then many, each with ten tokens
a second. With few streams the fixed costs dominate: timers, heartbeats, and a turn per frame.

CPU is that of the whole process. A server that falls behind may write several tokens as one event,
which costs less: see `tokens_per_event`. A token's relay delay is the time from its worker's send
to its client's read. Memory is the growth of the process per idle stream.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from array import array
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..harness.lines import LineProcess
from ..harness.progress import progress
from ..harness.report import Ratio, Report, describe, line_of, run_bench
from ..harness.servers import TRIOLET, ServerProcess, cost_of, cpu_s_of, on_core, running
from ..harness.statistics import percentile
from ..harness.streams import CHAT, Clients, Stream, post
from .engines import install, python_of
from .front_source import IDLE_SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_TOKENS: Final = 900
"""Within the demo model's context, and more than any stream gets here."""
WARM_UP_STREAMS: Final = 16
WARM_UP_S: Final = 1.0
BEGIN_DEADLINE_S: Final = 60.0
"""Timeout for every stream's first token."""
CPU_CEILING: Final = 1.0
DELAY_CEILING_MS: Final = 50.0
IDLE_CEILING_KIB: Final = 45.0


ROOT: Final = Path(__file__).parents[2]
DEMO: Final = ROOT / "triolet" / "demo"
FOLDER: Final = ROOT / "build" / "bench"
PEER_PACKAGES: Final = (
    "uvicorn",
    "fastapi",
    "starlette",
    "httptools",
    "uvloop",
    "h11",
    "pyzmq",
    "msgspec",
    "tokenizers",
)
ENVIRONMENT: Final = "front"
SETTLE_S: Final = 0.5
"""Seconds after ready, for the other server to connect to the workers."""
PATIENT: Final = ("--set", "link.peer_timeout_s=30", "--set", "link.lease_ttl_s=60")
"""Long timeouts, so that a short stall of the workers' process does not end a stream."""


@dataclass(frozen=True, slots=True)
class Front:
    """A server to compare.

    Attributes:
      name: its name in tables.
      peer: arguments of drivers/front.py; empty for Triolet's server.
      options: further options of Triolet's server.
    """

    name: str
    peer: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def why_not(self) -> str | None:
        """Install missing packages. Return why it cannot run here, or None if it can."""
        return install(ENVIRONMENT, PEER_PACKAGES) if self.peer else None

    def process(self, sockets: Path, workers: int, log: Path) -> ServerProcess:
        """Return its process, not started yet."""
        port = ("--port", "{}") if self.peer else ("--set", "server.port={}")
        if self.peer:
            module = [str(python_of(ENVIRONMENT)), "-m", "loadtest.bench.drivers.front"]
            command = [*module, *self.peer, str(DEMO / "tokenizer.json"), str(sockets)]
            command += ["--workers", str(workers)]
        else:
            decodes = ",".join(f"ipc://{sockets}/decode-{number}" for number in range(workers))
            command = [*TRIOLET, "server", str(DEMO), "--set", "process.log_level=warning"]
            command += ["--set", f"server.prefill_addresses=ipc://{sockets}/prefill-0"]
            command += ["--set", f"server.decode_addresses={decodes}", *PATIENT, *self.options]
        return ServerProcess(command, log, os.environ | {"PYTHONPATH": str(ROOT)}, port_words=port)


OURS: Final = Front("triolet")
FASTAPI: Final = Front("uvicorn (h11) + FastAPI", ("fastapi", "h11", "asyncio"))
FRONTS: Final = (
    OURS,
    FASTAPI,
    Front("uvicorn (httptools, uvloop) + Starlette", ("starlette", "httptools", "uvloop")),
)


class Cost(NamedTuple):
    """CPU and memory that a process has used so far."""

    cpu_s: float
    resident_bytes: int

    @classmethod
    def of(cls, process: ServerProcess) -> Cost:
        """Read the usage of a process."""
        held = cost_of(process.pid)
        assert held is not None, "the server has exited"
        return cls(cpu_s_of(process.pid), held.rss_bytes)


class Case(NamedTuple):
    """A measurement: the number of streams and its duration."""

    streams: int
    seconds: float


class Figures(NamedTuple):
    """Results of one server in one case and round."""

    tokens_per_s: float
    cpu_us_per_token: float
    tokens_per_event: float
    delay_p50_ms: float
    delay_p99_ms: float


class Source(LineProcess):
    """The workers' process; a context manager.

    Args:
      sockets: directory for their sockets.
      workers: number of decode workers.
      rate: tokens per second of each stream.
    """

    def __init__(self, sockets: Path, workers: int, rate: float) -> None:
        command = [sys.executable, "-m", "loadtest.bench.front_source", str(DEMO), str(sockets)]
        super().__init__([*command, "--workers", str(workers), "--rate", str(rate)])
        self._path = sockets / "times.json"
        self.answer()

    def clear(self) -> None:
        """Forget the times of earlier streams."""
        self.ask(do="clear")

    def times(self) -> dict[int, list[float]]:
        """Return when each token of each stream was sent."""
        self.ask(do="dump", path=str(self._path))
        return {int(seed): sent for seed, sent in json.loads(self._path.read_text()).items()}


CONTENT: Final = re.compile(rb'"content":\s*"([^"]*)"')
"""Matches the text in a chunk of any server. The benchmark's words need no escapes."""
OPENING_PAUSE_S: Final = 0.002
"""Seconds between two new connections. Open ones are read in between."""


def chat_request(seed: int, max_tokens: int, *, n: int = 1, key: str = "") -> bytes:
    """Return the request of a streamed chat."""
    fields = {
        "messages": [{"role": "user", "content": f"Tell me story {seed}."}],
        "stream": True,
        "seed": seed,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "n": n,
    }
    return post(CHAT, fields, {"authorization": f"Bearer {key}"} if key else None)


@dataclass(eq=False, slots=True)
class TokenStream(Stream):
    """A stream of words. Only the arrival times are kept.

    Attributes:
      seed: number of the stream.
      arrivals: arrival time of each token.
      num_events: chunks that had text.
    """

    seed: int = 0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    num_events: int = 0
    _unread: bytes = b""

    def note(self, data: bytes, num_events: int, now: float) -> None:
        """Count the tokens in the received data: one per space."""
        del num_events
        whole, mark, self._unread = (self._unread + data).rpartition(b"\n\n")
        for text in CONTENT.findall(whole) if mark else ():
            count = text.count(b" ")
            self.num_events += count > 0
            self.arrivals.extend([now] * count)


class Readers:
    """Reads streams of one server.

    Args:
      url: address of the server.
    """

    def __init__(self, url: str) -> None:
        self.clients = Clients(url, make=TokenStream)
        self.streams: list[TokenStream] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams so far."""
        return sum(len(stream.arrivals) for stream in self.streams)

    @property
    def num_events(self) -> int:
        """Chunks of all streams so far."""
        return sum(stream.num_events for stream in self.streams)

    def open(self, seeds: range) -> None:
        """Open streams while reading those that are open."""
        for seed in seeds:
            stream = self.clients.begin(chat_request(seed, MAX_TOKENS))
            stream.seed = seed
            self.streams.append(stream)
            self.read_for(OPENING_PAUSE_S)

    def read_for(self, seconds: float) -> None:
        """Read for some seconds."""
        self.clients.read_until(time.monotonic() + seconds)


def delays_ms(
    streams: list[TokenStream], sent: dict[int, list[float]], begin: float, end: float
) -> list[float]:
    """Return the relay delays of all tokens that were sent in an interval, sorted.

    A token that never arrived counts with the time until the end of reading.
    """
    last = max((stream.arrivals[-1] for stream in streams if stream.arrivals), default=end)
    found = []
    for stream in streams:
        times = sent.get(stream.seed, [])
        for index in range(bisect_left(times, begin), bisect_left(times, end)):
            has_come = index < len(stream.arrivals)
            found.append(1000 * ((stream.arrivals[index] if has_come else last) - times[index]))
    return sorted(found)


@contextmanager
def streaming(running: ServerProcess, seeds: range) -> Iterator[Readers]:
    """Open streams, and close them at the end.

    Raises:
      RuntimeError: some streams got no token.
    """
    readers = Readers(running.url)
    try:
        readers.open(seeds)
        deadline = time.monotonic() + BEGIN_DEADLINE_S
        streams = readers.streams
        if not readers.clients.read_until(deadline, lambda: all(s.arrivals for s in streams)):
            missing = sum(not stream.arrivals for stream in streams)
            raise RuntimeError(f"{missing} of {len(seeds)} streams did not start")
        yield readers
    finally:
        readers.clients.close()


def measure_idle_kib(running: ServerProcess, count: int) -> float:
    """Return the server's memory per stream without tokens."""
    with streaming(running, range(WARM_UP_STREAMS)) as readers:
        readers.read_for(WARM_UP_S)
    before = Cost.of(running)
    with streaming(running, range(IDLE_SEED, IDLE_SEED + count)) as readers:
        readers.read_for(WARM_UP_S)
        after = Cost.of(running)
    return (after.resident_bytes - before.resident_bytes) / count / 1024


def measure(running: ServerProcess, source: Source, case: Case) -> Figures:
    """Measure a server with some streams."""
    source.clear()
    with streaming(running, range(case.streams)) as readers:
        readers.read_for(WARM_UP_S)
        before, begin = Cost.of(running), time.monotonic()
        tokens_before, events_before = readers.num_tokens, readers.num_events
        readers.read_for(case.seconds)
        # If the machine stalled all the time, nothing has arrived yet.
        readers.clients.read_until(
            time.monotonic() + BEGIN_DEADLINE_S,
            lambda: readers.num_tokens >= tokens_before + 2 * case.streams,
        )
        after, end = Cost.of(running), time.monotonic()
        num_tokens = readers.num_tokens - tokens_before
        num_events = readers.num_events - events_before
        readers.read_for(WARM_UP_S)  # tokens that are still on their way
        delays = delays_ms(readers.streams, source.times(), begin, end)
    return Figures(
        num_tokens / (end - begin),
        1e6 * (after.cpu_s - before.cpu_s) / max(num_tokens, 1),
        num_tokens / max(num_events, 1),
        percentile(delays, 50),
        percentile(delays, 99),
    )


class Rounds:
    """Runs and collects all measurements.

    Args:
      fronts: servers that can run here.
      cases: measurements of each.
      arguments: parsed command line.
    """

    def __init__(
        self,
        fronts: list[Front],
        cases: tuple[Case, ...],
        arguments: argparse.Namespace,
    ) -> None:
        self.figures: dict[tuple[Front, Case], list[Figures]] = {}
        self.idle_kib: dict[Front, list[float]] = {}
        self._fronts = fronts
        self._cases = cases
        self._arguments = arguments

    def run(self, folder: Path) -> None:
        """Measure every server in every round."""
        cores = sorted(os.sched_getaffinity(0))
        own_core, their_core = (cores[1], cores[0]) if len(cores) > 1 else (None, None)
        workers = self._arguments.workers
        with on_core(own_core), Source(folder, workers, self._arguments.rate) as source:
            for number in range(self._arguments.rounds):
                turn = number % len(self._fronts)
                for front in self._fronts[turn:] + self._fronts[:turn]:
                    log = FOLDER / "logs" / f"front-{front.name.split()[0]}.log"
                    process = front.process(folder, workers, log)
                    with running(process, their_core):
                        time.sleep(SETTLE_S)
                        self._one(front, process, source)

    def _one(self, front: Front, running: ServerProcess, source: Source) -> None:
        idle = measure_idle_kib(running, max(case.streams for case in self._cases))
        self.idle_kib.setdefault(front, []).append(idle)
        for case in self._cases:
            figures = measure(running, source, case)
            self.figures.setdefault((front, case), []).append(figures)
            progress(f"{front.name}, {case.streams} streams: {line_of(figures._asdict())}")


def rows_of(rounds: Rounds) -> list[dict[str, Any]]:
    """Return one row per server and case, with medians of the rounds."""
    rows = []
    for (front, case), figures in rounds.figures.items():
        middle = Figures(*(median(values) for values in zip(*figures, strict=True)))
        rows.append(
            {
                "server": front.name,
                "streams": case.streams,
                "tokens_per_s": round(middle.tokens_per_s, 1),
                "cpu_us_per_token": round(middle.cpu_us_per_token, 1),
                "tokens_per_event": round(middle.tokens_per_event, 2),
                "tokens_per_core_s": round(1e6 / middle.cpu_us_per_token),
                "delay_p50_ms": round(middle.delay_p50_ms, 1),
                "delay_p99_ms": round(middle.delay_p99_ms, 1),
                "idle_stream_kib": round(median(rounds.idle_kib[front]), 1),
                "rounds": len(figures),
            }
        )
    return rows


def ratios_of(rows: list[dict[str, Any]]) -> dict[str, Ratio]:
    """Return Triolet's figures relative to the others."""
    ratios = {}
    by_name = {(row["server"], row["streams"]): row for row in rows}
    for row in rows:
        streams = row["streams"]
        ours = by_name[OURS.name, streams]
        if row is not ours:
            value = ours["cpu_us_per_token"] / row["cpu_us_per_token"]
            # Only one of the others has a goal; the rest is for information.
            ceiling = CPU_CEILING if row["server"] == FASTAPI.name else None
            ratios[f"CPU per token vs {row['server']}, {streams} streams"] = Ratio(
                value, ceiling=ceiling
            )
    most = max((row for row in rows if row["server"] == OURS.name), key=lambda row: row["streams"])
    ratios[f"relay delay p99 in ms, {most['streams']} streams"] = Ratio(
        most["delay_p99_ms"], ceiling=DELAY_CEILING_MS
    )
    ratios["idle stream in KiB"] = Ratio(most["idle_stream_kib"], ceiling=IDLE_CEILING_KIB)
    return ratios


def run(arguments: argparse.Namespace) -> Report:
    """Measure all servers that can run here."""
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    wanted = [front for front in FRONTS if not arguments.fronts or front.name in arguments.fronts]
    skipped = {front.name: reason for front in wanted if (reason := front.why_not())}
    few = (Case(streams, arguments.seconds / 2) for streams in arguments.few)
    cases = (*few, Case(arguments.streams, arguments.seconds))
    machine = describe(1) | {"workers": arguments.workers, "tokens_per_s": arguments.rate}
    fronts = [front for front in wanted if front.name not in skipped]
    rounds = Rounds(fronts, cases, arguments)
    with tempfile.TemporaryDirectory() as folder:
        rounds.run(Path(folder))
    rows = rows_of(rounds)
    return Report("front", machine, rows, ratios_of(rows), skipped)


def main() -> int:
    """Measure, print and write. A missed goal is shown but does not fail the run."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.front", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000, help="many (1000)")
    parser.add_argument("--few", type=int, nargs="*", default=[100, 300], help="some (100 300)")
    parser.add_argument("--rate", type=float, default=10.0, help="tokens/s per stream (10)")
    parser.add_argument("--workers", type=int, default=4, help="decode workers (4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of a measurement (4)")
    parser.add_argument(
        "--fronts", nargs="*", help="only these: " + ", ".join(front.name for front in FRONTS)
    )
    run_bench(parser, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
