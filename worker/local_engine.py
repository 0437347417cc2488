"""The real engine behind the port that cores see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.native.model import NativeModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Constraint, LayerWatch, Sampled, StepRow
    from engine.block_ledger import BlockLedger
    from engine.load import Engine
    from engine.pace import Pace
    from engine.prefix_cache import PrefixCache
    from triolet.sampling import SamplingParams

    from .lending import Cores


class LocalEngine:
    """One loaded model with its pool. See engine_port.EnginePort.

    Args:
      loaded: the model.
      cores: that its steps may use; None for those of the device's thread. Only the kernels of our
        own compute the same bits with any number of them, so nobody else borrows.
    """

    def __init__(self, loaded: Engine, cores: Cores | None = None) -> None:
        self._loaded = loaded
        model = loaded.runner.model
        self._model = model if isinstance(model, NativeModel) else None
        self._cores = None if self._model is None else cores
        self.speedup = 1.0

    @property
    def ledger(self) -> BlockLedger:
        """Who holds which block."""
        return self._loaded.ledger

    @property
    def prefix_cache(self) -> PrefixCache:
        """What is in the blocks that are kept."""
        return self._loaded.prefix_cache

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._loaded.pool.layout.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block with all its layers."""
        return self._loaded.pool.bytes_per_block

    @property
    def wire_bytes_per_block(self) -> int:
        """Bytes of one block with all its layers, as it travels."""
        return self._loaded.wire.bytes_per_block

    @property
    def num_layers(self) -> int:
        """Layers of a block."""
        return self._loaded.pool.layout.num_layers

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        return self._loaded.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._loaded.model_config.vocab_size

    @property
    def fingerprint(self) -> str:
        """Equal if and only if two workers may exchange KV."""
        return self._loaded.fingerprint

    @property
    def pace(self) -> Pace:
        """How much a step may hold, and how long it takes."""
        return self._loaded.pace

    def constrain(self, sampling: SamplingParams) -> Constraint | None:
        """Return what keeps a completion within its grammar and its reasoning's budget."""
        return self._loaded.constraints.constraint_of(sampling)

    def step(
        self, rows: Sequence[StepRow], watch: LayerWatch | None = None
    ) -> list[Sampled | None]:
        """Compute one step, on the device's thread."""
        if self._cores is None or self._model is None:
            return self._loaded.runner.step(rows, watch)
        self._model.num_threads = self._cores.take()
        try:
            return self._loaded.runner.step(rows, watch)
        finally:
            self.speedup = self._cores.give_back()

    def rest(self) -> None:
        """Leave the cores to the others."""
        if self._cores is not None:
            self._cores.rest()

    def check_device(self) -> None:
        """Return when the device has run everything that was launched on it."""
        self._loaded.pool.check_device()

    def export_blocks(
        self,
        block_ids: Sequence[int],
        into: memoryview | None = None,
        layers: range | None = None,
    ) -> memoryview:
        """Copy some layers of blocks out."""
        return self._loaded.wire.export_blocks(block_ids, into, layers)

    def pin(self, memory: memoryview) -> bool:
        """Note that blocks will be exported into this memory again and again."""
        return self._loaded.pool.pin(memory)

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`, before the memory is freed."""
        self._loaded.pool.unpin(memory)

    def copy_block(self, source: int, target: int) -> None:
        """Overwrite a block that no running step reads with another one."""
        self._loaded.pool.copy_block(source, target)

    def import_blocks(
        self,
        block_ids: Sequence[int],
        payload: bytes | memoryview,
        layers: range | None = None,
    ) -> None:
        """Overwrite some layers of blocks that no running step reads."""
        self._loaded.wire.import_blocks(block_ids, payload, layers)
