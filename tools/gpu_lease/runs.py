"""Run one stage of `gpu_lease`: `python -m tools.gpu_lease.runs STAGE --out DIR`.

Figures are lines `figure {json}` on stdout, written as soon as they are measured. With `--rehearse`
every stage runs with tiny models on the CPU, to find mistakes before a GPU is rented.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, Final

import torch
import trio

from loadtest.bench.drivers.loop import prompts_of
from loadtest.bench.model import DEMO, SHAPES
from loadtest.bench.serve import ask_together, at_once
from loadtest.harness.servers import running_server
from loadtest.harness.statistics import percentile
from triolet.config import Dtype

from .pack import LEASE, ROOT
from .stages import RUNS
from .work import (
    GREEDY,
    IN_REHEARSAL,
    JOIN_EVERY,
    ON_GPU,
    TOP_P,
    WARM_UP_STEPS,
    Scale,
    decode_ceiling,
    described,
    figure,
    open_engine,
    run_limits,
    run_speed,
    run_staging,
    run_trace,
    time_decode,
    time_prefill,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.harness.streams import Stream

SHOWN_LINES: Final = 60
"""Last bytes shown of each fleet log of a failed stage."""
PEER_PAGE: Final = 256
"""Tokens per block of the peer's cache: its default."""
PEER: Final = "transformers, continuous batching"
ANSWERS: Final = LEASE / "answers.json"
"""Answers of `separate`, with which `together` compares its own."""
WARMED: Final = ("0.5b", "8b", "demo-bfloat16", "demo-float32")
"""Models with different kernels; each is compiled in a separate process."""


def run_compile(scale: Scale, out: Path, stage: str) -> None:
    """Compile kernels in parallel processes, into the cache that later stages read.

    Raises:
      RuntimeError: a process failed; contains the end of its output.
    """
    commands = {f"{name}, first calls": _own(scale, f"warm-{name}", out) for name in WARMED}
    if stage == "compile":
        commands["sm_90, ahead of time"] = [
            sys.executable,
            "-m",
            "tests.engine.gpu.compile_kernels",
        ]
    _all_of(commands, len(commands))


def run_warm(scale: Scale, out: Path, stage: str) -> None:
    """Call every kernel of one layer in each way that later stages use."""
    name = stage.removeprefix("warm-")
    dtype = Dtype.BFLOAT16
    if name.startswith("demo"):
        model, dtype = DEMO, Dtype(name.removeprefix("demo-"))
    else:
        known = scale.sizes["small" if name == "0.5b" else "large"]
        model = described(replace(SHAPES[known], num_layers=1), f"{name}-one-layer")
    engine = open_engine(scale, scale.backends[0], model, dtype)
    brief = replace(scale, steps=JOIN_EVERY, context=min(scale.context, engine.max_model_len // 2))
    for batch in scale.batches:
        for params in (GREEDY, TOP_P):
            time_decode(brief, engine, batch, params, ahead=0, joins=False)
    time_prefill(scale, engine)


def run_kernels(scale: Scale, out: Path, stage: str) -> None:
    """Run the tests that need a GPU, one process for each file.

    Raises:
      RuntimeError: a test failed or none ran.
    """
    files = sorted(str(path.relative_to(ROOT)) for glob in scale.tests for path in ROOT.glob(glob))
    options = ["-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider", "-W", "default"]
    # Only the plugins that the tests use: others on that machine may change the tests.
    for plugin in ("pytest_trio.plugin", "pytest_timeout", "_hypothesis_pytestplugin"):
        options += ["-p", plugin]
    _all_of({file: [sys.executable, "-m", "pytest", *options, file] for file in files}, 4)


def run_peer(scale: Scale, out: Path, stage: str) -> None:
    """Measure transformers' continuous batching on the same model.

    The time of a run with few tokens is subtracted from that of a run with many, so prompts do not
    count.
    """
    from transformers import AutoModelForCausalLM

    size = scale.sizes["small"]
    model: Any = AutoModelForCausalLM.from_pretrained(
        written(size), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(scale.device)
    few, many = WARM_UP_STEPS, WARM_UP_STEPS + scale.steps
    for batch in scale.batches:
        prompts = prompts_of(batch, scale.context)
        times = [_seconds_of(scale, model, prompts, tokens) for tokens in (few, few, many)]
        if times[2] <= times[1]:
            sys.stdout.write(f"b{batch}: no speed: {many} tokens took no longer than {few}\n")
            continue
        speed = batch * (many - few) / (times[2] - times[1])
        peaks = scale.peaks
        ceiling = decode_ceiling(SHAPES[size], batch, scale.context, peaks)
        figure(f"{size} decode b{batch} at {scale.context}", PEER, speed, "tokens/s", ceiling)


def _seconds_of(scale: Scale, model: Any, prompts: list[list[int]], tokens: int) -> float:  # noqa: ANN401
    """Return the seconds that `tokens` tokens for each prompt take."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1}
    config = GenerationConfig.from_dict(settings)
    # Only the cache that the rows need: by default it takes all free memory.
    blocks = len(prompts) * (-(-(scale.context + tokens) // PEER_PAGE) + 1)
    batching = ContinuousBatchingConfig(
        page_size=PEER_PAGE, num_blocks=blocks, max_batch_tokens=scale.chunk
    )
    scale.finish()
    began_at = perf_counter()
    with torch.no_grad():  # inference mode is per thread, and it generates in another
        results = model.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=batching
        )
    scale.finish()
    elapsed_s = perf_counter() - began_at
    got = [len(result.generated_tokens) for result in results.values()]
    assert got == [tokens] * len(prompts), "a request ended early"
    return elapsed_s


def run_fleet(scale: Scale, out: Path, stage: str) -> None:
    """Stream the same requests over HTTP from a fleet twice, and compare the answers."""
    size = scale.sizes["small"]
    prompt_tokens, answer_tokens = scale.stream_tokens
    model = written(size)
    options = [
        str(model),
        *scale.serve,
        "--dtype",
        "bfloat16",
        "--set",
        "worker.engine.prefix_cache=false",
    ]
    options += ["--max-num-seqs", str(scale.streams), "--set", "link.progress_timeout_s=20"]
    options += ["--prefill", "1" if stage == "separate" else "0"]
    if scale.device == "cuda":
        options += ["--kv-pool", "4GiB", "--max-model-len", "8192"]
    arrivals = at_once(scale.streams, prompt_tokens, answer_tokens)
    heard: list[list[str]] = []
    began_at = perf_counter()
    with running_server(options, LEASE / f"{stage}.log") as url:
        figure(f"{stage}: ready after", "triolet", perf_counter() - began_at, "s")
        for number in (1, 2):
            answers = trio.run(ask_together, url, model.name, arrivals, 1, {})
            case = f"{stage}, {scale.streams} streams, round {number}"
            _show_round(case, answers, scale.streams * answer_tokens)
            heard.append([text_of(answer) for answer in answers])
    differing = _num_different(*heard)
    figure(f"{stage}: streams of round 2 that differ", "triolet", differing, f"of {scale.streams}")
    if stage == "separate":
        ANSWERS.write_text(json.dumps(heard[0]))
    elif ANSWERS.exists():
        differing = _num_different(json.loads(ANSWERS.read_text()), heard[0])
        figure("streams that differ from `separate`", "triolet", differing, f"of {scale.streams}")


def _show_round(case: str, answers: Sequence[Stream], tokens: int) -> None:
    began_at = min(answer.asked_at for answer in answers)
    ended_at = max(answer.times[-1] for answer in answers)
    figure(case, "triolet", tokens / (ended_at - began_at), "tokens/s")
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    ttfts_s = [answer.times[0] - answer.asked_at for answer in answers]
    for name, values in (("TTFT", ttfts_s), ("gap", gaps_s)):
        for percent in (50, 99):
            figure(
                f"{case}: {name} p{percent}", "triolet", 1000 * percentile(values, percent), "ms"
            )


def text_of(answer: Stream) -> str:
    """Return the text of a stream."""
    return "".join(choice["text"] for event in answer.events() for choice in event["choices"])


def _num_different(expected: Sequence[str], found: Sequence[str]) -> int:
    return sum(one != other for one, other in zip(expected, found, strict=True))


def run_campaign(scale: Scale, out: Path, stage: str) -> None:
    """Run a loadtest campaign against a fleet of the demo model; the campaign decides pass or
    fail."""
    command = [sys.executable, "-m", f"loadtest.{stage}", "--out", str(LEASE / stage)]
    serve = list(scale.serve)
    if stage == "kills":
        command += ["--requests", str(scale.requests), "--times", "1", "--dtype", "bfloat16"]
        command += ["--faults", "calm", "decode-kill", "prefill-kill"]
    else:
        command += ["--count", str(scale.cancels)]
        serve += ["--dtype", "bfloat16"]
    if scale.device == "cuda":
        serve += ["--kv-pool", "512MiB", "--set", "worker.engine.gpu.fixed_batch=true"]
    sys.stdout.write(_output_of([*command, "--", *serve]))
    figure(f"{stage} under load", "triolet", 1.0, "1: passed")


def _own(scale: Scale, stage: str, out: Path) -> list[str]:
    rehearse = ["--rehearse"] if scale.device == "cpu" else []
    return [sys.executable, "-m", RUNS, stage, "--out", str(out), *rehearse]


def _all_of(commands: dict[str, list[str]], at_once: int) -> None:
    """Run processes in parallel, and write a figure as each ends.

    Raises:
      RuntimeError: a process failed.
    """
    failed: list[str] = []

    def one(name: str) -> None:
        began_at = perf_counter()
        try:
            spoken = _output_of(commands[name])
        except RuntimeError as error:
            failed.append(name)
            sys.stdout.write(f"{error}\n")
            spoken = str(error)
        for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", spoken[-300:]):
            figure(name, "pytest", int(count), what)
        figure(name, "process", perf_counter() - began_at, "s")

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, commands))
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def _output_of(command: list[str]) -> str:
    """Return a process's stdout.

    Raises:
      RuntimeError: the process failed; contains the end of its output.
    """
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if finished.returncode:
        words = f"{finished.stdout[-4000:]}{finished.stderr[-4000:]}"
        raise RuntimeError(f"{' '.join(command[1:4])}: exit code {finished.returncode}\n{words}")
    return finished.stdout


RUN: Final[dict[str, Callable[[Scale, Path, str], None]]] = {
    "compile": run_compile,
    "kernels": run_kernels,
    "staging": run_staging,
    "limits": run_limits,
    "compile-speed": run_compile,
    "small": run_speed,
    "large": run_speed,
    "trace": run_trace,
    "peer": run_peer,
    "compile-fleets": run_compile,
    "separate": run_fleet,
    "together": run_fleet,
    "kills": run_campaign,
    "cancels": run_campaign,
    **{f"warm-{name}": run_warm for name in WARMED},
}


def main() -> int:
    """Run one stage. The exit code reports failure, and stderr the reason."""
    # So that a stage that is stopped at its time limit still stops its servers.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=sorted(RUN))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    LEASE.mkdir(parents=True, exist_ok=True)
    began_at = time()
    try:
        scale = IN_REHEARSAL if arguments.rehearse else ON_GPU
        RUN[arguments.stage](scale, arguments.out, arguments.stage)
    except BaseException:
        _show_logs(began_at)
        raise
    return 0


def _show_logs(since: float) -> None:
    """Write the ends of the fleets' logs to stdout, because their files are not returned."""
    for path in sorted(LEASE.rglob("*.log")):
        if path.stat().st_mtime >= since:
            lines = path.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            sys.stdout.write("\n".join([f"--- {path}", *lines, ""]))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
