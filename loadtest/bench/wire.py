"""`python -m loadtest.bench.wire`: compare the throughput of the KV path with bare sockets.

Two production workers transfer prompts with existing KV: pool, ring, ZeroMQ, digest, pool. In turns
with them the same bytes go through a bare socket. Then real models compute prompts of 2,048 tokens,
once with all KV transferred and once with hardly any, which shows the transfer's share of a
prompt's time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from subprocess import Popen
from time import process_time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from transport.codec import decode_message, encode_message
from transport.digest import payload_digest
from transport.frames import KvChunk
from transport.zmq_curve import make_keys
from triolet.units import MIB

from ..harness.lines import LineProcess
from ..harness.progress import progress
from ..harness.report import Ratio, Report, describe, line_of, run_bench
from .model import SHAPES, written_model
from .wire_sockets import ZMQ
from .wire_worker import BLOCK_SIZE, stored_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


WINDOW_CHUNKS: Final = 8
SHIPPED: Final = ["handed_over"]
TAKEN: Final = ["length"]


class Moved(NamedTuple):
    """Result of one transfer.

    Attributes:
      num_bytes: bytes moved.
      seconds: time from the first byte until the receiver has the last one.
      cpu_s: CPU time of both processes.
    """

    num_bytes: int
    seconds: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        """Throughput."""
        return self.num_bytes / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU time of both sides."""
        return self.cpu_s / self.num_bytes * 1e9


def end_of(module: str, *arguments: str, popen: type[Popen[Any]] = Popen) -> LineProcess:
    """Return a process for one end of a path, which runs a module of this folder."""
    command = [sys.executable, "-m", f"loadtest.bench.{module}", *arguments]
    return LineProcess(command, popen=popen)


class Pair:
    """Both ends of a path; a context manager."""

    def __init__(self, sender: LineProcess, receiver: LineProcess) -> None:
        self.sender = sender
        self.receiver = receiver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.sender.__exit__(*error)
        self.receiver.__exit__(*error)


class SocketPair(Pair):
    """A bare socket, or ZeroMQ over tcp without Triolet.

    Args:
      kind: tcp, ipc or zmq.
      address: path of the socket, for ipc.
      popen: starts both processes.
    """

    def __init__(self, kind: str, address: str = "", popen: type[Popen[Any]] = Popen) -> None:
        receiver = end_of("wire_sockets", "receive", kind, address, popen=popen)
        bound = receiver.answer()["address"]
        sender = end_of("wire_sockets", "send", kind, bound, popen=popen)
        sender.answer()
        super().__init__(sender, receiver)

    def move(self, num_bytes: int, frame_bytes: int, **how: bool) -> Moved:
        """Move frames.

        Args:
          num_bytes: total size.
          frame_bytes: size of each frame.
          how: for bare sockets `spread`: receive into all of the memory instead of one buffer; for
            ZeroMQ `work`: touch every byte as often as the KV path does.
        """
        request: dict[str, Any] = {"bytes": num_bytes, "frame": frame_bytes, **how}
        self.receiver.tell(**request)
        sent, received = self.sender.ask(**request), self.receiver.answer()
        return Moved(num_bytes, sent["seconds"], sent["cpu_s"] + received["cpu_s"])


class WorkerPair(Pair):
    """A prefill and a decode worker.

    Args:
      address: KV address of decode.
      chunk_bytes: payload of a frame; None for the default.
      pool_tokens: capacity of both pools.
      size: size of the model.
      model: directory of the model that computes the KV; None if the KV exists already.
      is_shared: whether decode reads prefill's ring from shared memory.
      keys: directory of both workers' keys, for tcp.
      is_plain: whether KV is sent unencrypted, with a MAC per chunk.
      popen: starts both processes.
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
        popen: type[Popen[Any]] = Popen,
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
        sender = end_of("wire_worker", "prefill", *common, *computing, popen=popen)
        taking = ["--address", address, "--fingerprint", sender.answer()["fingerprint"]]
        receiver = end_of("wire_worker", "decode", *common, *taking, popen=popen)
        self._target = receiver.answer()
        self._next = 1
        super().__init__(sender, receiver)

    def ship(self, num_prompts: int, num_tokens: int, num_bytes: int) -> Moved:
        """Transfer prompts that are computed already, concurrently."""
        shipped, taken = self._move(num_prompts, num_tokens, 0)
        return Moved(num_bytes, shipped["seconds"], shipped["cpu_s"] + taken["cpu_s"])

    def compute(self, num_tokens: int, *, is_held: bool) -> tuple[float, float]:
        """Compute one prompt and transfer its KV, or only one block if the receiver has the rest.

        Returns:
          Seconds until decode has all KV, and until the first token.
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
            self.receiver.tell(do="finish", **numbers)
        shipped = self.sender.ask(
            do="prefill",
            tokens=num_tokens,
            held=held_blocks,
            peer=self._target["peer"],
            address=self._target["address"],
            **numbers,
        )
        taken = {} if held_blocks else self.receiver.answer()
        if not held_blocks and (shipped["reasons"], taken["reasons"]) != (SHIPPED, TAKEN):
            raise RuntimeError(f"not everything arrived: {shipped}, {taken}")
        return shipped, taken


POOL_TOKENS: Final = 24_576
REPETITIONS: Final = 3
RING_BYTES: Final = 64 * MIB
_ID: Final = bytes(16)


def measure_costs(size: str, chunk_bytes: int) -> list[dict[str, Any]]:
    """Return the cost of each operation on a chunk, in seconds per gigabyte.

    Args:
      size: size of the model.
      chunk_bytes: payload of a frame.
    """
    pool = stored_engine(size, POOL_TOKENS, "noise").pool
    num_blocks = max(1, chunk_bytes // pool.bytes_per_block)
    num_bytes = num_blocks * pool.bytes_per_block
    chunks = [
        list(range(1 + start, 1 + start + num_blocks))
        for start in range(0, POOL_TOKENS // BLOCK_SIZE - num_blocks, num_blocks)
    ]
    ring = memoryview(bytearray(RING_BYTES))
    slots = [
        ring[begin : begin + num_bytes] for begin in range(0, RING_BYTES - num_bytes, num_bytes)
    ]
    arrays = [np.frombuffer(slot, dtype=np.uint8) for slot in slots]

    def each(move: Callable[[int, list[int]], object]) -> Callable[[], None]:
        def run() -> None:
            for index, blocks in enumerate(chunks):
                move(index % len(slots), blocks)

        return run

    def copy(index: int, _: list[int]) -> None:
        arrays[index][:] = arrays[index - len(arrays) // 2]

    def frame(index: int, _: list[int]) -> None:
        chunk = KvChunk(_ID, 0, 1, index, 0, num_blocks, _ID)
        decode_message(encode_message(chunk, slots[index]), num_bytes)

    parts = {
        "memcpy": copy,
        "export": lambda index, blocks: pool.export_blocks(blocks, slots[index]),
        "digest": lambda index, _: payload_digest(slots[index]),
        "import": lambda index, blocks: pool.import_blocks(blocks, slots[index]),
        "frame": frame,
    }
    total = len(chunks) * num_bytes
    return [
        {"path": f"cost of {name}", "frame_mib": round(num_bytes / MIB, 2)}
        | _row(total, min(_timed(each(move)) for _ in range(REPETITIONS)))
        for name, move in parts.items()
    ]


def _timed(call: Callable[[], None]) -> float:
    began_at = process_time()
    call()
    return process_time() - began_at


def _row(num_bytes: int, seconds: float) -> dict[str, Any]:
    return {
        "gb_per_s": round(num_bytes / seconds / 1e9, 2),
        "cpu_s_per_gb": round(seconds / num_bytes * 1e9, 3),
    }


PROMPT_TOKENS: Final = 2048
PROMPTS: Final = 12
"""Concurrent prompts: 300 MB of KV of the 150M model, in blocks all over the pool."""
FRAMES: Final = (1 * MIB, 2 * MIB, 4 * MIB)
KINDS: Final = ("tcp", "ipc")
SHARED: Final = "shared memory"
ENCRYPTED, PLAIN = "tcp, CURVE", "tcp, plaintext with MAC"
PATHS: Final = (ENCRYPTED, PLAIN, "ipc", SHARED)
"""Paths of KV between two workers. Encryption alone is slower than a bare socket."""
ZMQ_PATHS: Final = {"zmq tcp, spread": False, "zmq tcp, copied and digested": True}
"""ZeroMQ without Triolet, with and without the KV path's work on every byte: the best possible on
this machine."""
FLOOR: Final = 0.8
CEILING: Final = 0.1


class Throughput:
    """Measures the throughput of all paths, in turns.

    Args:
      sockets: directory of the sockets.
      repetitions: measurements of each path and frame size.
    """

    def __init__(self, sockets: Path, repetitions: int) -> None:
        self._sockets = sockets
        self._keys = sockets / "keys"
        self._repetitions = repetitions
        self.moved: dict[tuple[str, int], list[Moved]] = {}

    def measure(self) -> None:
        """Measure all paths in turns."""
        num_bytes = PROMPTS * PROMPT_TOKENS * SHAPES["150m"].kv_bytes_per_token
        make_keys(self._keys)
        for frame_bytes in FRAMES:
            progress(f"{frame_bytes // MIB} MiB: starting workers and bare sockets")
            with ExitStack() as stack:
                raws = {k: stack.enter_context(SocketPair(k, self._socket())) for k in KINDS}
                bare = stack.enter_context(SocketPair(ZMQ))
                pairs = {
                    kind: stack.enter_context(
                        WorkerPair(
                            self._address(kind),
                            frame_bytes,
                            PROMPTS * PROMPT_TOKENS,
                            is_shared=kind == SHARED,
                            keys=self._keys if kind in (ENCRYPTED, PLAIN) else None,
                            is_plain=kind == PLAIN,
                        )
                    )
                    for kind in PATHS
                }
                for repetition in range(self._repetitions + 1):
                    for kind in KINDS:
                        for spread in (False, True):
                            name = f"raw {kind}" + (", spread" if spread else "")
                            moved = raws[kind].move(num_bytes, frame_bytes, spread=spread)
                            self._note(name, frame_bytes, moved, repetition)
                    for name, works in ZMQ_PATHS.items():
                        moved = bare.move(num_bytes, frame_bytes, work=works)
                        self._note(name, frame_bytes, moved, repetition)
                    for kind, pair in pairs.items():
                        moved = pair.ship(PROMPTS, PROMPT_TOKENS, num_bytes)
                        self._note(f"kv path {kind}", frame_bytes, moved, repetition)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row per path and frame size."""
        for (name, frame_bytes), all_moved in self.moved.items():
            yield {
                "path": name,
                "frame_mib": frame_bytes / MIB,
                "gb_per_s": round(median(moved.gb_per_s for moved in all_moved), 2),
                "cpu_s_per_gb": round(median(moved.cpu_s_per_gb for moved in all_moved), 3),
            }

    def ratios(self) -> Iterator[tuple[str, Ratio]]:
        """Yield the speed of the KV path relative to a bare socket that fills as much memory."""
        for frame_bytes in FRAMES:
            size = f"{frame_bytes // MIB} MiB"
            raw = self._speed("raw tcp, spread", frame_bytes)
            for kind in PATHS:
                floor = FLOOR if kind == SHARED else None
                ours = self._speed(f"kv path {kind}", frame_bytes)
                yield f"{size}: kv path over {kind} vs raw tcp", Ratio(ours / raw, floor)
            for name in ZMQ_PATHS:
                yield f"{size}: {name} vs raw tcp", Ratio(self._speed(name, frame_bytes) / raw)

    def _speed(self, name: str, frame_bytes: int) -> float:
        return median(moved.gb_per_s for moved in self.moved[name, frame_bytes])

    def _note(self, name: str, frame_bytes: int, moved: Moved, repetition: int) -> None:
        speed = f"{moved.gb_per_s:.2f} GB/s" if repetition else "warm"
        progress(f"{name}, {frame_bytes // MIB} MiB: {speed}")
        if repetition:  # the first one warms up
            self.moved.setdefault((name, frame_bytes), []).append(moved)

    def _socket(self) -> str:
        return str(self._sockets / f"raw{next(_NUMBERS)}")

    def _address(self, kind: str) -> str:
        if kind in (ENCRYPTED, PLAIN):
            return "tcp://127.0.0.1:*"
        return f"ipc://{self._sockets}/kv{next(_NUMBERS)}"


_NUMBERS: Final = count()


def time_of_prompts(
    size: str, sockets: Path, repetitions: int
) -> tuple[list[dict[str, Any]], tuple[str, Ratio]]:
    """Time prompts without a transfer, with all KV transferred, and with one block transferred."""
    model = written_model(size)
    shipped_s: list[float] = []
    first_s: list[float] = []
    alone_s: list[float] = []
    address = f"ipc://{sockets}/{size}"
    with WorkerPair(address, None, PROMPT_TOKENS, size=size, model=model) as pair:
        for repetition in range(repetitions + 1):
            held_s, _ = pair.compute(PROMPT_TOKENS, is_held=True)
            ship_s, token_s = pair.compute(PROMPT_TOKENS, is_held=False)
            if repetition:
                alone_s.append(held_s)
                shipped_s.append(ship_s)
                first_s.append(token_s)
    rows = [
        {"path": f"{size}, 2k prompt: {name}", "ms": round(median(values) * 1e3, 1)}
        for name, values in (
            ("computed, one block shipped", alone_s),
            ("computed and all shipped", shipped_s),
            ("of these, after the first token", _differences(shipped_s, first_s)),
        )
    ]
    # Compare consecutive runs: other load on the machine affects both.
    added = median(ship / alone - 1.0 for ship, alone in zip(shipped_s, alone_s, strict=True))
    return rows, (f"{size}, 2k prompt: shipping adds", Ratio(added, ceiling=CEILING))


def _differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def run(arguments: argparse.Namespace) -> Report:
    """Measure everything."""
    machine = describe(2)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    with tempfile.TemporaryDirectory(prefix="wire-") as sockets:
        throughput = Throughput(Path(sockets), arguments.repetitions)
        throughput.measure()
        rows += throughput.rows()
        ratios |= throughput.ratios()
        rows += measure_costs("150m", 1 * MIB)
        progress("operations on chunks are timed; next: prompts with KV transfer")
        for size in arguments.models:
            times, (name, ratio) = time_of_prompts(size, Path(sockets), arguments.repetitions)
            for row in times:
                progress(line_of(row))
            rows += times
            ratios[name] = ratio
    fields = ("path", "frame_mib", "gb_per_s", "cpu_s_per_gb", "ms")
    rows = [{field: row.get(field, 0.0) for field in fields} for row in rows]
    return Report("wire", machine, rows, ratios, {})


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--models", nargs="*", choices=sorted(SHAPES), default=["15m", "150m"])
    run_bench(parser, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
