"""The interface between a worker's core and its engine: blocks, their bytes, steps, fingerprint.

The cores see nothing else of the engine, so they run the same with a simulated one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from triolet.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engine.batch import Constraint, Sampled, StepRow
    from engine.block_ledger import BlockLedger
    from engine.pace import Pace
    from engine.prefix_cache import PrefixCache
    from triolet.ids import PeerId
    from triolet.sampling import SamplingParams


class EnginePort(Protocol):
    """One model with one KV pool."""

    @property
    def ledger(self) -> BlockLedger:
        """The leases of blocks."""
        ...

    @property
    def prefix_cache(self) -> PrefixCache:
        """The content of cached blocks."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, in the pool and on the wire."""
        ...

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal if and only if two workers can exchange KV."""
        ...

    @property
    def pace(self) -> Pace:
        """Capacity and duration of steps."""
        ...

    @property
    def adapters(self) -> Collection[bytes]:
        """Digests of the adapters that rows may name."""
        ...

    @property
    def speedup(self) -> float:
        """Cores of the last step divided by the worker's own cores."""
        ...

    def rest(self) -> None:
        """Record that there is no work now, so that other workers may use the cores."""
        ...

    def constrain(self, sampling: SamplingParams) -> Constraint | None:
        """Return the constraint of a new attempt's completion (grammar, reasoning budget); None
        without either."""
        ...

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Compute one step, on the device's thread; one result per row."""
        ...

    def check_device(self) -> None:
        """Return when the device has finished everything launched on it; called on its thread.

        Raises:
          Exception: the device accepts no more work from this process, as after an illegal access
            in a CUDA kernel: every later call fails, and only a new process helps.
        """
        ...

    def export_blocks(
        self, block_ids: Sequence[int], into: memoryview | None = None
    ) -> bytes | memoryview:
        """Copy blocks out; the blocks may be reused at once."""
        ...

    def pin(self, memory: memoryview) -> bool:
        """Prepare memory for repeated exports; return whether the device can write it at full
        speed."""
        ...

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`, before the memory is freed. Idempotent."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block bit for bit over another one that no running step reads."""
        ...

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Overwrite blocks that no running step reads."""
        ...


def require_adapter(engine: EnginePort, adapter: bytes, me: PeerId) -> None:
    """Check that an engine has the adapter that a frame names.

    Raises:
      RemoteProtocolError: it does not.
    """
    if adapter and adapter not in engine.adapters:
        raise RemoteProtocolError(
            f"{me.name} has no adapter sha256:{adapter.hex()}: start workers and server with the "
            "same adapters"
        )
