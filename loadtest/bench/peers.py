"""The engines that are compared: how each is started, whether it can be, and how it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

ROOT: Final = Path(__file__).parents[2]
ENVIRONMENTS: Final = ROOT / "build" / "bench"


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine.

    Attributes:
      name: in tables.
      module: what speaks for it (see peer_loop).
      arguments: beside model, threads and dtype.
      environment: whose Python runs it: `build/bench/env-NAME`, or None for this one.
      package: what must be importable there.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: str | None = None
    package: str = "torch"

    @property
    def python(self) -> Path:
        """The interpreter."""
        if self.environment is None:
            return Path(sys.executable)
        return ENVIRONMENTS / f"env-{self.environment}" / "bin" / "python"

    def why_not(self) -> str | None:
        """Return why it cannot run here, or None if it can."""
        if not self.python.exists():
            return f"no environment at {self.python.parents[1]}"
        found = subprocess.run(
            [self.python, "-c", f"import importlib.util as u; u.find_spec({self.package!r}).name"],
            capture_output=True,
            check=False,
        )
        return None if found.returncode == 0 else f"{self.package} is not installed"


PEERS: Final = (
    Peer("triolet native", "loadtest.bench.peer_triolet", ("--backend", "native")),
    Peer("triolet sdpa", "loadtest.bench.peer_triolet", ("--backend", "sdpa")),
    Peer("transformers", "loadtest.bench.peer_transformers", package="transformers"),
    Peer("vllm", "loadtest.bench.peer_vllm", environment="vllm", package="vllm"),
)


class RunningPeer:
    """A peer's process; a context manager. What it prints beside its answers goes to a log.

    Args:
      peer: which.
      model: directory.
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
        self._process.wait()
        self._pipe(self._process.stdout).close()

    def wait_until_ready(self) -> None:
        """Return when the model is loaded."""
        self._answer()

    def run(self, batch: int, context: int, steps: int) -> tuple[float, list[float]]:
        """Return seconds of the prompts, and of each decode step."""
        assert self._process is not None
        request = {"batch": batch, "context": context, "steps": steps}
        pipe = self._pipe(self._process.stdin)
        pipe.write(json.dumps(request) + "\n")
        pipe.flush()
        answer = self._answer()
        return answer["prefill_s"], answer["step_s"]

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.peer.name} has ended; it says why in {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
