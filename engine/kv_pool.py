"""The KV memory of one worker: one tensor of blocks, with import and export of their bytes.

Layout: `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]` (2: K, then V). It is
block-major: a block with all its layers is contiguous, so shipping it is one copy, and a layer's
slice `[:, layer, 0]` is still a valid strided cache for attention kernels. engine/block_ledger.py
records the owners of blocks. Source: paged KV after PagedAttention (vLLM, SOSP '23).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from triolet.errors import ConfigError, RemoteProtocolError
from triolet.memory import available_memory_bytes, zeroed_memory

from .gpu.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


_SCANNED_BLOCKS = 64
"""Blocks checked at a time: a copy of a few MiB instead of a copy of the pool."""


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_blocks(num_bytes: int) -> torch.Tensor:
    """Return zeroed bytes from lazily allocated pages: a pool of gigabytes is created at once and
    takes memory as its blocks are used.

    Raises:
      MemoryError: the machine does not have that much memory now.
    """
    # Linux would overcommit, and kill the process when the blocks are used.
    available = available_memory_bytes()
    most = _physical_bytes() if available is None else available
    if num_bytes > most:
        raise MemoryError(f"this machine has {most} bytes of memory left")
    return torch.frombuffer(zeroed_memory(num_bytes), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one block."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, 2, block_size, num_kv_heads, head_dim]"""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        """Size of one block with all its layers."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class KVPool:
    """All blocks of one worker, written by its process only.

    Args:
      layout: the shape of a block.
      num_blocks: number of blocks, including the scratch block 0.
      device: the pool's device.
      pinned_bytes: pinned host memory for imports to a GPU.

    Attributes:
      bytes_per_block: size of one block with all its layers.

    Raises:
      ConfigError: the device does not have enough memory.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, pinned_bytes: int = 0
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.bytes_per_block = layout.bytes_per_block
        num_bytes = num_blocks * layout.bytes_per_block
        shape = (num_blocks, *layout.shape)
        try:
            if device.type == "cpu":
                self.blocks = _host_blocks(num_bytes).view(layout.dtype).view(shape)
            else:
                self.blocks = torch.zeros(shape, dtype=layout.dtype, device=device)
        except (RuntimeError, MemoryError, OSError) as error:  # torch.OutOfMemoryError too
            raise ConfigError(
                f"kv_pool_bytes is {num_bytes}, and {device} does not have that much; lower it "
                f"({layout.bytes_per_block} bytes hold {layout.block_size} tokens)"
            ) from error
        # [num_blocks, bytes_per_block], the same memory. numpy copies rows with plain memcpy and
        # no thread pool, so importing does not compete with the device thread for cores.
        self._rows: npt.NDArray[np.uint8] | None = None
        self._staging: Staging | None = None
        if device.type == "cpu":
            self._rows = self._flat().numpy()
        else:
            self._staging = Staging(self.blocks, max(1, pinned_bytes // layout.bytes_per_block))

    def export_blocks(self, block_ids: Sequence[int], into: memoryview | None = None) -> memoryview:
        """Copy blocks out, in the order given. The blocks may be reused afterwards.

        Args:
          block_ids: the blocks.
          into: writable buffer of exactly their size; None allocates one, which is slower.

        Returns:
          The bytes.
        """
        num_bytes = len(block_ids) * self.bytes_per_block
        if into is None:
            into = np.empty(num_bytes, dtype=np.uint8).data
        assert len(into) == num_bytes, "the buffer has the wrong size"
        target = np.frombuffer(into, dtype=np.uint8).reshape(len(block_ids), -1)
        if self._rows is not None:
            # One by one: fancy indexing would build a second copy.
            for place, block in zip(target, block_ids, strict=True):
                place[:] = self._rows[block]
            return into
        assert self._staging is not None
        self._staging.export_blocks(block_ids, target)
        return into

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Overwrite blocks with bytes from `export_blocks` of this or another worker.

        Raises:
          RemoteProtocolError: the payload does not have the size of these blocks. Nothing is
            written.
        """
        if len(payload) != len(block_ids) * self.bytes_per_block:
            raise RemoteProtocolError(
                f"KV payload of {len(payload)} bytes for {len(block_ids)} blocks "
                f"of {self.bytes_per_block}"
            )
        # Copied as bytes, because the frame's buffer is not aligned for the cache's dtype.
        received = np.frombuffer(payload, dtype=np.uint8).reshape(len(block_ids), -1)
        if self._rows is not None:
            for block, place in zip(block_ids, received, strict=True):
                self._rows[block] = place
            return
        assert self._staging is not None
        self._staging.import_blocks(block_ids, received)

    def copy_block(self, source: int, target: int) -> None:
        """Overwrite `target`, which no running step reads, with `source`.

        What a running step writes into `source` may or may not be copied.
        """
        if self._rows is not None:
            self._rows[target] = self._rows[source]
            return
        assert self._staging is not None
        self._staging.copy_block(source, target)

    def pin(self, memory: memoryview) -> bool:
        """Prepare memory into which blocks will be exported repeatedly. Idempotent.

        Returns:
          Whether the device can write to it at full speed.
        """
        return self._staging is None or self._staging.pin(memory)

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`. Call it before the memory is freed. Idempotent."""
        if self._staging is not None:
            self._staging.unpin(memory)

    def await_imports(self) -> None:
        """Make steps that the calling thread launches next wait for all imports so far."""
        if self._staging is not None:
            self._staging.await_imports()

    def finish_writes(self) -> None:
        """Wait until the steps launched by the calling thread are computed."""
        if self.blocks.is_cuda:
            torch.cuda.current_stream(self.blocks.device).synchronize()

    def check_device(self) -> None:
        """Wait until the device has run all work, launched by any thread.

        Raises:
          RuntimeError: the device failed and accepts no work from this process.
        """
        if self.blocks.is_cuda:
            torch.cuda.synchronize(self.blocks.device)

    def _flat(self) -> torch.Tensor:
        """[num_blocks, bytes_per_block], the same memory."""
        return self.blocks.view(self.num_blocks, -1).view(torch.uint8)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, so that one read beyond a sequence's length spoils its answer."""
        if self._staging is not None:
            # Queued with the imports, so that it runs after earlier ones and before the next
            # owner's.
            self._staging.fill(block_ids, float("nan"))
        else:
            self.blocks[list(block_ids)] = float("nan")

    def count_spoiled(self, block_ids: Sequence[int]) -> int:
        """Return how many of these poisoned blocks hold anything else now."""
        if self._rows is not None:
            mark = torch.full(self.layout.shape, float("nan"), dtype=self.layout.dtype)
            expected = mark.view(-1).view(torch.uint8).numpy().tobytes()
            return sum(self._rows[block].tobytes() != expected for block in block_ids)
        spoiled = 0
        self.await_imports()
        for start in range(0, len(block_ids), _SCANNED_BLOCKS):
            some = self.blocks[list(block_ids[start : start + _SCANNED_BLOCKS])]
            spoiled += int((~some.isnan()).flatten(1).any(dim=1).sum())
        return spoiled
