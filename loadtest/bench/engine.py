"""`python -m loadtest.bench.engine`: compare prefill and decode speed with other engines.

Each engine is a separate process with its own copy of the model. Only one computes at a time, and
they take turns at every measurement, so that other load on the machine affects all of them. Medians
are compared, with the same prompts for all. All prompts of a batch arrive at once.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import sleep
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from engine.native.library import load_library

from ..harness.lines import LineProcess
from ..harness.progress import progress
from ..harness.report import BENCH, Ratio, Report, describe, run_bench
from .engines import ROOT, python_of, why_not
from .limits import Limits, dtype_here, measure_limits, torch_is_fast_in, why_slow
from .model import SHAPES, Shape, shape_of_gguf, written_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from .model import Shape


NUMBER_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step, for its theoretical minimum time.

    Attributes:
      weight_bytes: bytes of weights, read once.
      kv_bytes: bytes of the context's KV, read once.
      products: operations of products with weights; a multiplication and its addition are two.
      attention: operations of attention, counted alike.
    """

    weight_bytes: float
    kv_bytes: float
    products: float
    attention: float

    def at_limits_s(self, bytes_per_s: float, operations_per_s: float) -> float:
        """Return the minimum duration in seconds."""
        moving = (self.weight_bytes + self.kv_bytes) / bytes_per_s
        return max(moving, (self.products + self.attention) / operations_per_s)


def decode_work(shape: Shape, dtype: str, weight_bytes: float, batch: int, context: int) -> Work:
    """Return the work of a step of `batch` sequences of `context` tokens.

    Args:
      shape: shape of the model.
      dtype: dtype of KV.
      weight_bytes: size of one weight.
      batch: number of sequences.
      context: tokens of each, including the new one.
    """
    weights = layer_weights(shape) + head_weights(shape)
    kv_bytes = batch * context * shape.kv_numbers_per_token * NUMBER_BYTES[dtype]
    return Work(
        weights * weight_bytes, kv_bytes, 2.0 * batch * weights, batch * _attention(shape, context)
    )


def prefill_work(shape: Shape, weight_bytes: float, batch: int, context: int) -> Work:
    """Return the work of prompts: all tokens in the layers, the last ones in the output layer."""
    tokens = batch * context
    layers, head = layer_weights(shape), head_weights(shape)
    return Work(
        (layers + head) * weight_bytes,
        0.0,
        2.0 * (tokens * layers + batch * head),
        tokens * _attention(shape, context / 2),
    )


def layer_weights(shape: Shape) -> float:
    """Return the number of weights in the layers' matrices."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    attention = shape.hidden_size * shape.head_dim * (heads + shape.num_heads)
    return shape.num_layers * (attention + 3.0 * shape.hidden_size * shape.intermediate_size)


def head_weights(shape: Shape) -> float:
    """Return the number of weights in the output layer."""
    return float(shape.vocab_size * shape.hidden_size)


def _attention(shape: Shape, seen: float) -> float:
    """Return the operations of attention for one token over a context."""
    return 4.0 * seen * shape.num_layers * shape.num_heads * shape.head_dim


OURS: Final = "triolet"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare.

    Attributes:
      name: its name in tables.
      module: its driver (see drivers/loop.py).
      arguments: arguments besides model, threads and dtype.
      environment: Python environment that runs it (see engines.py), or None for this one.
      package: package that this environment must have.
      is_usual: whether it runs by default.
      reads_gguf: whether it can read GGUF files.
      uses_torch: whether it multiplies with torch.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: str | None = None
    package: str = "torch"
    is_usual: bool = True
    reads_gguf: bool = False
    uses_torch: bool = False

    @property
    def python(self) -> Path:
        """Path of the interpreter."""
        if self.environment is None:
            return Path(sys.executable)
        return python_of(self.environment)

    def why_not(self) -> str | None:
        """Return why it cannot run here, or None if it can."""
        if self.environment is not None:
            return why_not(self.environment)
        return None if find_spec(self.package) else f"{self.package} is not installed"

    def why_slow(self, dtype: str, is_fast: Callable[[str], bool] = torch_is_fast_in) -> str | None:
        """Return why it cannot run at speed on this CPU, or None if it can."""
        return why_slow(dtype, is_fast) if self.uses_torch else None


PEERS: Final = (
    Peer(OURS, "loadtest.bench.drivers.triolet", reads_gguf=True),
    Peer(
        "triolet dtype",
        "loadtest.bench.drivers.triolet",
        ("--weights", "dtype"),
        is_usual=False,
        reads_gguf=True,
    ),
    Peer("triolet sdpa", "loadtest.bench.drivers.triolet", ("--backend", "sdpa"), uses_torch=True),
    Peer("vllm", "loadtest.bench.drivers.vllm", environment="vllm", uses_torch=True),
    Peer("llama.cpp", "loadtest.bench.drivers.llama", environment="llama", reads_gguf=True),
    Peer(
        "llama.cpp q8",
        "loadtest.bench.drivers.llama",
        ("--file", "q8_0"),
        environment="llama",
        is_usual=False,
    ),
    Peer("openvino", "loadtest.bench.drivers.openvino", environment="openvino"),
    Peer(
        "transformers",
        "loadtest.bench.drivers.transformers",
        package="transformers",
        uses_torch=True,
    ),
)


class PeerLost(Exception):
    """An engine's process exited unexpectedly."""


class RunningPeer(LineProcess):
    """An engine's process; a context manager. Its stderr goes to a log.

    Args:
      peer: the engine.
      model: directory or GGUF file.
      threads: threads of its kernels.
      dtype: bfloat16 or float32.
      log: log file to write.
    """

    def __init__(self, peer: Peer, model: Path, threads: int, dtype: str, log: Path) -> None:
        self.peer = peer
        self._log = log
        options = ["--threads", str(threads), "--dtype", dtype, *peer.arguments]
        with log.open("w") as file:
            super().__init__([str(peer.python), "-m", peer.module, str(model), *options], log=file)

    def wait_until_ready(self) -> str:
        """Wait until the model is loaded and return the engine's version.

        Raises:
          PeerLost: the process exited instead.
        """
        return str(self.answer()["version"])

    def begin(self, batch: int, context: int, most_steps: int) -> float:
        """Compute a batch of prompts and return the seconds until each had a token."""
        asked = {"batch": batch, "context": context, "most_steps": most_steps}
        return float(self.ask(begin=asked)["prefill_s"])

    def decode(self, steps: int) -> list[float]:
        """Run decode steps of all sequences and return the seconds of each."""
        seconds: list[float] = self.ask(steps=steps)["step_s"]
        return seconds

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of its steps since the last call. Empty on the first
        call, and for engines that do not report parts."""
        seconds: dict[str, float] = self.ask(parts=True)["parts"]
        return seconds

    def peak_mib(self) -> int:
        """Return the peak memory of its process, including shared pages. Linux only."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) // 1024

    def end(self) -> None:
        """Drop its sequences."""
        self.ask(end=True)

    def tell(self, **request: object) -> None:
        """See LineProcess.

        Raises:
          PeerLost: the process exited.
        """
        try:
            super().tell(**request)
        except EOFError:
            raise self._lost() from None

    def answer(self) -> dict[str, Any]:
        """See LineProcess.

        Raises:
          PeerLost: the process exited.
        """
        try:
            return super().answer()
        except EOFError:
            raise self._lost() from None

    def _lost(self) -> PeerLost:
        return PeerLost(f"it exited; see {self._log.relative_to(ROOT)}")


WARM_STEPS: Final = 2
"""Warm-up before each burst, not counted: the previous engine has filled the caches."""
SETTLE_S: Final = 0.1
"""Seconds between two engines' turns: idle threads spin for a while."""


class Case(NamedTuple):
    """A measurement: prefill if `steps` is 0, else decode in bursts of `steps`."""

    batch: int
    context: int
    steps: int

    @property
    def name(self) -> str:
        """Name in tables and ratios."""
        if not self.steps:
            return f"prefill {self.batch} x {self.context}"
        return f"decode b{self.batch} at {self.context}"

    @property
    def num_tokens(self) -> int:
        """Tokens of a step, or of all prompts."""
        return self.batch if self.steps else self.batch * self.context


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
"""Minimum speed of Triolet, as a multiple of the other engine's."""
Seconds = dict[tuple[str, Case], list[float]]


def measure(
    peers: list[RunningPeer], cases: tuple[Case, ...], repetitions: int
) -> tuple[Seconds, dict[str, str]]:
    """Return the seconds of prompt batches or steps by engine and case, and the engines that were
    lost with the reason.

    Raises:
      PeerLost: Triolet's own engine was lost.
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
            speeds = [
                f"{running.peer.name} {case.num_tokens / median(values):,.0f}"
                for running in peers
                if (values := seconds.get((running.peer.name, case)))
            ]
            shown = ", ".join(speeds) or "warmed up"
            progress(f"{case.name}, round {repetition + 1} of {rounds}, tokens/s: {shown}")
    return {key: values for key, values in seconds.items() if values}, lost


def most_of(case: Case) -> int:
    """Return the steps of a burst including the warm-up."""
    return WARM_STEPS + case.steps


def rows_of(seconds: Seconds, limits: dict[Case, float]) -> list[dict[str, Any]]:
    """Return one row per case and engine: its speed, Triolet's as a multiple of it, and its share
    of the speed that the machine's limits allow for the dtype."""
    rows = []
    for (name, case), values in seconds.items():
        middle = median(values)
        rows.append(
            {
                "case": case.name,
                "engine": name,
                "tokens_per_s": round(case.num_tokens / middle, 1),
                "median_ms": round(middle * 1e3, 2),
                "best_ms": round(min(values) * 1e3, 2),
                "samples": len(values),
                "ours_is_times": round(middle / median(seconds[OURS, case]), 2),
                "percent_of_limits": round(100 * limits[case] / middle),
            }
        )
    return rows


def ratios_of(seconds: Seconds) -> dict[str, Ratio]:
    """Return Triolet's speed as a multiple of an engine's, for all goals."""
    return {
        f"{case.name} vs {name}": Ratio(
            median(values) / median(seconds[OURS, case]), GOALS[name, case.name]
        )
        for (name, case), values in seconds.items()
        if (name, case.name) in GOALS
    }


def limits_of(
    shape: Shape, cases: tuple[Case, ...], machine: Limits, dtype: str, weight_bytes: float
) -> dict[Case, float]:
    """Return the minimum seconds of each case at the machine's measured limits.

    Products of quantised weights may be faster than the machine's limit, which is that of `dtype`.
    """
    limits = {}
    for case in cases:
        work = (
            decode_work(shape, dtype, weight_bytes, case.batch, case.context)
            if case.steps
            else prefill_work(shape, weight_bytes, case.batch, case.context)
        )
        limits[case] = work.at_limits_s(machine.read_gb_per_s * 1e9, machine.gflop_per_s * 1e9)
    return limits


def explain(running: RunningPeer, cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Return the time of each part of Triolet's steps, in milliseconds per step or prompt batch."""
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


def run(arguments: argparse.Namespace) -> Report:
    """Measure all engines that can run here."""
    model, shape = _model(arguments)
    machine = describe(arguments.threads)
    limits = measure_limits(arguments.threads, arguments.dtype, load_library())
    progress(f"limits: {limits}")
    wanted = [
        peer
        for peer in PEERS
        if peer.name in (OURS, *(arguments.peers or ()))
        or (arguments.peers is None and peer.is_usual)
        if arguments.gguf is None or peer.reads_gguf
    ]
    skipped = {
        peer.name: reason
        for peer in wanted
        if (reason := peer.why_not() or peer.why_slow(arguments.dtype))
    }
    for name, reason in skipped.items():
        progress(f"{name} skipped: {reason}")
    cases = CASES + (MORE_CASES if arguments.full else ())
    with ExitStack() as stack:
        started = [
            stack.enter_context(_start(peer, model, arguments))
            for peer in wanted
            if peer.name not in skipped
        ]
        versions, running = _await_all(started, skipped)
        seconds, lost = measure(running, cases, arguments.repetitions)
        parts = explain(next(r for r in running if r.peer.name == OURS), cases)
        memory = [
            {"engine": r.peer.name, "peak_mib": r.peak_mib()}
            for r in running
            if r.peer.name not in lost
        ]
    name = arguments.model if arguments.gguf is None else model.name
    described = {"dtype": arguments.dtype, "model": name, "engines": versions}
    described |= {"limits": limits._asdict()}
    kind, weight_bytes = "engine", float(NUMBER_BYTES[arguments.dtype])
    if arguments.gguf is not None:
        kind = "engine-gguf"
        weight_bytes = model.stat().st_size / (layer_weights(shape) + head_weights(shape))
    least_s = limits_of(shape, cases, limits, arguments.dtype, weight_bytes)
    return Report(
        kind if arguments.dtype == "bfloat16" else f"{kind}-{arguments.dtype}",
        machine | described,
        rows_of(seconds, least_s),
        ratios_of(seconds),
        skipped | lost,
        {"memory": memory, **({"where_our_time_goes": parts} if parts else {})},
        f"{kind}; limits: {limits}",
    )


def _model(arguments: argparse.Namespace) -> tuple[Path, Shape]:
    """Return the given GGUF file, or a random model (written if missing), and its shape."""
    if arguments.gguf is not None:
        return arguments.gguf, shape_of_gguf(arguments.gguf)
    return written_model(arguments.model), SHAPES[arguments.model]


def _start(peer: Peer, model: Path, arguments: argparse.Namespace) -> RunningPeer:
    logs = BENCH / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{peer.name.replace(' ', '-')}.log"
    return RunningPeer(peer, model, arguments.threads, arguments.dtype, log)


def _await_all(
    started: list[RunningPeer], skipped: dict[str, str]
) -> tuple[dict[str, str], list[RunningPeer]]:
    """Wait until all engines have loaded. One that exits instead is skipped, except Triolet's."""
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
        progress(f"{name} is ready: {versions[name]}")
    return versions, [running for running in started if running.peer.name in versions]


def main() -> int:
    """Measure, print and write. A missed goal is shown but does not fail the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="150m")
    parser.add_argument("--gguf", type=Path, help="GGUF file to use, with the engines that read it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=sorted(NUMBER_BYTES), default=dtype_here())
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="also decode at a context of 1024")
    parser.add_argument(
        "--peers", nargs="*", help="only triolet and these: " + ", ".join(p.name for p in PEERS)
    )
    run_bench(parser, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
