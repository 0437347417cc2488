"""`make gpu-lease`: pack wheels, list stages, run them on a GPU machine without a network.

Standard library only, except in the stages' processes. Exit code 0: every stage passed; 1: a stage
failed or was skipped; 2: nothing ran, and a line says what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from .pack import (
    GLIBC,
    LEASE,
    ROOT,
    THERE,
    WHEELS,
    PackError,
    install,
    lacking,
    needs,
    pack,
    read_manifest,
)
from .stages import INSTALL_S, PART_S, PARTS, REHEARSAL_FACTOR, STAGES, STOP_S, Stage, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REFUSED: Final = 2
LAST_LINES: Final = 40
"""Last lines of a failed stage's output in the results; all output is in log.txt."""
MAX_LOG_BYTES: Final = 8 * 2**20
"""Limit of log.txt: output beyond it is only counted, because returned files are limited."""
PROBE_S: Final = 120.0
"""Timeout of the probe: the first import of torch on a new machine reads several GB."""
POLL_S: Final = 0.2
LAST_WORDS_S: Final = 2.0
"""Wait for a stopped stage's remaining output; an orphaned process may hold its pipe open."""
MAX_UNREAD_LINES: Final = 1000
"""Most queued lines of a stage; a stage that writes faster waits."""
FIGURE: Final = "figure "
PROBE: Final = """
import json, torch, triton
has = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__,
    "gpu": torch.cuda.get_device_name() if has else None,
    "gpu_bytes": torch.cuda.get_device_properties(0).total_memory if has else 0,
}))
"""


_WITHOUT_CUDA: Final = "torch {} is built without CUDA: install a CUDA build of torch"


class RefusedError(Exception):
    """The stages cannot run here. The message says what is missing and what to do."""


@dataclass(slots=True)
class Result:
    """The result of a stage.

    Attributes:
      stage: name of the stage.
      state: running, passed, failed or skipped.
      at_most_s: time limit in seconds.
      seconds: duration in seconds.
      reason: why it failed or was skipped.
      figures: its measurements, including those before a failure.
      last_lines: its last output lines, if it failed.
    """

    stage: str
    state: str
    at_most_s: float
    seconds: float = 0.0
    reason: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)


class Results:
    """All results so far, always on disk: results.json, summary.txt, log.txt.

    Args:
      out: the folder.
      machine: description of the machine.
    """

    def __init__(self, out: Path, machine: dict[str, Any]) -> None:
        self._out = out
        self._machine = machine
        self.results: list[Result] = []
        self._log_bytes = 0

    def add(self, result: Result) -> None:
        """Add the result of a stage that starts or is skipped."""
        self.results.append(result)
        self.write()

    def log(self, line: str) -> None:
        """Write a line to log.txt unless it is full."""
        self._log_bytes += len(line)
        if self._log_bytes <= MAX_LOG_BYTES:
            with (self._out / "log.txt").open("a") as file:
                file.write(line)

    def write(self) -> None:
        """Replace results.json and summary.txt atomically."""
        fields = {"machine": self._machine, "stages": [asdict(one) for one in self.results]}
        _replace(self._out / "results.json", json.dumps(fields, indent=1) + "\n")
        _replace(self._out / "summary.txt", self.summary())

    def summary(self) -> str:
        """Return the results as readable text."""
        lines = [f"{name}: {value}" for name, value in self._machine.items()]
        for one in self.results:
            lines += [
                "",
                f"{one.stage}: {one.state} after {one.seconds:.0f} of {one.at_most_s:.0f} s",
            ]
            if one.reason:
                lines.append(f"  {one.reason}")
            for row in one.figures:
                share = row.get("share_of_roofline")
                value = f"{row['value']:,} {row['unit']}"
                value += "" if share is None else f", {100 * share:.0f} % of the roofline"
                lines.append(f"  {row['case']} | {row['engine']} | {value}")
            lines += [f"  > {line}" for line in one.last_lines]
        states = [one.state for one in self.results]
        total = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        return "\n".join([*lines, "", f"stages: {total or 'none'}"]) + "\n"


def run_stages(
    stages: Sequence[Stage],
    command_of: Callable[[Stage], list[str]],
    environment: dict[str, str],
    results: Results,
    deadline: float,
    say: Callable[[str], None],
) -> int:
    """Run stages one after another; return the exit code.

    Args:
      stages: stages in order.
      command_of: returns the command of a stage.
      environment: environment of their processes.
      results: written after each stage and each figure.
      deadline: time of `monotonic` after which nothing runs.
      say: prints a line.
    """
    for stage in stages:
        reason = refusal(stage, 0.0, deadline - monotonic())
        if reason is not None:
            results.add(Result(stage.name, "skipped", stage.most_s, reason=reason))
            say(f"{stage.name}: skipped: {reason}")
            continue
        result = Result(stage.name, "running", stage.most_s)
        results.add(result)
        say(f"{stage.name}: at most {stage.most_s:.0f} s: {stage.what}")
        _run_stage(stage, command_of(stage), environment, result, results)
        results.write()
        say(f"{stage.name}: {result.state} after {result.seconds:.0f} s {result.reason}".rstrip())
    return 0 if all(one.state == "passed" for one in results.results) else 1


def _run_stage(
    stage: Stage,
    command: list[str],
    environment: dict[str, str],
    result: Result,
    results: Results,
) -> None:
    """Run a stage in a separate process group until it ends or times out."""
    began_at = monotonic()
    last: deque[str] = deque(maxlen=LAST_LINES)
    lines: queue.Queue[str | None] = queue.Queue(MAX_UNREAD_LINES)
    results.log(f"=== {stage.name}: {' '.join(command)}\n")
    process = _start(command, environment)
    threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()

    def take(line: str | None) -> None:
        if line is None:
            return
        results.log(line)
        if not _take_figure(line, result, results):
            last.append(line.rstrip())

    is_late = False
    line: str | None = ""
    try:
        while line is not None and not is_late:
            try:
                line = lines.get(timeout=POLL_S)
            except queue.Empty:
                # The stage has ended, but an orphaned process may hold the pipe open.
                if process.poll() is not None:
                    break
            else:
                take(line)
            is_late = monotonic() > began_at + stage.most_s
    finally:
        _stop(process)
    # Output written while it was stopped, for example a traceback.
    give_up_at = monotonic() + LAST_WORDS_S
    with suppress(queue.Empty):
        while line is not None:
            line = lines.get(timeout=max(0.0, give_up_at - monotonic()))
            take(line)
    result.seconds = round(monotonic() - began_at, 1)
    if is_late:
        result.reason = f"stopped at its time limit of {stage.most_s:.0f} s"
    elif process.returncode < 0:
        result.reason = f"killed by {signal.Signals(-process.returncode).name}"
    elif process.returncode:
        result.reason = f"exit code {process.returncode}"
    result.state = "failed" if result.reason else "passed"
    result.last_lines = list(last) if result.reason else []


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _read_lines(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _take_figure(line: str, result: Result, results: Results) -> bool:
    """Record a line if it is a valid figure; two processes writing at once may garble a line."""
    if not line.startswith(FIGURE):
        return False
    try:
        row = json.loads(line.removeprefix(FIGURE))
    except ValueError:
        return False
    if not isinstance(row, dict) or not row.keys() >= {"case", "engine", "value", "unit"}:
        return False
    result.figures.append(row)
    results.write()
    return True


def _stop(process: subprocess.Popen[str]) -> None:
    """Terminate a process group, and kill it if that takes too long."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare(missing: Sequence[str], wheels: Path, site_parent: Path) -> Path | None:
    """Install missing packages into a folder for PYTHONPATH and return it; None if nothing is
    missing.

    Args:
      missing: requirements that this Python does not meet.
      wheels: folder of packed wheels.
      site_parent: parent of the new folder.

    Raises:
      RefusedError: no wheels fit this machine, or they cannot be installed.
    """
    if not missing:
        return None
    again = f'make gpu-lease ARGS="pack --python {python_version()}" where there is a package index'
    try:
        manifest = read_manifest(wheels)
        if manifest is None:
            raise RefusedError(
                f"{len(missing)} packages are missing ({', '.join(missing[:4])} ...) and {wheels} "
                f"has no packed wheels: run {again}, and copy that folder here"
            )
        if manifest["python"] != python_version():
            raise RefusedError(
                f"the wheels are for Python {manifest['python']}, this is {python_version()} "
                f"({sys.executable}): choose another Python with PYTHON=, or run {again}"
            )
        found = platform.libc_ver()[1]
        if _numbers(found) < _numbers(manifest["glibc"]):
            raise RefusedError(
                f"the wheels need glibc {manifest['glibc']}, this machine has "
                f"{found or 'another libc'}: run {again} with --glibc {found}"
            )
        return install(wheels, manifest, site_parent, PROBE_S)
    except PackError as error:
        raise RefusedError(str(error)) from error


def probe(environment: dict[str, str]) -> dict[str, Any]:
    """Return the versions of torch and Triton, and the GPU.

    Raises:
      RefusedError: this machine cannot run the kernels.
    """
    if "+cpu" in version("torch"):  # without importing torch, which takes seconds
        raise RefusedError(_WITHOUT_CUDA.format(version("torch")))
    finished = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROBE_S,
        check=False,
    )
    if finished.returncode:
        raise RefusedError(f"torch cannot be imported: {finished.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    if found["cuda"] is None:
        raise RefusedError(_WITHOUT_CUDA.format(found["torch"]))
    if found["gpu"] is None:
        raise RefusedError(
            f"torch {found['torch']} sees no NVIDIA GPU: run this where nvidia-smi lists one, or "
            "try the stages with tiny models on the CPU with --rehearse"
        )
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise RefusedError("there is no C compiler, which Triton needs: install gcc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise RefusedError(f"{header} is missing, which Triton needs: install Python's headers")
    return found


def python_version() -> str:
    """Return this interpreter's version as wheels name it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    began_at = monotonic()
    stages = [
        stage
        for stage in STAGES
        if (stage.name in options.stages if options.stages else stage.part in options.part)
    ]
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["TRITON_CACHE_DIR"] = str(LEASE / "triton-cache")
    if options.rehearse:
        stages = [replace(one, most_s=REHEARSAL_FACTOR * one.most_s) for one in stages]
        # Several processes share few cores: more threads would only wait for each other.
        environment["OMP_NUM_THREADS"] = "1"
    machine: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "rehearsal": options.rehearse,
    }
    absent = lacking(THERE)
    if absent:
        raise RefusedError(
            f"this Python ({sys.executable}) lacks {', '.join(absent)}: choose another one with "
            "PYTHON=, or install a CUDA build of torch, which brings Triton"
        )
    # Check the GPU first: without one, no wheels are installed.
    if not options.rehearse:
        machine |= probe(environment)
    site = prepare(lacking(needs()), options.wheels, LEASE)
    paths = [str(one) for one in (site, ROOT) if one is not None]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    machine["packages"] = str(site) if site else "this environment's"
    options.out.mkdir(parents=True, exist_ok=True)
    say(f"ready after {monotonic() - began_at:.0f} s; results go to {options.out}")
    results = Results(options.out, machine)

    def command_of(stage: Stage) -> list[str]:
        command = stage.command(sys.executable, rehearse=options.rehearse)
        return [*command, "--out", str(options.out)]

    deadline = began_at + options.seconds
    code = run_stages(stages, command_of, environment, results, deadline, say)
    say(results.summary())
    return code


def listed() -> str:
    """Return a list of stages with their time limits and results."""
    lines = []
    for part in PARTS:
        stages = [stage for stage in STAGES if stage.part == part]
        total = INSTALL_S + sum(stage.most_s for stage in stages) + STOP_S
        lines.append(f"--part {part}: at most {total:.0f} of {PART_S:.0f} s, installation included")
        for stage in stages:
            lines.append(f"  {stage.name:<15}{stage.most_s:>4.0f} s  {stage.what}")
            lines.append(f"  {'':<15}{'':>4}    writes: {stage.writes}")
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="gpu-lease", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download wheels for the GPU machine")
    packing.add_argument("--python", default="3.12", help="Python version there (3.12)")
    packing.add_argument("--glibc", default=GLIBC, help=f"minimum glibc there ({GLIBC})")
    packing.add_argument("--wheels", type=Path, default=WHEELS, help="folder (build/gpu-lease/...)")
    commands.add_parser("list", help="show the stages")
    running = commands.add_parser("run", help="run stages on the GPU of this machine")
    running.add_argument("--out", type=Path, required=True, help="folder for the results")
    running.add_argument("--part", type=int, nargs="+", choices=PARTS, default=list(PARTS))
    names = [stage.name for stage in STAGES]
    running.add_argument("--stages", nargs="+", choices=names, default=[], help="only these")
    running.add_argument("--seconds", type=float, help=f"time limit ({PART_S:.0f} a part)")
    running.add_argument("--wheels", type=Path, default=WHEELS, help="folder of packed wheels")
    running.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args(arguments)
    if options.command == "run" and options.seconds is None:
        options.seconds = PART_S * (1 if options.stages else len(options.part))
        options.seconds *= REHEARSAL_FACTOR if options.rehearse else 1.0
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    options = parse(arguments)

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    try:
        if options.command == "list":
            say(listed())
            return 0
        if options.command == "pack":
            pack(options.python, options.glibc, options.wheels, say)
            say(f"{options.wheels}: complete; copy it to the GPU machine with the working tree")
            return 0
        return _run(options, say)
    except (RefusedError, PackError) as error:
        sys.stderr.write(f"gpu-lease: {error}\n")
        return REFUSED


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)


def _numbers(dotted: str) -> list[int]:
    return [int(number) for number in dotted.split(".") if number.isdigit()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
