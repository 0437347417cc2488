"""The fronts that are compared: how each is started, and what its process costs.

Knows command lines and /proc; asks nothing of a server but whether it answers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Self

from .environment import install, python_of

if TYPE_CHECKING:
    from types import TracebackType

ROOT: Final = Path(__file__).parents[2]
DEMO: Final = ROOT / "triolet" / "demo"
PEER_PACKAGES: Final = (
    "uvicorn",
    "fastapi",
    "starlette",
    "httptools",
    "uvloop",
    "h11",
    "pyzmq",
    "msgspec",
    "tokenizers",
)
ENVIRONMENT: Final = "front"
START_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 20.0
POLL_S: Final = 0.05
SETTLE_S: Final = 0.5
"""After the port is open: to meet the workers."""
CPU_CLOCK: Final = 2
"""CPUCLOCK_SCHED: what the scheduler counts, in nanoseconds."""
PATIENT: Final = ("--set", "link.peer_timeout_s=30", "--set", "link.lease_ttl_s=60")
"""A machine that lets the workers' process stand still for a moment ends no stream."""


@dataclass(frozen=True, slots=True)
class Front:
    """One server.

    Attributes:
      name: in tables.
      peer: arguments of peer_front, or none for Triolet's own server.
      options: more of Triolet's own.
    """

    name: str
    peer: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def why_not(self) -> str | None:
        """Return why it cannot run here, or None if it can; installs what is missing."""
        return install(ENVIRONMENT, PEER_PACKAGES) if self.peer else None

    def command(self, sockets: Path, workers: int, port: int) -> list[str]:
        """Return what starts it."""
        if self.peer:
            places = [str(DEMO / "tokenizer.json"), str(sockets), str(port)]
            module = ["-m", "loadtest.bench.peer_front"]
            return [
                str(python_of(ENVIRONMENT)), *module, *self.peer, *places, "--workers", str(workers)
            ]  # fmt: skip
        decodes = ",".join(f"ipc://{sockets}/decode-{number}" for number in range(workers))
        return [
            *(sys.executable, "-m", "ops.cli", "server", str(DEMO)),
            *("--set", f"server.port={port}", "--set", "process.log_level=warning"),
            *("--set", f"server.prefill_addresses=ipc://{sockets}/prefill-0"),
            *("--set", f"server.decode_addresses={decodes}"),
            *PATIENT,
            *self.options,
        ]


OURS: Final = Front("triolet")
FASTAPI: Final = Front("uvicorn (h11) + FastAPI", ("fastapi", "h11", "asyncio"))
FRONTS: Final = (
    OURS,
    FASTAPI,
    Front("uvicorn (httptools, uvloop) + Starlette", ("starlette", "httptools", "uvloop")),
)


class OnCore:
    """Processes started within it run on one core; a context manager.

    Args:
      core: which; None where there is no choice.
    """

    def __init__(self, core: int | None) -> None:
        self._core = core
        self._own = os.sched_getaffinity(0)

    def __enter__(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._own)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process has used.

    Attributes:
      cpu_s: of all its threads, in seconds.
      resident_bytes: of memory, at the moment.
    """

    cpu_s: float
    resident_bytes: int


class RunningFront:
    """A server's process; a context manager.

    Args:
      front: which.
      sockets: directory of the workers' sockets.
      workers: how many decode.
      core: where it runs; None for anywhere.
      log: file for what it prints.
    """

    def __init__(
        self, front: Front, sockets: Path, workers: int, core: int | None, log: Path
    ) -> None:
        self.port = _free_port()
        self._front = front
        self._command = front.command(sockets, workers, self.port)
        self._core = core
        self._log_path = log
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._log = self._log_path.open("wb")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with OnCore(self._core):
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
        self._wait_ready(self._process)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None
        assert self._log is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def cost(self) -> Cost:
        """Read what it has used so far."""
        assert self._process is not None
        pid = self._process.pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        # Linux's name for the clock of a whole process, its threads of before included.
        cpu_s = time.clock_gettime(~pid << 3 | CPU_CLOCK)
        return Cost(cpu_s, pages * os.sysconf("SC_PAGE_SIZE"))

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        give_up_s = time.monotonic() + START_DEADLINE_S
        while True:
            if process.poll() is not None:
                how = f"ended with exit code {process.returncode}"
                raise RuntimeError(f"{self._front.name} {how}; its log is {self._log_path}")
            if time.monotonic() > give_up_s:
                how = f"took no connection within {START_DEADLINE_S:.0f} s"
                raise RuntimeError(f"{self._front.name} {how}; its log is {self._log_path}")
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                time.sleep(POLL_S)
            else:
                break
        time.sleep(SETTLE_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
