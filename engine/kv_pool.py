"""The KV memory of one worker: one tensor of blocks, and their bytes for shipping.

Knows the layout `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]` (2: K, then V);
does not know the owners of blocks (engine/block_ledger.py does) nor what is in it. Block-major: a
block with all its layers is one contiguous piece, so shipping it is one copy, and a layer's slice
`[:, layer, 0]` is still a legal strided cache for attention kernels. Source: paged KV after
PagedAttention (vLLM, SOSP '23).
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
"""Looked at in one go: a copy of a few MiB instead of one of the pool."""


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_blocks(num_bytes: int) -> torch.Tensor:
    """Return bytes that are zero, without writing a zero: a pool of gigabytes is there at once, and
    takes memory as its blocks are used.

    Raises:
      MemoryError: there is not that much now.
    """
    # Linux would promise it, and kill the process when the blocks come to be used.
    available = available_memory_bytes()
    most = _physical_bytes() if available is None else available
    if num_bytes > most:
        raise MemoryError(f"this machine has {most} bytes left")
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
        """Bytes of one block with all its layers."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class KVPool:
    """All blocks of one worker, written by its own process only.

    Args:
      layout: the shape of a block.
      num_blocks: blocks, the scratch block 0 included.
      device: where they lie.
      pinned_bytes: host memory through which blocks enter a GPU.

    Attributes:
      bytes_per_block: of one block with all its layers.

    Raises:
      ConfigError: the device has not that much memory.
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
        except (RuntimeError, MemoryError, OSError) as error:  # torch.OutOfMemoryError is the first
            raise ConfigError(
                f"kv_pool_bytes is {num_bytes}, and {device} has not that much memory; lower it "
                f"({layout.bytes_per_block} bytes hold {layout.block_size} tokens)"
            ) from error
        # [num_blocks, bytes_per_block], the same memory. numpy copies rows with plain memcpy and
        # no thread pool, so importing does not fight the device thread for cores.
        self._rows: npt.NDArray[np.uint8] | None = None
        self._staging: Staging | None = None
        if device.type == "cpu":
            self._rows = self._flat().numpy()
        else:
            self._staging = Staging(self.blocks, max(1, pinned_bytes // layout.bytes_per_block))

    def export_blocks(self, block_ids: Sequence[int], into: memoryview | None = None) -> memoryview:
        """Copy some blocks out, in the order given; they may be reused at once.

        Args:
          block_ids: which.
          into: as many bytes as they have, writable; None for fresh ones, which cost more.

        Returns:
          The bytes.
        """
        num_bytes = len(block_ids) * self.bytes_per_block
        if into is None:
            into = np.empty(num_bytes, dtype=np.uint8).data
        assert len(into) == num_bytes, "a buffer of another size"
        target = np.frombuffer(into, dtype=np.uint8).reshape(len(block_ids), -1)
        if self._rows is not None:
            # One by one: a plain copy of a block, where fancy indexing would build it elsewhere.
            for place, block in zip(target, block_ids, strict=True):
                place[:] = self._rows[block]
            return into
        assert self._staging is not None
        self._staging.export_blocks(block_ids, target)
        return into

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Overwrite some blocks with bytes that `export_blocks` gave, here or elsewhere.

        Raises:
          RemoteProtocolError: the payload has not the size of that many blocks; nothing is written.
        """
        if len(payload) != len(block_ids) * self.bytes_per_block:
            raise RemoteProtocolError(
                f"KV payload of {len(payload)} bytes for {len(block_ids)} blocks "
                f"of {self.bytes_per_block}"
            )
        # Copied from the frame's buffer byte by byte: it is not aligned for the cache's dtype.
        received = np.frombuffer(payload, dtype=np.uint8).reshape(len(block_ids), -1)
        if self._rows is not None:
            for block, place in zip(block_ids, received, strict=True):
                self._rows[block] = place
            return
        assert self._staging is not None
        self._staging.import_blocks(block_ids, received)

    def copy_block(self, source: int, target: int) -> None:
        """Overwrite a block that no running step reads with another one.

        What a running step writes into `source` meanwhile may or may not be copied.
        """
        if self._rows is not None:
            self._rows[target] = self._rows[source]
            return
        assert self._staging is not None
        self._staging.copy_block(source, target)

    def pin(self, memory: memoryview) -> bool:
        """Note that blocks will be exported into this memory again and again. Idempotent.

        Returns:
          Whether the device can write it at full speed.
        """
        return self._staging is None or self._staging.pin(memory)

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`; to be called before the memory is freed. Idempotent."""
        if self._staging is not None:
            self._staging.unpin(memory)

    def await_imports(self) -> None:
        """Let the steps that the calling thread launches next see all that was imported so far."""
        if self._staging is not None:
            self._staging.await_imports()

    def finish_writes(self) -> None:
        """Return when the steps that the calling thread has launched are computed."""
        if self.blocks.is_cuda:
            torch.cuda.current_stream(self.blocks.device).synchronize()

    def check_device(self) -> None:
        """Return when the device has run everything that was launched on it, by any thread.

        Raises:
          RuntimeError: the device takes no more work in this process.
        """
        if self.blocks.is_cuda:
            torch.cuda.synchronize(self.blocks.device)

    def _flat(self) -> torch.Tensor:
        """[num_blocks, bytes_per_block], the same memory."""
        return self.blocks.view(self.num_blocks, -1).view(torch.uint8)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, so that one read beyond a sequence's length spoils its answer."""
        if self._staging is not None:
            # Behind the imports and before the next owner's: an own order would spoil those.
            self._staging.fill(block_ids, float("nan"))
        else:
            self.blocks[list(block_ids)] = float("nan")

    def count_spoiled(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks, once poisoned, hold anything else by now."""
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
