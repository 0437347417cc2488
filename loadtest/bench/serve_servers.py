"""The servers that `bench.serve` compares: how each is started, whether it can be, how it is ended.

All of them stand side by side with the same model directory; whoever is not asked does nothing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..harness.servers import stop, wait_ready
from .engines import ROOT, python_of, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_DEADLINE_S: Final = 300.0
"""vLLM takes a minute and a half on a machine that does nothing else."""
MAX_NUM_SEQS: Final = "64"
VLLM: Final = "vllm"
LLAMA: Final = "llama.cpp"


@dataclass(frozen=True, slots=True)
class Server:
    """One way to serve the model.

    Attributes:
      name: in tables.
      options: of `triolet serve`, unless it is a peer.
    """

    name: str
    options: tuple[str, ...] = ()

    @property
    def ready_path(self) -> str:
        """What answers 200 once requests are taken."""
        return "/health" if self.name == VLLM else "/health/ready"

    def why_not(self) -> str | None:
        """Return why it cannot run here, or None if it can."""
        if self.name == LLAMA:
            return (
                "its Python package has a server for one stream at a time only; bench-engine "
                "compares what it computes"
            )
        if self.name == VLLM:
            return why_not(VLLM)
        return None

    def command(self, model: Path, port: int, dtype: str) -> list[str]:
        """Return what starts it."""
        if self.name == VLLM:
            return [
                *(str(python_of(VLLM)), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(model), "--served-model-name", model.name, "--dtype", dtype),
                *("--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", MAX_NUM_SEQS),
                *("--max-model-len", "4096", "--no-enable-prefix-caching"),
            ]
        serve = [sys.executable, "-m", "ops.cli", "serve", str(model), "--port", str(port)]
        return [*serve, "--dtype", dtype, "--max-num-seqs", MAX_NUM_SEQS, *self.options]

    def environment(self) -> dict[str, str]:
        """Return what it finds in its environment."""
        if self.name != VLLM:
            return dict(os.environ)
        cores = sorted(os.sched_getaffinity(0))
        outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return outside | {
            "OMP_NUM_THREADS": str(len(cores)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }


SERVERS: Final = (
    Server("triolet"),
    Server("triolet, all cores each", ("--threads", str(len(os.sched_getaffinity(0))))),
    Server(VLLM),
    Server(LLAMA),
)
"""By default prefill and decode share out the cores; with all cores each they take turns."""


@contextmanager
def started(server: Server, model: Path, dtype: str, logs: Path) -> Iterator[Running]:
    """Start a server and end it at the end; whether it is ready is another question."""
    log = logs / f"serve-{server.name.replace(' ', '-').replace(',', '')}.log"
    with socket.socket() as kept, log.open("wb") as output:
        # Bound and never listening: nobody else gets the port.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port: int = kept.getsockname()[1]
        process = subprocess.Popen(
            server.command(model, port, dtype),
            cwd=ROOT,
            env=server.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Running(server, port, process, log)
        finally:
            stop(process)


@dataclass(frozen=True, slots=True)
class Running:
    """A server's process.

    Attributes:
      server: which.
      port: where it answers, or will.
      process: of it.
      log: what it writes.
    """

    server: Server
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self) -> None:
        """Return once it takes requests.

        Raises:
          ServerDidNotStartError: with the end of its log.
        """
        url = f"http://127.0.0.1:{self.port}{self.server.ready_path}"
        wait_ready(self.process, url, self.log, START_DEADLINE_S)
