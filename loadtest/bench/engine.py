"""`python -m loadtest.bench.engine`: prefill and decode speed beside other engines, in one run.

Each engine is a process of its own with its own copy of the model; only one computes at a time, and
they take turns at every measurement, so that whatever else the machine does strikes all alike.
Medians are compared, of the same prompts for all. Prompts of one batch come all at once.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console

from .machine import describe
from .model import SHAPES, model_directory, write_model
from .peers import ENVIRONMENTS, PEERS, Peer, RunningPeer
from .report import Ratio, Report

if TYPE_CHECKING:
    from pathlib import Path

OURS: Final = "triolet native"
FLOOR: Final = 1.0


class Case(NamedTuple):
    """What is measured: prefill where there are no steps, else decode."""

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
    Case(1, 128, 24),
    Case(8, 128, 24),
    Case(32, 128, 16),
    Case(1, 1024, 24),
    Case(8, 1024, 16),
    Case(32, 1024, 8),
)
QUICK: Final = (Case(1, 512, 0), Case(1, 128, 16), Case(8, 128, 16), Case(32, 128, 8))


def measure(
    peers: list[RunningPeer], cases: tuple[Case, ...], repetitions: int, console: Console
) -> dict[tuple[str, Case], list[float]]:
    """Return seconds, of a prompt batch or of a step, by peer and case."""
    seconds: dict[tuple[str, Case], list[float]] = {}
    for case in cases:
        for repetition in range(repetitions + 1):
            turn = peers[repetition % len(peers) :] + peers[: repetition % len(peers)]
            for running in turn:
                prefill_s, step_s = running.run(*case)
                if repetition:  # the first one warms up
                    values = step_s if case.steps else [prefill_s]
                    seconds.setdefault((running.peer.name, case), []).extend(values)
        console.print(f"[dim]{case.name} done[/dim]")
    return seconds


def rows_of(seconds: dict[tuple[str, Case], list[float]]) -> list[dict[str, Any]]:
    """Return one row per case and peer."""
    rows = []
    for (name, case), values in seconds.items():
        tokens = case.batch if case.steps else case.batch * case.context
        rows.append(
            {
                "case": case.name,
                "engine": name,
                "tokens_per_s": round(tokens / median(values), 1),
                "median_ms": round(median(values) * 1e3, 2),
                "best_ms": round(min(values) * 1e3, 2),
                "samples": len(values),
            }
        )
    return rows


def ratios_of(seconds: dict[tuple[str, Case], list[float]]) -> dict[str, Ratio]:
    """Return our speed as a multiple of each peer's, case by case."""
    return {
        f"{case.name} vs {name}": Ratio(median(values) / median(seconds[OURS, case]), FLOOR)
        for (name, case), values in seconds.items()
        if name != OURS
    }


def run(arguments: argparse.Namespace, console: Console) -> Report:
    """Run all peers that can be run."""
    model = model_directory(arguments.model)
    if not (model / "tokenizer.json").exists():
        write_model(model, SHAPES[arguments.model])
    logs = ENVIRONMENTS / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    machine = describe(arguments.threads)
    wanted = [peer for peer in PEERS if not arguments.peers or peer.name in arguments.peers]
    skipped = {peer.name: reason for peer in wanted if (reason := peer.why_not())}
    with ExitStack() as stack:
        running = []
        for peer in wanted:
            if peer.name in skipped:
                continue
            running.append(stack.enter_context(_start(peer, model, arguments, logs)))
            running[-1].wait_until_ready()
        cases = QUICK if arguments.quick else CASES
        seconds = measure(running, cases, arguments.repetitions, console)
    name = "engine" if arguments.dtype == "bfloat16" else f"engine-{arguments.dtype}"
    return Report(
        name,
        machine | {"dtype": arguments.dtype, "model": arguments.model},
        rows_of(seconds),
        ratios_of(seconds),
        skipped,
        (("case", "engine"), "tokens_per_s"),
    )


def _start(peer: Peer, model: Path, arguments: argparse.Namespace, logs: Path) -> RunningPeer:
    log = logs / f"{peer.name.replace(' ', '-')}.log"
    return RunningPeer(peer, model, arguments.threads, arguments.dtype, log)


def main() -> int:
    """Measure, print, write; exit code 1 if a ratio is below its floor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="150m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    parser.add_argument(
        "--peers", nargs="*", help="only these: " + ", ".join(p.name for p in PEERS)
    )
    console = Console()
    report = run(parser.parse_args(), console)
    path = report.write(ENVIRONMENTS)
    report.show(console)
    console.print(str(path))
    return 0 if all(ratio.is_met for ratio in report.ratios.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
