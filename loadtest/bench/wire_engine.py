"""Engines for the benchmark of the wire: a pool with bytes in it, and steps that cost nothing.

What is shipped does not depend on who wrote it, so the wire is measured without computing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from engine.batch import Sampled
from engine.block_ledger import BlockLedger
from engine.int8_wire import Int8Wire
from engine.kv_pool import KVLayout, KVPool
from engine.pace import Pace
from engine.prefix_cache import PrefixCache
from triolet.config import KvWire
from triolet.units import MIB

from .model import SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar, TypeVarTuple

    from engine.batch import LayerWatch, StepRow
    from triolet.sampling import SamplingParams

    T = TypeVar("T")
    Ts = TypeVarTuple("Ts")

BLOCK_SIZE: Final = 16
TOKEN: Final = 7
MAX_MODEL_LEN: Final = 8192
_PATTERN_BYTES: Final = 8 * MIB


class StoredEngine:
    """See worker.engine_port.EnginePort. Its pool is full of noise, and its steps write nothing.

    Args:
      size: a shape of `model.SHAPES`, whose KV it has, in bf16.
      num_tokens: that the pool holds.
      fingerprint: what it claims to be.
      kv_wire: what its KV is on the way.
    """

    def __init__(
        self, size: str, num_tokens: int, fingerprint: str, kv_wire: KvWire = KvWire.EXACT
    ) -> None:
        shape = SHAPES[size]
        layout = KVLayout(
            shape.num_layers, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, torch.bfloat16
        )
        num_blocks = 1 + num_tokens // BLOCK_SIZE
        self.pool = KVPool(layout, num_blocks, torch.device("cpu"))
        # Pages that nobody wrote would all be one page of zeros, which costs nothing to read.
        flat = self.pool.blocks.view(-1).view(torch.uint8).numpy()
        noise = np.random.default_rng(0).integers(0, 256, _PATTERN_BYTES, dtype=np.uint8)
        for begin in range(0, len(flat), len(noise)):
            part = flat[begin : begin + len(noise)]
            part[:] = noise[: len(part)]
        self.ledger = BlockLedger(num_blocks)
        self.prefix_cache = PrefixCache(self.ledger, BLOCK_SIZE, self.pool, is_enabled=False)
        self.block_size = BLOCK_SIZE
        self.num_layers = shape.num_layers
        self.speedup = 1.0
        self.bytes_per_block = layout.bytes_per_block
        self._wire = Int8Wire(self.pool) if kv_wire is KvWire.INT8 else self.pool
        self.wire_bytes_per_block = self._wire.bytes_per_block
        self.max_model_len = MAX_MODEL_LEN
        self.vocab_size = shape.vocab_size
        self.fingerprint = fingerprint
        # A whole prompt in one step: all of its KV is there at once.
        most = MAX_MODEL_LEN
        self.pace = Pace(most, 0.0, 1.0, most, most, chunk_tokens=most)

    def rest(self) -> None:
        """Do nothing: it has no cores."""

    def constrain(self, sampling: SamplingParams) -> None:
        """Its tokens are no text: requests with a grammar are not for it."""
        assert not sampling.is_constrained

    def step(
        self, rows: Sequence[StepRow], watch: LayerWatch | None = None
    ) -> list[Sampled | None]:
        """Choose the same token for every row that asks for one."""
        return [None if row.sample is None else Sampled(TOKEN) for row in rows]

    def check_device(self) -> None:
        """Return when the device is idle."""
        self.pool.check_device()

    def export_blocks(
        self,
        block_ids: Sequence[int],
        into: memoryview | None = None,
        layers: range | None = None,
    ) -> memoryview:
        """Copy blocks out."""
        return self._wire.export_blocks(block_ids, into, layers)

    def pin(self, memory: memoryview) -> bool:
        """Note that blocks will be exported into this memory again and again."""
        return self.pool.pin(memory)

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`."""
        self.pool.unpin(memory)

    def copy_block(self, source: int, target: int) -> None:
        """Overwrite one block with another."""
        self.pool.copy_block(source, target)

    def import_blocks(
        self,
        block_ids: Sequence[int],
        payload: bytes | memoryview,
        layers: range | None = None,
    ) -> None:
        """Overwrite blocks."""
        self._wire.import_blocks(block_ids, payload, layers)


class NoDevice:
    """Runs steps where they are asked for."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a call."""
        return fn(*args)
