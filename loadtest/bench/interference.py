"""`python -m loadtest.bench.interference`: what long prompts cost streams that are running.

Eight streams run while prompts of 2,000 tokens arrive, over HTTP, for each arrangement of the same
two cores: prefill and decode one core each, or one process that mixes chunks of prompts into its
steps on both. What a client sees is measured: gaps between tokens, time to first token. A stream
that ends is followed by another at once, so that their ages, on which their steps depend, are the
same at any time. Each arrangement is measured idle first. Arrangements take turns; figures are
medians over rounds.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..harness.progress import announce, progress
from ..harness.report import BENCH, Ratio, Report, describe, finish, line_of
from ..harness.servers import TAKES_ALL, TRIOLET, ServerProcess, cpu_s_of, running
from ..harness.statistics import percentile
from ..harness.streams import COMPLETIONS, Clients, completion, post
from .engines import VLLM_READY, vllm_command, vllm_environment, why_not
from .limits import why_slow
from .model import SAID, prompt_of, written_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..harness.streams import Stream

NUM_STREAMS: Final = 8
STREAM_PROMPT: Final = 32
STREAM_TOKENS: Final = 256
"""A stream's answer; the mean of 19,366 real conversations (Azure, 2023) is 211."""
ROUNDS: Final = 3
LONG_PROMPT: Final = 2_000
ANSWER_TOKENS: Final = 8
WARM_UP_S: Final = 2.0
DRAIN_S: Final = 20.0
"""Prompts that arrived late in the measured time may still get their first token."""
SEED: Final = 6
ROLES: Final = ("server", "prefill", "decode", "other")
"""Whose share of a core is told; vLLM's processes are `other`."""
MAX_GROWTH: Final = 1.5
MAX_SHARE: Final = 0.5


DTYPE: Final = "bfloat16"
UNBOUNDED_TOKENS: Final = 8192
PATIENT_STEP_S: Final = 60.0
"""A step's target that no step reaches: chunks are as large as was asked for."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Who computes what, where.

    Attributes:
      name: in tables.
      options: of `triolet serve`; none for vLLM.
      is_peer: vLLM.
    """

    name: str
    options: tuple[str, ...] = ()
    is_peer: bool = False

    def why_not(self) -> str | None:
        """Return why it cannot be measured here, or None."""
        return why_not("vllm") or why_slow(DTYPE) if self.is_peer else None

    def command(self, model: Path) -> list[str]:
        """Return what starts it."""
        if self.is_peer:
            return vllm_command(model, DTYPE, max_model_len=8192, max_num_seqs=16)
        return [*TRIOLET, "serve", str(model), "--dtype", DTYPE, *TAKES_ALL, *self.options]

    def started(self, model: Path, log: Path) -> ServerProcess:
        """Return its process, not begun yet."""
        if self.is_peer:
            return ServerProcess(self.command(model), log, vllm_environment(2), VLLM_READY)
        return ServerProcess(self.command(model), log)


def _co_located(chunk: int) -> tuple[str, ...]:
    return (
        *(
            "--prefill",
            "0",
            "--set",
            f"worker.engine.prompt_chunk_tokens={chunk}",
            "--set",
            f"worker.engine.target_step_s={PATIENT_STEP_S}",
        ),
        *("--set", f"worker.engine.max_num_batched_tokens={max(chunk, 512)}"),
    )


# Co-located, decode computes on all cores: there is nothing to keep apart.
DISAGGREGATED: Final = Arrangement("disaggregated", ("--threads", "1", "--set", "fleet.pin=auto"))
CO_LOCATED: Final = {
    64: Arrangement("co-located 64", _co_located(64)),
    256: Arrangement("co-located 256", _co_located(256)),
}
UNCHUNKED: Final = Arrangement("co-located, unchunked", _co_located(UNBOUNDED_TOKENS))
VLLM: Final = Arrangement("vllm", is_peer=True)
ALL: Final = (DISAGGREGATED, *CO_LOCATED.values(), UNCHUNKED, VLLM)


class Load(NamedTuple):
    """What is asked of one model.

    Attributes:
      prompts_per_s: long prompts that arrive.
      seconds: measured under load, and idle, in each round.
      max_gap_s: the objective for every gap of a stream.
      max_ttft_s: the objective for a long prompt.
    """

    prompts_per_s: float
    seconds: float
    max_gap_s: float
    max_ttft_s: float


LOADS: Final = {
    "15m": Load(1.25, 12.0, 0.025, 1.0),
    "150m": Load(0.1, 30.0, 0.100, 8.0),
}


class Seen(NamedTuple):
    """What clients saw of one phase.

    Attributes:
      gaps_s: between tokens of the running streams.
      good_tokens: in those seconds of a stream that had no gap beyond the objective.
      ttfts_s: of the long prompts.
      unanswered: long prompts without a first token.
      seconds: that it lasted.
      cpu: cores that each process used.
    """

    gaps_s: list[float]
    good_tokens: int
    ttfts_s: list[float]
    unanswered: int
    seconds: float
    cpu: dict[str, float]


class Runners:
    """Streams of which as many as at the beginning always run.

    Args:
      clients: of the server.
      model: what it calls the model.
      numbers: for prompts.
      tokens: of an answer; the first ones are shorter, each by another share.
    """

    def __init__(self, clients: Clients, model: str, numbers: random.Random, tokens: int) -> None:
        self._clients, self._model = clients, model
        self._numbers, self._tokens = numbers, tokens
        self.all: list[Stream] = []
        for place in range(NUM_STREAMS):
            self._ask(max(tokens * (place + 1) // NUM_STREAMS, 1))

    def _ask(self, tokens: int) -> None:
        request = request_of(self._model, prompt_of(self._numbers, STREAM_PROMPT), tokens)
        self.all.append(self._clients.begin(request, self._follow))

    def _follow(self, ended: Stream) -> None:
        ended.check()
        self._ask(self._tokens)


def request_of(model: str, prompt: Sequence[int], tokens: int) -> bytes:
    """Return the request of a stream of one word."""
    return post(COMPLETIONS, completion(prompt, tokens, model=model, stream=True, **SAID))


def observe(
    fleet: ServerProcess, model: str, load: Load, prompts_per_s: float, tokens: int
) -> Seen:
    """Run streams of so many tokens, and the prompts if there are any, and watch."""
    numbers = random.Random(SEED)
    clients = Clients(fleet.url)
    try:
        runners = Runners(clients, model, random.Random(SEED + 1), tokens)
        began_at = _warm_up(clients, runners.all)
        before = cpu_s_by_role(fleet.pid)
        prompts = _arrive(clients, model, numbers, prompts_per_s, began_at, load.seconds)
        clients.read_until(began_at + load.seconds)
        ended_at, after = monotonic(), cpu_s_by_role(fleet.pid)
        _drain(clients, prompts)
    finally:
        clients.close()
    windows = [[t for t in r.times if began_at <= t <= ended_at] for r in runners.all]
    ttfts = [prompt.ttft_s for prompt in prompts]
    return Seen(
        [late - early for times in windows for early, late in pairwise(times)],
        sum(_good_tokens(times, load.max_gap_s) for times in windows),
        [ttft for ttft in ttfts if ttft is not None],
        sum(ttft is None for ttft in ttfts),
        ended_at - began_at,
        {name: (after[name] - before.get(name, 0.0)) / (ended_at - began_at) for name in after},
    )


def cpu_s_by_role(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a process and its descendants so far, by role."""
    spent: dict[str, float] = {}
    for one in _family(pid):
        name, seconds = _process_cpu(one)
        spent[name] = spent.get(name, 0.0) + seconds
    return spent


def _family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    family = [pid]
    for parent in family:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                family += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # it has just ended
    return family


def _process_cpu(pid: int) -> tuple[str, float]:
    """Return what a process is, and the CPU seconds that it has spent."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        spent_s = cpu_s_of(pid)
    except OSError:
        return "ended", 0.0
    roles = [word.decode() for word in words if word in (b"server", b"prefill", b"decode")]
    return roles[0] if roles else "other", spent_s


def _warm_up(clients: Clients, runners: Sequence[Stream]) -> float:
    """Return when the first streams have been running for a while."""
    first = tuple(runners)
    while not all(runner.times for runner in first):
        clients.read(1.0)
    clients.read_until(monotonic() + WARM_UP_S)
    return monotonic()


def _arrive(
    clients: Clients,
    model: str,
    numbers: random.Random,
    prompts_per_s: float,
    began_at: float,
    seconds: float,
) -> list[Stream]:
    """Ask the long prompts at their times: evenly, with half a gap of play to either side."""
    prompts = []
    for index in range(int(prompts_per_s * seconds)):
        arrives_at = began_at + (index + numbers.uniform(0.25, 0.75)) / prompts_per_s
        clients.read_until(arrives_at)
        request = request_of(model, prompt_of(numbers, LONG_PROMPT), ANSWER_TOKENS)
        prompts.append(clients.begin(request))
    return prompts


def _drain(clients: Clients, prompts: Sequence[Stream]) -> None:
    give_up_at = monotonic() + DRAIN_S
    while not all(prompt.times for prompt in prompts) and monotonic() < give_up_at:
        clients.read(0.1)


def _good_tokens(times: list[float], max_gap_s: float) -> int:
    """Count the tokens of those seconds in which a stream kept its objective."""
    per_second: dict[int, int] = {}
    for early, late in pairwise(times):
        second = int(late - times[0])
        kept = per_second.get(second, 0)
        per_second[second] = kept + 1 if late - early <= max_gap_s and kept >= 0 else -1
    return sum(count for count in per_second.values() if count > 0)


def row_of(model: str, name: str, load: Load, seen: Seen, idle: Seen) -> dict[str, Any]:
    """Return one row of the table, times in milliseconds."""
    idle_p50_s = median(idle.gaps_s)
    answered_in_time = sum(ttft <= load.max_ttft_s for ttft in seen.ttfts_s)
    num_prompts = len(seen.ttfts_s) + seen.unanswered
    row: dict[str, Any] = {
        "model": model,
        "mode": name,
        "itl_p50": median(seen.gaps_s) * 1e3,
        "itl_p99": percentile(seen.gaps_s, 99) * 1e3,
        "itl_p99.9": percentile(seen.gaps_s, 99.9) * 1e3,
        "itl_max": max(seen.gaps_s) * 1e3,
        "stalled_%": 100 * sum(g > 2 * idle_p50_s for g in seen.gaps_s) / len(seen.gaps_s),
        "tokens_per_s": len(seen.gaps_s) / seen.seconds,
        "goodput": seen.good_tokens / seen.seconds,
        "ttft_p50": median(seen.ttfts_s) * 1e3 if seen.ttfts_s else float("nan"),
        "late_prompts_%": 100 * (1 - answered_in_time / num_prompts) if num_prompts else 0.0,
        **{f"cpu_{role}": seen.cpu.get(role, 0.0) for role in ROLES},
    }
    return {key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}


def middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of one mode's rounds."""
    return {
        key: round(median(row[key] for row in rows), 2) if isinstance(value, float) else value
        for key, value in rows[0].items()
    }


def measure(
    model: str,
    load: Load,
    arrangements: Sequence[Arrangement],
    rounds: int,
    tokens: int,
) -> list[dict[str, Any]]:
    """Measure each arrangement with one model, idle and loaded."""
    logs = BENCH / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    directory = written_model(model)
    seen: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for arrangement in arrangements if number % 2 == 0 else arrangements[::-1]:
            name = arrangement.name
            log = logs / f"interference-{model}-{name.replace(' ', '-')}.log"
            with running(arrangement.started(directory, log)) as fleet:
                idle = observe(fleet, directory.name, load, 0.0, tokens)
                loaded = observe(fleet, directory.name, load, load.prompts_per_s, tokens)
            for mode, of in ((f"{name}, idle", idle), (name, loaded)):
                row = row_of(model, mode, load, of, idle)
                seen.setdefault(mode, []).append(row)
                progress(f"round {number + 1}: {line_of(row)}")
    modes = [mode for a in arrangements for mode in (f"{a.name}, idle", a.name)]
    return [middle(seen[mode]) for mode in modes]


def ratios_of(rows: Sequence[dict[str, Any]]) -> dict[str, Ratio]:
    """Return what the goals speak of, model by model."""
    ratios: dict[str, Ratio] = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {row["mode"]: row for row in rows if row["model"] == model}
        ours, idle = of.get(DISAGGREGATED.name), of.get(f"{DISAGGREGATED.name}, idle")
        chunked = [of[a.name] for a in CO_LOCATED.values() if a.name in of]
        if ours is None or idle is None:
            continue
        ratios[f"{model}: ITL p99 / idle p99"] = Ratio(
            ours["itl_p99"] / idle["itl_p99"], ceiling=MAX_GROWTH
        )
        if chunked:
            best = min(chunked, key=lambda row: row["itl_p99"])
            ratios[f"{model}: ITL p99 / best co-located chunked ({best['mode']})"] = Ratio(
                ours["itl_p99"] / best["itl_p99"], ceiling=MAX_SHARE
            )
            # With a core each, a prompt has half of the machine: only the small model is held to
            # the mode that has all of it.
            limit = {"15m": 1.0}.get(model, 2.0)
            ratios[f"{model}: TTFT p50 / the same mode"] = Ratio(
                ours["ttft_p50"] / best["ttft_p50"], ceiling=limit
            )
        if VLLM.name in of:
            good = max(of[VLLM.name]["goodput"], 0.1)
            ratios[f"{model}: goodput / vllm"] = Ratio(ours["goodput"] / good, floor=1.0)
    return ratios


def run(arguments: argparse.Namespace) -> Report:
    """Measure everything that was asked for."""
    machine = describe(2) | {"rounds": arguments.rounds, "answer_tokens": arguments.answers}
    wanted = [a for a in ALL if not arguments.modes or a.name in arguments.modes]
    skipped = {a.name: reason for a in wanted if (reason := a.why_not())}
    able = [a for a in wanted if a.name not in skipped]
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        load = LOADS[model]
        if arguments.seconds:
            load = load._replace(seconds=arguments.seconds)
        progress(
            f"{model}: {load.prompts_per_s} prompts of {LONG_PROMPT} tokens per second, "
            f"{NUM_STREAMS} streams of {arguments.answers} tokens; objectives: gaps <= "
            f"{load.max_gap_s * 1e3:.0f} ms, first token <= {load.max_ttft_s:.0f} s; goodput "
            "counts tokens of seconds without a longer gap"
        )
        rows += measure(model, load, able, arguments.rounds, arguments.answers)
    objectives = {model: LOADS[model]._asdict() for model in arguments.models}
    return Report(
        "interference",
        machine | {"loads": objectives},
        rows,
        ratios_of(rows),
        skipped,
        (("model", "mode"), "itl_p99"),
    )


def main() -> int:
    """Measure, print, write; exit code 0 unless something broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=sorted(LOADS), default=["15m", "150m"])
    parser.add_argument("--modes", nargs="*", help="only these: " + "; ".join(a.name for a in ALL))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"medians of these ({ROUNDS})")
    parser.add_argument("--seconds", type=float, help="idle, and under load; by default 12 and 30")
    parser.add_argument(
        "--answers",
        type=int,
        default=STREAM_TOKENS,
        help=f"tokens of a stream, which another follows ({STREAM_TOKENS})",
    )
    arguments = parser.parse_args()
    announce(__doc__)
    finish(run(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
