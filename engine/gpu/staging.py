"""Copy KV blocks out of and into a GPU's pool, through pinned host memory and separate streams.

Copies run beside the steps and wait only for steps that they depend on. A block is contiguous, so a
copy is one call and needs no kernel.

Order of copies and steps:
- Exported bytes are final: the step that wrote them has returned and no later one writes them. The
  caller waits for an export, because its bytes are shipped next. An import or a copy of the same
  block may still be queued, so an export waits for all writes queued before it.
- A written block belongs to a lease that has no row yet. Steps launched later wait on the device
  (`await_imports`); the host does not wait.
- All writes (imports, copies between blocks, fills) go through one stream, so that a block that
  changes owners is written in the order of its leases.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from .arena import Arena
from .copy_streams import CopyStream, copy_stream
from .host_copies import Mark
from .host_memory import HostMemory, cuda_host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from .copy_streams import CopyMark


class Staging:
    """Copies blocks out of and into one pool.

    Args:
      blocks: the pool on the device, [num_blocks, …].
      num_units: most blocks of imports in flight, at least one.
      make_stream: creates a copy stream for a device.
    """

    def __init__(
        self,
        blocks: Tensor,
        num_units: int,
        make_stream: Callable[[torch.device], CopyStream] = copy_stream,
    ) -> None:
        self._blocks = blocks
        self._pool = blocks.view(len(blocks), -1).view(torch.uint8)
        self._pinned = torch.empty(
            num_units, self._pool.shape[1], dtype=torch.uint8, pin_memory=blocks.is_cuda
        )
        self._arena = Arena(num_units)
        self._out = make_stream(blocks.device)
        self._in = make_stream(blocks.device)
        # The stream that created the pool may still be zeroing it.
        made = Mark(blocks.device)
        for stream in (self._out, self._in):
            stream.wait_for(made)
        self._arriving: deque[tuple[CopyMark, int, int]] = deque()
        self._last_write: CopyMark | None = None
        self._host_memory: HostMemory | None = None
        self.unpinned_copies = 0

    def pin(self, memory: memoryview) -> bool:
        """Pin memory into which blocks will be exported, so that the device writes it directly.

        Idempotent. Call `unpin` before the memory is freed.

        Returns:
          Whether pinning succeeded; if not, copies into the memory are slower.
        """
        if not self._blocks.is_cuda:
            return True
        with torch.cuda.device(self._blocks.device):
            if self._host_memory is None:
                self._host_memory = cuda_host_memory()
            return self._host_memory.pin(memory)

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`. Idempotent."""
        if self._host_memory is not None:
            with torch.cuda.device(self._blocks.device):
                self._host_memory.unpin(memory)

    def export_blocks(self, block_ids: Sequence[int], target: npt.NDArray[np.uint8]) -> None:
        """Copy blocks out and wait until they have arrived.

        Args:
          block_ids: the blocks.
          target: [len(block_ids), bytes of a block]; fastest if pinned.
        """
        places = torch.from_numpy(target)

        def copy() -> None:
            for place, block in zip(places, block_ids, strict=True):
                place.copy_(self._pool[block], non_blocking=True)

        if self._last_write is not None:
            self._out.wait_for(self._last_write)
        self._out.queue(copy)
        self._out.synchronize()

    def import_blocks(self, block_ids: Sequence[int], payload: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks. Steps launched after `await_imports` see the new bytes.

        Args:
          block_ids: the blocks.
          payload: [len(block_ids), bytes of a block]; the caller may reuse it at once.
        """
        self._reclaim()
        count = len(block_ids)
        first = self._arena.take(count)
        if first is None:
            self.unpinned_copies += 1
            source = torch.from_numpy(payload.copy())
        else:
            source = self._pinned[first : first + count]
            source.numpy()[:] = payload

        def copy() -> None:
            for index, block in enumerate(block_ids):
                self._pool[block].copy_(source[index], non_blocking=True)

        mark = self._write(copy)
        if first is not None:
            self._arriving.append((mark, first, count))

    def copy_block(self, source: int, target: int) -> None:
        """Overwrite one block with another; visible like an import."""
        self._write(lambda: self._pool[target].copy_(self._pool[source], non_blocking=True))

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        """Fill blocks with one number; visible like an import."""

        def fill() -> None:
            for block in block_ids:
                self._blocks[block].fill_(value)

        self._write(fill)

    def await_imports(self) -> None:
        """Make work that the calling thread launches next wait for all writes so far."""
        mark = self._last_write
        if mark is not None:
            mark.hold_back()

    def _write(self, work: Callable[[], object]) -> CopyMark:
        self._in.queue(work)
        self._last_write = mark = self._in.record()
        return mark

    def _reclaim(self) -> None:
        """Free the staging memory of finished copies."""
        while self._arriving:
            mark, first, count = self._arriving[0]
            if not mark.is_reached:
                return
            self._arriving.popleft()
            self._arena.give(first, count)
