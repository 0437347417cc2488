"""What `bench.interference` measures: Triolet in several arrangements, and vLLM, each as a server
of its own that is started, waited for, watched and stopped by its pid."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..server_process import stop, wait_ready
from .environment import ENVIRONMENTS, python_of, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
START_DEADLINE_S: Final = 240.0
"""vLLM compiles for a minute and a half on its first start."""
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
        return why_not("vllm") if self.is_peer else None

    def command(self, model: Path, port: int) -> list[str]:
        """Return what starts it."""
        if self.is_peer:
            return [
                *(str(python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(model), "--served-model-name", model.name),
                *("--port", str(port), "--host", "127.0.0.1", "--dtype", "bfloat16"),
                *("--max-model-len", "8192", "--max-num-seqs", "16"),
                "--no-enable-prefix-caching",
            ]
        triolet = [sys.executable, "-m", "ops.cli", "serve", str(model)]
        return [*triolet, "--port", str(port), "--dtype", "bfloat16", *self.options]


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


class RunningFleet:
    """A server and its processes.

    Attributes:
      port: where it answers.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port = port
        self._process = process

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process so far, by what it is."""
        spent: dict[str, float] = {}
        for pid in _family(self._process.pid):
            name, seconds = _process_cpu(pid)
            spent[name] = spent.get(name, 0.0) + seconds
        return spent


@contextmanager
def running(arrangement: Arrangement, model: Path, log: Path) -> Iterator[RunningFleet]:
    """Run it and wait until it takes requests.

    Raises:
      ServerDidNotStartError: with the end of its log.
    """
    port = _free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            arrangement.command(model, port),
            cwd=ROOT,
            env=_environment(arrangement),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        path = "/health" if arrangement.is_peer else "/health/ready"
        wait_ready(process, f"http://127.0.0.1:{port}{path}", log, START_DEADLINE_S)
        yield RunningFleet(process, port)
    finally:
        stop(process)


def _environment(arrangement: Arrangement) -> dict[str, str]:
    if not arrangement.is_peer:
        return dict(os.environ)
    cores = sorted(os.sched_getaffinity(0))[:2]
    return os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Compiled code is kept beside the environment: the second start takes half as long.
        "VLLM_CACHE_ROOT": str(ENVIRONMENTS / "vllm" / "cache"),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "ended", 0.0
    roles = [word.decode() for word in words if word in (b"server", b"prefill", b"decode")]
    ticks = int(fields[11]) + int(fields[12])
    return roles[0] if roles else "other", ticks / os.sysconf("SC_CLK_TCK")
