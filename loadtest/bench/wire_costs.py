"""What each part of the KV path costs by itself, in one process and one thread.

Frames follow one another through memory as they do in a transfer, so that nothing is in a cache
that would not be.
"""

from __future__ import annotations

from time import process_time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from transport.codec import decode_message, encode_message
from transport.digest import payload_digest
from transport.frames import KvChunk
from triolet.units import MIB

from .wire_engine import BLOCK_SIZE, StoredEngine

if TYPE_CHECKING:
    from collections.abc import Callable

POOL_TOKENS: Final = 24_576
REPETITIONS: Final = 3
RING_BYTES: Final = 64 * MIB
_ID: Final = bytes(16)


def measure_costs(size: str, chunk_bytes: int) -> list[dict[str, Any]]:
    """Return seconds per gigabyte of everything that a chunk meets on its way.

    Args:
      size: of the model whose blocks travel.
      chunk_bytes: payload of a frame.
    """
    engine = StoredEngine(size, POOL_TOKENS, "noise")
    num_blocks = max(1, chunk_bytes // engine.bytes_per_block)
    num_bytes = num_blocks * engine.bytes_per_block
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
        "export": lambda index, blocks: engine.export_blocks(blocks, slots[index]),
        "digest": lambda index, _: payload_digest(slots[index]),
        "import": lambda index, blocks: engine.import_blocks(blocks, slots[index]),
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
