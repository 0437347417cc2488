"""`python -m loadtest.bench.wire`: what the KV path moves beside bare sockets, and how much of a
prompt's time is shipping.

Two production workers ship prompts whose KV is there already: pool, ring, ZeroMQ, digest, pool. In
turns with them the same bytes go through a bare socket, and nowhere. Then real models compute
prompts of 2,048 tokens, with all of their KV shipped and with hardly any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from transport.zmq_curve import make_keys
from triolet.units import MIB

from .machine import describe
from .model import SHAPES, model_directory, write_model
from .report import Ratio, Report
from .wire_costs import measure_costs
from .wire_pairs import RawPair, WorkerPair, ZmqPair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .wire_pairs import Moved

PROMPT_TOKENS: Final = 2048
PROMPTS: Final = 12
"""Under way at once: 300 MB of the 150M model, in blocks that are all over the pool."""
FRAMES: Final = (1 * MIB, 2 * MIB, 4 * MIB)
KINDS: Final = ("tcp", "ipc")
SHARED: Final = "shared memory"
ENCRYPTED, PLAIN = "tcp, CURVE", "tcp, plaintext with MAC"
PATHS: Final = (ENCRYPTED, PLAIN, "ipc", SHARED)
"""Of KV between two workers. Encryption alone moves less than a bare socket can be asked for."""
ZMQ: Final = {"zmq tcp, spread": False, "zmq tcp, copied and digested": True}
"""ZeroMQ without Triolet, by whether it does the KV path's work on every byte: how fast that can
be on this machine, whoever drives it."""
FLOOR: Final = 0.8
CEILING: Final = 0.1
ROOT: Final = Path(__file__).parents[2]


class Throughput:
    """Bytes per second of every path, all in turns.

    Args:
      sockets: directory for addresses.
      repetitions: of each path and frame size.
    """

    def __init__(self, sockets: Path, repetitions: int) -> None:
        self._sockets = sockets
        self._keys = sockets / "keys"
        self._repetitions = repetitions
        self.moved: dict[tuple[str, int], list[Moved]] = {}

    def measure(self) -> None:
        """Let all paths take turns."""
        num_bytes = PROMPTS * PROMPT_TOKENS * SHAPES["150m"].kv_bytes_per_token
        make_keys(self._keys)
        for frame_bytes in FRAMES:
            with ExitStack() as stack:
                raws = {k: stack.enter_context(RawPair(k, self._socket())) for k in KINDS}
                bare = stack.enter_context(ZmqPair())
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
                    for name, works in ZMQ.items():
                        moved = bare.move(num_bytes, frame_bytes, works=works)
                        self._note(name, frame_bytes, moved, repetition)
                    for kind, pair in pairs.items():
                        moved = pair.ship(PROMPTS, PROMPT_TOKENS, num_bytes)
                        self._note(f"kv path {kind}", frame_bytes, moved, repetition)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield what was measured."""
        for (name, frame_bytes), all_moved in self.moved.items():
            yield {
                "path": name,
                "frame_mib": frame_bytes / MIB,
                "gb_per_s": round(median(moved.gb_per_s for moved in all_moved), 2),
                "cpu_s_per_gb": round(median(moved.cpu_s_per_gb for moved in all_moved), 3),
            }

    def ratios(self) -> Iterator[tuple[str, Ratio]]:
        """Yield our speed as a share of what a bare socket puts into as much memory."""
        for frame_bytes in FRAMES:
            size = f"{frame_bytes // MIB} MiB"
            raw = self._speed("raw tcp, spread", frame_bytes)
            for kind in PATHS:
                floor = FLOOR if kind == SHARED else None
                ours = self._speed(f"kv path {kind}", frame_bytes)
                yield f"{size}: kv path over {kind} vs raw tcp", Ratio(ours / raw, floor)
            for name in ZMQ:
                yield f"{size}: {name} vs raw tcp", Ratio(self._speed(name, frame_bytes) / raw)

    def _speed(self, name: str, frame_bytes: int) -> float:
        return median(moved.gb_per_s for moved in self.moved[name, frame_bytes])

    def _note(self, name: str, frame_bytes: int, moved: Moved, repetition: int) -> None:
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
    """Compute prompts alone, with all KV shipped and with all but a block held by the receiver."""
    model = model_directory(size)
    if not (model / "tokenizer.json").exists():
        write_model(model, SHAPES[size])
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
    # Pairs of neighbours: what the machine did otherwise meanwhile strikes both.
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
        for size in arguments.models:
            times, (name, ratio) = time_of_prompts(size, Path(sockets), arguments.repetitions)
            rows += times
            ratios[name] = ratio
    fields = ("path", "frame_mib", "gb_per_s", "cpu_s_per_gb", "ms")
    rows = [{field: row.get(field, 0.0) for field in fields} for row in rows]
    return Report("wire", machine, rows, ratios, {}, (("path", "frame_mib"), "gb_per_s"))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--models", nargs="*", choices=sorted(SHAPES), default=["15m", "150m"])
    console = Console()
    report = run(parser.parse_args())
    path = report.write(ROOT / "build" / "bench")
    report.show(console)
    console.print(str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
