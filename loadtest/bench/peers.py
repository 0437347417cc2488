"""The engines that are compared: how each is started, whether it can be, and how it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

from .engines import ROOT
from .environment import python_of, why_not

if TYPE_CHECKING:
    from types import TracebackType

OURS: Final = "triolet"
LEAVE_S: Final = 5.0
"""An engine that has not left this long after it was told to is killed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine.

    Attributes:
      name: in tables.
      module: what speaks for it (see peer_loop).
      arguments: beside model, threads and dtype.
      environment: whose Python runs it (see engines.py), or None for this one.
      package: what must be importable in this one.
      is_usual: whether it takes part unless others are asked for.
      reads_gguf: whether its model may be a GGUF file.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: str | None = None
    package: str = "torch"
    is_usual: bool = True
    reads_gguf: bool = False

    @property
    def python(self) -> Path:
        """The interpreter."""
        if self.environment is None:
            return Path(sys.executable)
        return python_of(self.environment)

    def why_not(self) -> str | None:
        """Return why it cannot run here, or None if it can."""
        if self.environment is not None:
            return why_not(self.environment)
        return None if find_spec(self.package) else f"{self.package} is not installed"


PEERS: Final = (
    Peer(OURS, "loadtest.bench.peer_triolet", reads_gguf=True),
    Peer("triolet int8", "loadtest.bench.peer_triolet", ("--weights", "int8"), reads_gguf=True),
    Peer("triolet sdpa", "loadtest.bench.peer_triolet", ("--backend", "sdpa")),
    Peer("vllm", "loadtest.bench.peer_vllm", environment="vllm"),
    Peer("llama.cpp", "loadtest.bench.peer_llama", environment="llama", reads_gguf=True),
    Peer(
        "llama.cpp q8",
        "loadtest.bench.peer_llama",
        ("--file", "q8_0"),
        environment="llama",
        is_usual=False,
    ),
    Peer("openvino", "loadtest.bench.peer_openvino", environment="openvino"),
    Peer("transformers", "loadtest.bench.peer_transformers", package="transformers"),
)


class PeerLost(Exception):
    """An engine's process has ended by itself."""


class RunningPeer:
    """A peer's process; a context manager. What it prints beside its answers goes to a log.

    Args:
      peer: which.
      model: directory, or a GGUF file.
      threads: of its kernels.
      dtype: bfloat16 or float32.
      log: file to be written.
    """

    def __init__(self, peer: Peer, model: Path, threads: int, dtype: str, log: Path) -> None:
        self.peer = peer
        self._log = log
        options = ["--threads", str(threads), "--dtype", dtype]
        self._command = [
            str(peer.python), "-m", peer.module, str(model), *options, *peer.arguments
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._pipe(self._process.stdin).close()
        self._process.terminate()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe(self._process.stdout).close()

    def wait_until_ready(self) -> str:
        """Return the engine's version when the model is loaded.

        Raises:
          PeerLost: it ended instead.
        """
        return str(self._answer()["version"])

    def begin(self, batch: int, context: int, most_steps: int) -> float:
        """Return the seconds that so many prompts took until each had a token."""
        asked = {"batch": batch, "context": context, "most_steps": most_steps}
        return float(self._ask({"begin": asked})["prefill_s"])

    def decode(self, steps: int) -> list[float]:
        """Return the seconds of each step of all sequences."""
        seconds: list[float] = self._ask({"steps": steps})["step_s"]
        return seconds

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of its steps since this was last asked; empty at first,
        and always where an engine does not tell."""
        seconds: dict[str, float] = self._ask({"parts": True})["parts"]
        return seconds

    def peak_mib(self) -> int:
        """Return the most memory that its process has had, shared pages included; Linux only."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) // 1024

    def end(self) -> None:
        """Let it forget its sequences."""
        self._ask({"end": True})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        pipe = self._pipe(self._process.stdin)
        try:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._lost() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise self._lost()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lost(self) -> PeerLost:
        return PeerLost(f"it ended; {self._log.relative_to(ROOT)} says why")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
