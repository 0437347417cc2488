"""`python -m loadtest.bench.serve`: compare whole servers over HTTP with one model.

Measures what an API user sees: tokens per second, time to first token, gaps between tokens. Each
round starts 1, 8 and 32 streams together; then the requests of a real trace are sent at their
times, whether or not the server keeps up. Servers take turns, one at a time. Reports medians over
rounds and percentiles over all streams. Clients and servers share this machine's cores.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ..harness.progress import announce, progress
from ..harness.report import BENCH, Ratio, Report, describe, finish, line_of
from ..harness.servers import TAKES_ALL, TRIOLET, ServerDidNotStartError, ServerProcess
from ..harness.statistics import percentile
from ..harness.streams import COMPLETIONS, Clients, StreamBrokenError, completion, post
from ..overload.arrivals import Arrival, Scale, Sizes, fitted, poisson, read_rows, requests
from .engines import VLLM_READY, vllm_command, vllm_environment, why_not
from .limits import why_slow
from .model import SAID, SHAPES, prompt_of, written_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..harness.streams import Stream

TRACES: Final = Path(__file__).parents[3] / "shared" / "data" / "traces"
TRACE: Final = TRACES / "azure2023_conv.csv"
STREAMS: Final = (1, 8, 32)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
SETTLE_S: Final = 2.0
"""Seconds between two servers, because idle threads of the previous one may spin for a while."""
DIVISOR: Final = 4.0
"""Divisor of the trace's lengths: a conversation then takes about a second with the 150M model on
two cores."""
MAX_TOKENS: Final = 4000
LIKE: Final = Arrival(0.0, 1, 1)
MADE_UP: Final = Sizes(prompt=1020.0, output=129.0, spread=0.85, most=100_000)
"""Medians and width (of the logarithm) of the conversations in Azure's trace of 2023."""
WHOLE: Final = b'"finish_reason":"length"'
FLOOR: Final = 1.0


CORES: Final = len(os.sched_getaffinity(0))
MAX_NUM_SEQS: Final = 64
VLLM: Final = "vllm"


@dataclass(frozen=True, slots=True)
class Server:
    """A server to compare.

    Attributes:
      name: its name in tables.
      options: options of `triolet serve`, for Triolet's own.
    """

    name: str
    options: tuple[str, ...] = ()

    def why_not(self, dtype: str) -> str | None:
        """Return why it cannot run here, or None if it can."""
        if self.name == VLLM:
            return why_not(VLLM) or why_slow(dtype)
        return None

    def process(self, model: Path, dtype: str, logs: Path) -> ServerProcess:
        """Return its process, not started yet."""
        log = logs / f"serve-{self.name.replace(' ', '-').replace(',', '')}.log"
        if self.name == VLLM:
            command = vllm_command(model, dtype, max_model_len=4096, max_num_seqs=MAX_NUM_SEQS)
            return ServerProcess(command, log, vllm_environment(CORES), VLLM_READY)
        serve = [*TRIOLET, "serve", str(model), "--dtype", dtype]
        return ServerProcess(
            [*serve, "--max-num-seqs", str(MAX_NUM_SEQS), *TAKES_ALL, *self.options], log
        )


SERVERS: Final = (
    Server("triolet"),
    Server("triolet, all cores each", ("--threads", str(CORES))),
    Server(VLLM),
)
"""By default prefill and decode divide the cores. With all cores each, they take turns."""


def made_up(count: int) -> list[tuple[float, int, int]]:
    """Return arrival times and lengths of requests: log-normal and independent."""
    numbers = random.Random(9)
    moments = islice(poisson(numbers, 1.0, math.inf), count)
    return [
        (one.at_s, one.prompt_tokens, one.output_tokens)
        for one in requests(moments, numbers, LIKE, MADE_UP)
    ]


def shape_of(path: Path, scale: Scale, divisor: float) -> tuple[str, list[Arrival]]:
    """Return name and requests of a trace, or of a synthetic one if there is no file.

    Real traces come from models a thousand times larger on larger machines. Lengths and times are
    divided by one number each: proportions, bursts and lulls stay, and this machine can keep up.
    """
    name, rows = "synthetic, no trace here", made_up(scale.most_requests)
    if path.exists():
        name, rows = path.stem, read_rows(path)
    return name, fitted(rows, scale, 1 / divisor, 1 / divisor)


def lengths_in_words(arrivals: Sequence[Arrival]) -> str:
    """Return a description of the requests."""
    prompts = sorted(arrival.prompt_tokens for arrival in arrivals)
    outputs = sorted(arrival.output_tokens for arrival in arrivals)
    middle = len(arrivals) // 2
    return (
        f"{len(arrivals)} requests in {arrivals[-1].at_s:.0f} s, tokens in {prompts[middle]} "
        f"(median) to {prompts[-1]}, out {outputs[middle]} to {outputs[-1]}"
    )


def at_once(count: int, prompt_tokens: int, output_tokens: int) -> list[Arrival]:
    """Return requests that arrive at the same time."""
    return [Arrival(0.0, prompt_tokens, output_tokens)] * count


async def ask_together(
    url: str,
    model: str,
    arrivals: Sequence[Arrival],
    seed: int,
    more: Mapping[str, object] = SAID,
) -> list[Stream]:
    """Send each request at its time, independent of earlier ones (an open loop).

    Args:
      url: address of the server.
      model: name of the model there.
      arrivals: lengths and times of the requests.
      seed: random seed of the prompts.
      more: fields of every request; by default an answer repeats one word.

    Returns:
      The answers in the order of `arrivals`.

    Raises:
      StreamBrokenError: in a group: an answer is an error or has the wrong length.
    """
    numbers = random.Random(seed)
    asked = [
        post(
            COMPLETIONS,
            completion(
                prompt_of(numbers, one.prompt_tokens),
                one.output_tokens,
                model=model,
                stream=True,
                **more,
            ),
            {"connection": "close"},
        )
        for one in arrivals
    ]
    answers: dict[int, Stream] = {}

    async def one(clients: Clients, index: int, at: float) -> None:
        await trio.sleep_until(at)
        answer = answers[index] = await clients.ask(asked[index])
        answer.check()
        if not answer.times or WHOLE not in answer.body.replace(b": ", b":"):
            raise StreamBrokenError(f"it has the wrong length: {answer.body[-400:]!r}")

    async with Clients(url).reading() as clients, trio.open_nursery() as nursery:
        began_at = trio.current_time()
        for index, arrival in enumerate(arrivals):
            nursery.start_soon(one, clients, index, began_at + arrival.at_s)
    return [answers[index] for index in range(len(arrivals))]


class Running(NamedTuple):
    """A server and its process."""

    server: Server
    process: ServerProcess


@dataclass
class Load:
    """A load and its results.

    Attributes:
      name: its name in tables.
      arrivals: requests of one round.
      speeds: tokens per second of each round, by server.
      answers: answers of all rounds, by server.
    """

    name: str
    arrivals: Sequence[Arrival]
    speeds: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[str, list[Stream]] = field(default_factory=dict)

    def measure(self, running: Running, model: str, seed: int) -> None:
        """Run one round on one server."""
        answers = trio.run(ask_together, running.process.url, model, self.arrivals, seed)
        began_at = min(answer.asked_at for answer in answers)
        ended_at = max(answer.times[-1] for answer in answers)
        tokens = sum(arrival.output_tokens for arrival in self.arrivals)
        speeds = self.speeds.setdefault(running.server.name, [])
        speeds.append(tokens / (ended_at - began_at))
        self.answers.setdefault(running.server.name, []).extend(answers)

    def row(self, server: str) -> dict[str, Any]:
        """Return the figures of one server."""
        answers = self.answers[server]
        ttft_s = [answer.times[0] - answer.asked_at for answer in answers]
        gaps_s = [gap for answer in answers for gap in answer.gaps_s] or [0.0]
        return {
            "load": self.name,
            "server": server,
            "tokens_per_s": round(median(self.speeds[server]), 1),
            "ttft_p50_ms": round(1000 * percentile(ttft_s, 50), 1),
            "ttft_p99_ms": round(1000 * percentile(ttft_s, 99), 1),
            "itl_p50_ms": round(1000 * percentile(gaps_s, 50), 1),
            "itl_p99_ms": round(1000 * percentile(gaps_s, 99), 1),
            "streams": len(answers),
        }


def ratios_of(rows: Sequence[dict[str, Any]], ours: str, peers: Sequence[str]) -> dict[str, Ratio]:
    """Return Triolet's figures as multiples of the peers'. More is better."""
    by_place = {(row["load"], row["server"]): row for row in rows}
    ratios = {}
    for (load, server), theirs in by_place.items():
        if server not in peers:
            continue
        row = by_place[load, ours]
        speed = row["tokens_per_s"] / theirs["tokens_per_s"]
        ratios[f"{load}: tokens/s vs {server}"] = Ratio(speed, FLOOR)
        for figure in ("ttft_p50_ms", "itl_p99_ms"):
            if row[figure]:
                name = f"{load}: {figure.removesuffix('_ms').replace('_', ' ')} of {server} vs ours"
                ratios[name] = Ratio(theirs[figure] / row[figure])
    return ratios


def loads_of(arguments: argparse.Namespace) -> list[Load]:
    """Return the loads of the command line."""
    loads = [
        Load(f"{count} at once", at_once(count, PROMPT_TOKENS, OUTPUT_TOKENS)) for count in STREAMS
    ]
    scale = Scale(arguments.rate, arguments.seconds, LIKE, Sizes(most=MAX_TOKENS // 2))
    if arguments.rate * arguments.seconds >= 1:
        name, arrivals = shape_of(arguments.trace, scale, arguments.divisor)
        loads.append(Load(name, arrivals))
        progress(f"{name}, lengths / {arguments.divisor:g}: {lengths_in_words(arrivals)}")
    return loads


def run(arguments: argparse.Namespace) -> Report:
    """Start every server that can run here, and measure them."""
    model = written_model(arguments.model)
    logs = BENCH / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    machine = describe(CORES) | {"dtype": arguments.dtype, "model": arguments.model}
    wanted = [s for s in SERVERS if not arguments.servers or s.name in arguments.servers]
    skipped = {
        server.name: reason for server in wanted if (reason := server.why_not(arguments.dtype))
    }
    loads = loads_of(arguments)
    with ExitStack() as stack:
        running = [
            Running(server, server.process(model, arguments.dtype, logs))
            for server in wanted
            if server.name not in skipped
        ]
        for one in running:
            stack.enter_context(closing(one.process))
            one.process.start()
        ready = [one for one in running if _is_ready(one, skipped)]
        measure(loads, ready, model.name, arguments.rounds)
    rows = [load.row(one.server.name) for load in loads for one in ready]
    names = [one.server.name for one in ready]
    ours, peers = names[0], [name for name in names if not name.startswith("triolet")]
    return Report("serve", machine, rows, ratios_of(rows, ours, peers), skipped)


def _is_ready(one: Running, skipped: dict[str, str]) -> bool:
    try:
        one.process.wait_ready()
    except ServerDidNotStartError as error:
        if one.server.name.startswith("triolet"):
            raise
        skipped[one.server.name] = str(error).splitlines()[0]
        progress(str(error))
        return False
    progress(f"{one.server.name} is ready")
    return True


def measure(loads: Sequence[Load], ready: list[Running], model: str, rounds: int) -> None:
    """Run all loads on all servers in turns. The trace is long and runs once."""
    warm_up = Load("warm-up", at_once(4, PROMPT_TOKENS, 8))
    for one in ready:
        warm_up.measure(one, model, seed=0)
    for load in loads:
        is_trace = load.arrivals[-1].at_s > 0
        for number in range(1 if is_trace else rounds):
            turn = ready[number % len(ready) :] + ready[: number % len(ready)]
            for one in turn:
                time.sleep(SETTLE_S)
                load.measure(one, model, seed=1 + number)
        for one in ready:
            progress(line_of(load.row(one.server.name)))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.serve", description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="150m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of streams (2)")
    parser.add_argument("--trace", type=Path, default=TRACE, help="CSV or Mooncake JSONL file")
    parser.add_argument("--divisor", type=float, default=DIVISOR, help="divisor of lengths (4)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s of the trace (1)")
    parser.add_argument("--seconds", type=float, default=20.0, help="trace seconds; 0: skip (20)")
    parser.add_argument("--servers", nargs="*", help="only these: " + "; ".join(_names()))
    return parser.parse_args(arguments)


def _names() -> list[str]:
    return [server.name for server in SERVERS]


def main() -> int:
    """Measure, print and write. A missed goal is shown but does not fail the run."""
    arguments = parse(sys.argv[1:])
    announce(__doc__)
    finish(run(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
