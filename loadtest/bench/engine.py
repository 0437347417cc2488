"""`python -m loadtest.bench.engine`: prefill and decode speed beside other engines, in one run.

Each engine is a process of its own with its own copy of the model; only one computes at a time, and
they take turns at every measurement, so that whatever else the machine does strikes all alike.
Medians are compared, of the same prompts for all. Prompts of one batch come all at once.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any, Final, NamedTuple

from rich.console import Console

from .engines import BENCH
from .machine import describe
from .model import SHAPES, Shape, model_directory, shape_of_gguf, write_model
from .peers import OURS, PEERS, Peer, PeerLost, RunningPeer
from .report import Ratio, Report
from .roofline import NUMBER_BYTES, decode_work, prefill_work

WARM_STEPS: Final = 2
"""Before each burst, not counted: whoever computed last has filled the caches."""
SETTLE_S: Final = 0.1
"""Between two engines' turns: threads that wait for more work do so in loops for a while."""


class Case(NamedTuple):
    """What is measured: prefill where there are no steps, else decode in bursts of `steps`."""

    batch: int
    context: int
    steps: int

    @property
    def name(self) -> str:
        """In tables and ratios."""
        if not self.steps:
            return f"prefill {self.batch} x {self.context}"
        return f"decode b{self.batch} at {self.context}"


CASES: Final = (
    Case(1, 512, 0),
    Case(1, 2048, 0),
    Case(1, 128, 12),
    Case(8, 128, 10),
    Case(32, 128, 6),
)
MORE_CASES: Final = (Case(1, 1024, 12), Case(8, 1024, 10), Case(32, 1024, 6))
GOALS: Final = {
    ("vllm", "prefill 1 x 512"): 1.0,
    ("vllm", "prefill 1 x 2048"): 1.0,
    ("vllm", "decode b8 at 128"): 1.0,
    ("vllm", "decode b32 at 128"): 1.0,
    ("llama.cpp", "decode b1 at 128"): 1.0,
}
"""How many times a peer's speed ours should be at least."""
Seconds = dict[tuple[str, Case], list[float]]


def measure(
    peers: list[RunningPeer], cases: tuple[Case, ...], repetitions: int, console: Console
) -> tuple[Seconds, dict[str, str]]:
    """Return seconds, of a prompt batch or of a step, by peer and case; and who was lost, and why.

    Raises:
      PeerLost: it was ours.
    """
    seconds: Seconds = {}
    lost: dict[str, str] = {}

    def take(running: RunningPeer, case: Case, is_first: bool, is_last: bool) -> None:
        values = seconds.setdefault((running.peer.name, case), [])
        if not case.steps or is_first:
            prefill_s = running.begin(case.batch, case.context, (repetitions + 1) * most_of(case))
        if case.steps:
            values += running.decode(most_of(case))[WARM_STEPS:]
        elif not is_first:  # the first one warms up
            values.append(prefill_s)
        if not case.steps or is_last:
            running.end()

    for case in cases:
        rounds = repetitions + (0 if case.steps else 1)
        for repetition in range(rounds):
            shift = repetition % len(peers)
            for running in peers[shift:] + peers[:shift]:
                if running.peer.name in lost:
                    continue
                try:
                    take(running, case, repetition == 0, repetition == rounds - 1)
                except PeerLost as error:
                    if running.peer.name == OURS:
                        raise
                    lost[running.peer.name] = str(error)
                sleep(SETTLE_S)
        console.print(f"[dim]{case.name} done[/dim]")
    return {key: values for key, values in seconds.items() if values}, lost


def most_of(case: Case) -> int:
    """Return the steps of a burst with those that are not counted."""
    return WARM_STEPS + case.steps


def rows_of(seconds: Seconds, limits: dict[Case, float]) -> list[dict[str, Any]]:
    """Return one row per case and peer: its speed, ours as a multiple of it, and its share of what
    the machine's limits allow for the dtype."""
    rows = []
    for (name, case), values in seconds.items():
        tokens = case.batch if case.steps else case.batch * case.context
        middle = median(values)
        rows.append(
            {
                "case": case.name,
                "engine": name,
                "tokens_per_s": round(tokens / middle, 1),
                "median_ms": round(middle * 1e3, 2),
                "best_ms": round(min(values) * 1e3, 2),
                "samples": len(values),
                "ours_is_times": round(middle / median(seconds[OURS, case]), 2),
                "percent_of_limits": round(100 * limits[case] / middle),
            }
        )
    return rows


def ratios_of(seconds: Seconds) -> dict[str, Ratio]:
    """Return our speed as a multiple of a peer's wherever that is a goal."""
    return {
        f"{case.name} vs {name}": Ratio(
            median(values) / median(seconds[OURS, case]), GOALS[name, case.name]
        )
        for (name, case), values in seconds.items()
        if (name, case.name) in GOALS
    }


def limits_of(
    shape: Shape, cases: tuple[Case, ...], machine: dict[str, Any], dtype: str
) -> dict[Case, float]:
    """Return the least seconds of each case at the limits that the machine has shown."""
    operations = machine["bf16_gflop_per_s" if dtype == "bfloat16" else "fp32_gflop_per_s"] * 1e9
    limits = {}
    for case in cases:
        work = (
            decode_work(shape, dtype, NUMBER_BYTES[dtype], case.batch, case.context)
            if case.steps
            else prefill_work(shape, NUMBER_BYTES[dtype], case.batch, case.context)
        )
        limits[case] = work.at_limits_s(machine["read_gb_per_s"] * 1e9, operations)
    return limits


def explain(running: RunningPeer, cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Return where the time of our own steps goes, in milliseconds of a step or prompt batch."""
    rows = []
    for case in cases:
        running.parts()
        wall_s = running.begin(case.batch, case.context, case.steps)
        parts = running.parts()
        if case.steps:
            steps = running.decode(case.steps)
            wall_s = sum(steps) / len(steps)
            parts = {name: value / len(steps) for name, value in running.parts().items()}
        running.end()
        if parts:
            named = {f"{name}_ms": round(value * 1e3, 2) for name, value in parts.items()}
            outside = round((wall_s - sum(parts.values())) * 1e3, 2)
            total = {"total_ms": round(wall_s * 1e3, 2)}
            rows.append({"case": case.name} | total | named | {"python_ms": outside})
    return rows


def run(arguments: argparse.Namespace, console: Console) -> Report:
    """Run all peers that can be run."""
    model, shape = _model(arguments)
    machine = describe(arguments.threads)
    wanted = [
        peer
        for peer in PEERS
        if peer.name in (arguments.peers or ()) or (not arguments.peers and peer.is_usual)
        if arguments.gguf is None or peer.reads_gguf
    ]
    skipped = {peer.name: reason for peer in wanted if (reason := peer.why_not())}
    cases = CASES + (MORE_CASES if arguments.full else ())
    with ExitStack() as stack:
        started = [
            stack.enter_context(_start(peer, model, arguments))
            for peer in wanted
            if peer.name not in skipped
        ]
        versions, running = _await_all(started, skipped, console)
        seconds, lost = measure(running, cases, arguments.repetitions, console)
        parts = explain(next(r for r in running if r.peer.name == OURS), cases)
        memory = [
            {"engine": r.peer.name, "peak_mib": r.peak_mib()}
            for r in running
            if r.peer.name not in lost
        ]
    name = arguments.model if arguments.gguf is None else model.name
    described = {"dtype": arguments.dtype, "model": name, "engines": versions}
    limits = limits_of(shape, cases, machine, arguments.dtype)
    kind = "engine" if arguments.gguf is None else "engine-gguf"
    return Report(
        kind if arguments.dtype == "bfloat16" else f"{kind}-{arguments.dtype}",
        machine | described,
        rows_of(seconds, limits),
        ratios_of(seconds),
        skipped | lost,
        (("case", "engine"), "tokens_per_s"),
        {"memory": memory, **({"where_our_time_goes": parts} if parts else {})},
    )


def _model(arguments: argparse.Namespace) -> tuple[Path, Shape]:
    """Return the file that was named and its shape, or a directory, written unless it is there."""
    if arguments.gguf is not None:
        return arguments.gguf, shape_of_gguf(arguments.gguf)
    model, shape = model_directory(arguments.model), SHAPES[arguments.model]
    if not (model / "tokenizer.json").exists():
        write_model(model, shape)
    return model, shape


def _start(peer: Peer, model: Path, arguments: argparse.Namespace) -> RunningPeer:
    logs = BENCH / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{peer.name.replace(' ', '-')}.log"
    return RunningPeer(peer, model, arguments.threads, arguments.dtype, log)


def _await_all(
    started: list[RunningPeer], skipped: dict[str, str], console: Console
) -> tuple[dict[str, str], list[RunningPeer]]:
    """Wait until all have loaded; whoever ends instead is skipped, unless it is ours."""
    versions: dict[str, str] = {}
    for running in started:
        name = running.peer.name
        try:
            versions[name] = running.wait_until_ready()
        except PeerLost as error:
            if name == OURS:
                raise
            skipped[name] = str(error)
            continue
        console.print(f"[dim]{name} is ready: {versions[name]}[/dim]")
    return versions, [running for running in started if running.peer.name in versions]


def main() -> int:
    """Measure, print and write. A goal that is missed is shown, and is no failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="150m")
    parser.add_argument("--gguf", type=Path, help="this file, by the engines that read it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=sorted(NUMBER_BYTES), default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="decode at a context of 1024 as well")
    parser.add_argument(
        "--peers", nargs="*", help="only these and triolet: " + ", ".join(p.name for p in PEERS)
    )
    arguments = parser.parse_args()
    if arguments.peers is not None:
        arguments.peers = [OURS, *arguments.peers]
    console = Console()
    report = run(arguments, console)
    path = report.write(BENCH)
    report.show(console)
    console.print(str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
