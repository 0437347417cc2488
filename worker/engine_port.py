"""What a worker's core asks of an engine: blocks, their bytes, and the facts that peers compare.

The cores see this and nothing else of the engine, so that they run the same against the real one
and against a fake that costs no time.
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
        """What is in the blocks that are kept."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block with all its layers, in the pool and on the wire."""
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
        """Equal if and only if two workers may exchange KV."""
        ...

    @property
    def pace(self) -> Pace:
        """How much a step may hold, and how long it takes."""
        ...

    @property
    def adapters(self) -> Collection[bytes]:
        """Digests of the adapters that rows may name."""
        ...

    @property
    def speedup(self) -> float:
        """How many times as many cores as its own the last step had."""
        ...

    def rest(self) -> None:
        """Note that there is no step to compute for now: others may use its cores."""
        ...

    def constrain(self, sampling: SamplingParams) -> Constraint | None:
        """Return what keeps the completion of a new attempt within its grammar and its reasoning's
        budget; None without either."""
        ...

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Compute one step, on the device's thread; one result per row."""
        ...

    def check_device(self) -> None:
        """Return when the device has run everything that was launched on it; on its thread.

        Raises:
          Exception: the device takes no more work from this process, as after an illegal access
            in a CUDA kernel: every later call fails, and only a new process helps.
        """
        ...

    def export_blocks(
        self, block_ids: Sequence[int], into: memoryview | None = None
    ) -> bytes | memoryview:
        """Copy blocks out, into as many bytes; they may be reused at once."""
        ...

    def pin(self, memory: memoryview) -> bool:
        """Note that blocks will be exported into this memory again and again; return whether the
        device can write it at full speed."""
        ...

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`, before the memory is freed. Idempotent."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Overwrite a block that no running step reads with another one, bit for bit."""
        ...

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Overwrite blocks that no running step reads."""
        ...


def require_adapter(engine: EnginePort, adapter: bytes, me: PeerId) -> None:
    """Look whether an engine has an adapter that a frame names.

    Raises:
      RemoteProtocolError: it has not.
    """
    if adapter and adapter not in engine.adapters:
        raise RemoteProtocolError(
            f"{me.name} has no adapter sha256:{adapter.hex()}: start workers and server with the "
            "same adapters"
        )
