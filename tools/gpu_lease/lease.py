"""`make gpu-lease`: pack wheels, list stages, run them on a GPU machine without a network.

Standard library only, apart from the stages' own processes. Exit code 0: every stage passed; 1: a
stage failed or did not begin; 2: nothing was run, with a line that says what is missing.
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
"""Of a failed stage's output, kept in the results; all of it is in log.txt."""
MAX_LOG_BYTES: Final = 8 * 2**20
"""What a stage writes beyond that is counted, not kept: files that come back are bounded."""
PROBE_S: Final = 120.0
"""Importing torch for the first time on a machine that has just started reads several GB."""
POLL_S: Final = 0.2
LAST_WORDS_S: Final = 2.0
"""To read what a stopped stage has written; a process that it left behind may hold its pipe."""
MAX_UNREAD_LINES: Final = 1000
"""Of a stage; one that writes faster than they are kept waits."""
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
    """What came of a stage.

    Attributes:
      stage: its name.
      state: running, passed, failed or skipped.
      at_most_s: that it might take.
      seconds: that it took.
      reason: why it failed or did not begin.
      figures: what it measured, also before it failed.
      last_lines: what it wrote last, where it failed.
    """

    stage: str
    state: str
    at_most_s: float
    seconds: float = 0.0
    reason: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)


class Results:
    """Everything known so far, on disk at every moment: results.json, summary.txt, log.txt.

    Args:
      out: the folder.
      machine: what the stages run on.
    """

    def __init__(self, out: Path, machine: dict[str, Any]) -> None:
        self._out = out
        self._machine = machine
        self.results: list[Result] = []
        self._log_bytes = 0

    def add(self, result: Result) -> None:
        """Note a stage that begins, or does not."""
        self.results.append(result)
        self.write()

    def log(self, line: str) -> None:
        """Keep a line of output, while there is room."""
        self._log_bytes += len(line)
        if self._log_bytes <= MAX_LOG_BYTES:
            with (self._out / "log.txt").open("a") as file:
                file.write(line)

    def write(self) -> None:
        """Replace results.json and summary.txt as wholes: a cut leaves the old or the new ones."""
        fields = {"machine": self._machine, "stages": [asdict(one) for one in self.results]}
        _replace(self._out / "results.json", json.dumps(fields, indent=1) + "\n")
        _replace(self._out / "summary.txt", self.summary())

    def summary(self) -> str:
        """Return the results for people."""
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
      stages: in this order.
      command_of: what starts one.
      environment: of their processes.
      results: written after each stage and each figure.
      deadline: of `monotonic`, after which nothing runs any more.
      say: takes a line.
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
    """Run a stage in a process group of its own until it ends or its time does."""
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
                # A process that the stage left behind may hold the pipe: the stage has ended.
                if process.poll() is not None:
                    break
            else:
                take(line)
            is_late = monotonic() > began_at + stage.most_s
    finally:
        _stop(process)
    # What it wrote while it was stopped, its traceback say.
    give_up_at = monotonic() + LAST_WORDS_S
    with suppress(queue.Empty):
        while line is not None:
            line = lines.get(timeout=max(0.0, give_up_at - monotonic()))
            take(line)
    result.seconds = round(monotonic() - began_at, 1)
    if is_late:
        result.reason = f"stopped after {stage.most_s:.0f} s, the most that it may take"
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
    """Keep a line if it is a figure; two processes that write at once may spoil one."""
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
    """End a process and its group: in order, by force if that takes too long."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare(missing: Sequence[str], wheels: Path, site_parent: Path) -> Path | None:
    """Return the folder for PYTHONPATH that holds what this Python lacks; None if it lacks nothing.

    Args:
      missing: requirements that this Python does not meet.
      wheels: the folder that `pack` has filled.
      site_parent: where the folder is made.

    Raises:
      RefusedError: there are no wheels for this machine, or they cannot be installed.
    """
    if not missing:
        return None
    again = f'make gpu-lease ARGS="pack --python {python_version()}" where there is a package index'
    try:
        manifest = read_manifest(wheels)
        if manifest is None:
            raise RefusedError(
                f"{len(missing)} packages are missing ({', '.join(missing[:4])} ...) and {wheels} "
                f"holds no packed wheels: run {again}, and bring that folder along"
            )
        if manifest["python"] != python_version():
            raise RefusedError(
                f"the wheels are for Python {manifest['python']}, this is {python_version()} "
                f"({sys.executable}): name another one with PYTHON=, or run {again}"
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
    """Return what this machine's torch, Triton and GPU are.

    Raises:
      RefusedError: kernels cannot run here.
    """
    if "+cpu" in version("torch"):  # seen without the seconds that importing it takes
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
        # Several processes side by side on few cores: more threads would only wait for each other.
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
            f"this Python ({sys.executable}) lacks {', '.join(absent)}: name another one with "
            "PYTHON=, or install a CUDA build of torch, which brings Triton"
        )
    # The GPU first: where there is none, no wheel is installed.
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
    """Return the stages, how long each may take and what it writes."""
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
    packing.add_argument("--python", default="3.12", help="version there (3.12)")
    packing.add_argument("--glibc", default=GLIBC, help=f"version there, at least ({GLIBC})")
    packing.add_argument("--wheels", type=Path, default=WHEELS, help="folder (build/gpu-lease/...)")
    commands.add_parser("list", help="show the stages")
    running = commands.add_parser("run", help="run stages on the GPU of this machine")
    running.add_argument("--out", type=Path, required=True, help="folder for the results")
    running.add_argument("--part", type=int, nargs="+", choices=PARTS, default=list(PARTS))
    names = [stage.name for stage in STAGES]
    running.add_argument("--stages", nargs="+", choices=names, default=[], help="these alone")
    running.add_argument("--seconds", type=float, help=f"for everything ({PART_S:.0f} a part)")
    running.add_argument("--wheels", type=Path, default=WHEELS, help="folder that pack has filled")
    running.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args(arguments)
    if options.command == "run" and options.seconds is None:
        options.seconds = PART_S * (1 if options.stages else len(options.part))
        options.seconds *= REHEARSAL_FACTOR if options.rehearse else 1.0
    return options


def main(arguments: Sequence[str]) -> int:
    """Do what the command says; return the exit code."""
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
            say(f"{options.wheels}: complete; bring it along with the working tree")
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
