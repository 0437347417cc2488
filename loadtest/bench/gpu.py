"""`python -m loadtest.bench.gpu`: the ten-minute plan on one NVIDIA GPU (docs/gpu.md).

Without a GPU it says so and ends. Models have random weights and are written on the spot. Exit code
1 if a stage failed; a figure below its floor is printed as such and fails nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.console import Console

from . import gpu_work
from .engines import BENCH, ROOT
from .gpu_roofline import Peaks, decode_ceiling, peaks_of, prefill_ceiling
from .gpu_stages import STAGES, TOTAL_S, Stage, refusal
from .machine import describe
from .model import SHAPES, model_directory, write_model
from .report import Ratio, Report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.load import Engine

SIZES: Final = {"small": "0.5b", "large": "8b"}
PEER_FLOOR: Final = 1.0
PEER: Final = "transformers, continuous batching"
GPU_OPTIONS: Final = (
    *("--device", "cuda", "--dtype", "bfloat16"),
    *("--backend", "triton", "--kv-pool", "512MiB"),
)


@dataclass(slots=True)
class Findings:
    """What the stages found out.

    Attributes:
      rows: measurements.
      speeds: tokens per second by (model, batch): our best and the peer's.
      skipped: what did not run, and why.
      failed: stages that broke.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    speeds: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, case: str, engine: str, value: float, unit: str, ceiling: float | None) -> None:
        """Note a figure, and its share of what the card could do."""
        share = None if ceiling is None else round(value / ceiling, 3)
        row = {"case": case, "engine": engine, "value": round(value, 1), "unit": unit}
        self.rows.append(row | {"share_of_roofline": share})

    def ratios(self) -> dict[str, Ratio]:
        """Return our best speed as a multiple of the peer's, case by case."""
        return {
            f"{model} decode b{batch} vs {PEER}": Ratio(speeds["ours"] / speeds["peer"], PEER_FLOOR)
            for (model, batch), speeds in self.speeds.items()
            if speeds.keys() == {"ours", "peer"}
        }


def backends() -> dict[str, str | None]:
    """Return each backend, and why it cannot run."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    return {"triton": None, "flash": None if has_flash else "flash-attn is not installed"}


def run_kernels(findings: Findings, stage: Stage) -> None:
    """Run the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/engine/gpu", "tests/gpu"]
    _call(command, stage.most_s)
    findings.add("tests of kernels and parity", "pytest", 1.0, "passed", None)


def run_limits(findings: Findings, stage: Stage) -> None:
    """Measure the card, and which sizes of batch agree bit for bit."""
    peaks = peaks_of(torch.cuda.get_device_name())
    speed, flops = gpu_work.copy_speed(), gpu_work.product_speed()
    findings.add(
        "memory copy", "torch", speed, "GB/s", None if peaks is None else peaks.bytes_per_s / 1e9
    )
    findings.add(
        "product 8192", "cuBLAS", flops, "TFLOP/s", None if peaks is None else peaks.flops / 1e12
    )
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for name, (outputs, inputs) in {"qkv": (6144, 4096), "down": (4096, 14_336)}.items():
        agreeing = gpu_work.sizes_that_agree(outputs, inputs, sizes)
        case = f"{name} of 8b: sizes with the bits of {sizes[-1]}: {agreeing}"
        findings.add(case, "cuBLAS", len(agreeing), f"of {len(sizes)}", None)


def run_model(findings: Findings, stage: Stage) -> None:
    """Measure one model with each backend."""
    size = SIZES[stage.name]
    shape, peaks = SHAPES[size], peaks_of(torch.cuda.get_device_name())
    model = _model(size)
    for backend, reason in backends().items():
        if reason is not None:
            findings.skipped[f"{size} {backend}"] = reason
            continue
        engine = gpu_work.open_engine(model, backend, gpu_work.BATCHES)
        for batch in gpu_work.BATCHES:
            timing = gpu_work.time_decode(engine, batch)
            case = f"{size} decode b{batch} at {gpu_work.CONTEXT}"
            ceiling = (
                None if peaks is None else decode_ceiling(shape, batch, gpu_work.CONTEXT, peaks)
            )
            ours = batch / timing.ahead_s
            findings.add(case, f"{backend}, launched ahead", ours, "tokens/s", ceiling)
            findings.add(
                case, f"{backend}, each read", batch / timing.read_each_s, "tokens/s", ceiling
            )
            speeds = findings.speeds.setdefault((size, batch), {})
            # What the workers do today is what is compared with the peer.
            speeds["ours"] = max(speeds.get("ours", 0.0), batch / timing.read_each_s)
        _prefill_and_shipping(findings, size, backend, engine, peaks)
        del engine
        torch.cuda.empty_cache()


def _prefill_and_shipping(
    findings: Findings, size: str, backend: str, engine: Engine, peaks: Peaks | None
) -> None:
    speed = gpu_work.time_prefill(engine)
    ceiling = None if peaks is None else prefill_ceiling(SHAPES[size], peaks)
    findings.add(f"{size} prefill", backend, speed, "tokens/s", ceiling)
    out, into = gpu_work.time_shipping(engine)
    findings.add(f"{size} KV out of the pool", backend, out, "GB/s", None)
    findings.add(f"{size} KV into the pool", backend, into, "GB/s", None)


def run_peer(findings: Findings, stage: Stage) -> None:
    """Measure transformers' continuous batching in a process of its own."""
    size = SIZES[stage.name.split()[0]]
    batches = [str(batch) for batch in gpu_work.BATCHES]
    command = [sys.executable, "-m", "loadtest.bench.peer_batching", str(_model(size))]
    command += ["--context", str(gpu_work.CONTEXT), "--batches", *batches]
    spoken = _call(command, stage.most_s).strip().splitlines()[-1]
    peaks = peaks_of(torch.cuda.get_device_name())
    for name, speed in json.loads(spoken).items():
        batch = int(name)
        case = f"{size} decode b{batch} at {gpu_work.CONTEXT}"
        ceiling = (
            None if peaks is None else decode_ceiling(SHAPES[size], batch, gpu_work.CONTEXT, peaks)
        )
        findings.add(case, PEER, speed, "tokens/s", ceiling)
        findings.speeds.setdefault((size, batch), {})["peer"] = speed


def run_kills(findings: Findings, stage: Stage) -> None:
    """Kill workers of a fleet on the GPU, and compare every answer."""
    command = [sys.executable, "-m", "loadtest.kills", "--requests", "80", "--times", "1"]
    command += ["--dtype", "bfloat16", "--faults", "calm", "decode-kill", "prefill-kill"]
    _call([*command, "--", *GPU_OPTIONS, "--fixed-batch"], stage.most_s)
    findings.add("kills under load", "triton", 1.0, "passed", None)


RUN: Final[dict[str, Callable[[Findings, Stage], None]]] = {
    "kernels": run_kernels,
    "limits": run_limits,
    "small": run_model,
    "small peer": run_peer,
    "large": run_model,
    "large peer": run_peer,
    "kills": run_kills,
}


def _model(size: str) -> Path:
    model = model_directory(size)
    if not (model / "tokenizer.json").exists():
        write_model(model, SHAPES[size])
    return model


def _call(command: list[str], most_s: float) -> str:
    finished = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=most_s, check=False
    )
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])}: {finished.stdout[-2000:]}{finished.stderr}")
    return finished.stdout


def run(wanted: list[str], total_s: float, console: Console) -> Findings:
    """Run the stages that fit into the time."""
    findings = Findings()
    began_at = perf_counter()
    for stage in STAGES:
        if wanted and stage.name not in wanted:
            continue
        reason = refusal(stage, perf_counter() - began_at, total_s)
        if reason is not None:
            findings.skipped[stage.name] = reason
            continue
        stage_began_at = perf_counter()
        console.print(f"{stage.name}: {stage.what}")
        try:
            RUN[stage.name](findings, stage)
        except Exception as error:  # noqa: BLE001 - the other stages' figures are wanted all the same
            findings.failed.append(stage.name)
            console.print(f"[red]{stage.name} failed: {error}[/red]", markup=True, highlight=False)
        console.print(f"[dim]{perf_counter() - stage_began_at:.0f} s[/dim]")
    return findings


def main() -> int:
    """Run, print, write build/bench/gpu.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", nargs="+", choices=[stage.name for stage in STAGES], default=[])
    parser.add_argument("--seconds", type=float, default=TOTAL_S)
    arguments = parser.parse_args()
    console = Console()
    if not torch.cuda.is_available():
        console.print("torch sees no NVIDIA GPU here: nothing was measured (docs/gpu.md)")
        return 0
    findings = run(arguments.stages, arguments.seconds, console)
    machine = describe(torch.get_num_threads()) | {
        "gpu": torch.cuda.get_device_name(),
        "gpu_bytes": torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
        "failed": findings.failed,
    }
    if findings.rows:
        report = Report(
            "gpu",
            machine,
            findings.rows,
            findings.ratios(),
            findings.skipped,
            (("case", "engine"), "value"),
        )
        path = report.write(BENCH)
        report.show(console)
        console.print(str(path))
    return 1 if findings.failed else 0


if __name__ == "__main__":
    sys.exit(main())
