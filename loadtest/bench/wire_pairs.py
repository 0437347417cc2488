"""Two processes that move bytes to one another, asked by lines of JSON.

Knows how the ends of each path are started and asked; decides nothing about what is compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Self

from .wire_engine import BLOCK_SIZE

if TYPE_CHECKING:
    from types import TracebackType

ROOT: Final = Path(__file__).parents[2]
WINDOW_CHUNKS: Final = 8
SHIPPED: Final = ["handed_over"]
TAKEN: Final = ["length"]


class Moved(NamedTuple):
    """One run.

    Attributes:
      num_bytes: that were moved.
      seconds: from the first byte until the receiver has the last.
      cpu_s: of both processes.
    """

    num_bytes: int
    seconds: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        """Speed."""
        return self.num_bytes / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """What it costs on both sides."""
        return self.cpu_s / self.num_bytes * 1e9


class End:
    """One process; a context manager.

    Args:
      module: of this folder.
      arguments: of its command line.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"loadtest.bench.{module}", *arguments]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pipe(self._process.stdin).close()
        self._process.terminate()
        self._process.wait()
        pipe(self._process.stdout).close()

    def ask(self, **request: object) -> None:
        """Tell it what to do."""
        to = pipe(self._process.stdin)
        to.write(json.dumps(request) + "\n")
        to.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for what it says."""
        line = pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError("one end has died; it says why above")
        said: dict[str, Any] = json.loads(line)
        return said


def pipe(of: IO[str] | None) -> IO[str]:
    """Return a pipe that is there."""
    assert of is not None
    return of


class Pair:
    """Both ends of a path; a context manager."""

    def __init__(self, sender: End, receiver: End) -> None:
        self.sender = sender
        self.receiver = receiver

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.sender.__exit__(exc_type, exc, traceback)
        self.receiver.__exit__(exc_type, exc, traceback)


class RawPair(Pair):
    """A bare socket.

    Args:
      kind: tcp or ipc.
      address: a path, for ipc.
    """

    def __init__(self, kind: str, address: str) -> None:
        receiver = End("wire_raw", "receive", kind, address)
        sender = End("wire_raw", "send", kind, receiver.answer()["address"])
        sender.answer()
        super().__init__(sender, receiver)

    def move(self, num_bytes: int, frame_bytes: int, *, spread: bool) -> Moved:
        """Move frames; `spread` over the receiver's memory, or all into one buffer."""
        request = {"bytes": num_bytes, "frame": frame_bytes, "spread": spread}
        self.receiver.ask(**request)
        self.sender.ask(**request)
        sent, received = self.sender.answer(), self.receiver.answer()
        return Moved(num_bytes, sent["seconds"], sent["cpu_s"] + received["cpu_s"])


class ZmqPair(Pair):
    """ZeroMQ over tcp, without Triolet."""

    def __init__(self) -> None:
        receiver = End("wire_zmq", "receive")
        sender = End("wire_zmq", "send", receiver.answer()["address"])
        sender.answer()
        super().__init__(sender, receiver)

    def move(self, num_bytes: int, frame_bytes: int, *, works: bool) -> Moved:
        """Move frames, spread over the receiver's memory.

        Args:
          num_bytes: in all.
          frame_bytes: of each.
          works: touch every byte as often as the KV path does.
        """
        request = {"bytes": num_bytes, "frame": frame_bytes, "work": works}
        self.receiver.ask(**request)
        self.sender.ask(**request)
        sent, received = self.sender.answer(), self.receiver.answer()
        return Moved(num_bytes, sent["seconds"], sent["cpu_s"] + received["cpu_s"])


class WorkerPair(Pair):
    """A prefill and a decode worker.

    Args:
      address: where decode takes KV.
      chunk_bytes: payload of a frame; None for the product's own.
      pool_tokens: what has to fit into both pools.
      size: of the model whose KV travels.
      model: computes it; None if it is there already.
      is_shared: decode reads prefill's ring.
      keys: directory of both workers' keys, for tcp.
      is_plain: KV goes unencrypted, each chunk with a MAC.
    """

    def __init__(
        self,
        address: str,
        chunk_bytes: int | None,
        pool_tokens: int,
        *,
        size: str = "150m",
        model: Path | None = None,
        is_shared: bool = False,
        keys: Path | None = None,
        is_plain: bool = False,
    ) -> None:
        common = ["--size", size, "--pool-tokens", str(2 * pool_tokens)]
        if chunk_bytes is not None:
            common += ["--chunk-bytes", str(chunk_bytes)]
            common += ["--window-bytes", str(WINDOW_CHUNKS * chunk_bytes)]
        if is_shared:
            common.append("--share-memory")
        if keys is not None:
            common += ["--curve", str(keys)]
        if is_plain:
            common.append("--kv-plaintext")
        computing = [] if model is None else ["--model", str(model)]
        sender = End("wire_worker", "prefill", *common, *computing)
        fingerprint = sender.answer()["fingerprint"]
        receiver = End(
            "wire_worker", "decode", *common, "--address", address, "--fingerprint", fingerprint
        )
        self._target = receiver.answer()
        self._next = 1
        super().__init__(sender, receiver)

    def ship(self, num_prompts: int, num_tokens: int, num_bytes: int) -> Moved:
        """Ship prompts at once, all of which is computed already."""
        shipped, taken = self._move(num_prompts, num_tokens, 0)
        return Moved(num_bytes, shipped["seconds"], shipped["cpu_s"] + taken["cpu_s"])

    def compute(self, num_tokens: int, *, is_held: bool) -> tuple[float, float]:
        """Compute one prompt; the receiver may hold all of it but a block.

        Returns:
          Seconds until decode has everything, and until the first token.
        """
        held_blocks = num_tokens // BLOCK_SIZE - 1 if is_held else 0
        shipped, _ = self._move(1, num_tokens, held_blocks)
        return shipped["seconds"], shipped["first_token_s"][0]

    def _move(
        self, num_prompts: int, num_tokens: int, held_blocks: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        numbers = {"first": self._next, "count": num_prompts}
        self._next += num_prompts
        if not held_blocks:
            self.receiver.ask(do="reserve", tokens=num_tokens, **numbers)
            self.receiver.answer()
            self.receiver.ask(do="finish", **numbers)
        self.sender.ask(
            do="prefill",
            tokens=num_tokens,
            held=held_blocks,
            peer=self._target["peer"],
            address=self._target["address"],
            **numbers,
        )
        shipped = self.sender.answer()
        taken = {} if held_blocks else self.receiver.answer()
        if not held_blocks and (shipped["reasons"], taken["reasons"]) != (SHIPPED, TAKEN):
            raise RuntimeError(f"not everything arrived: {shipped}, {taken}")
        return shipped, taken
