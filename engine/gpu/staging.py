"""How KV leaves and enters a GPU's pool: by way of pinned host memory, on streams of its own.

Copies run beside the steps and wait for none that they have nothing to do with. A block is one
contiguous piece, so a copy of it is one call and needs no kernel.

Who may copy what, and when: an exported block is final, so the step that wrote it has returned and
no later one writes it; the copy out is waited for, since its bytes are shipped next. An imported
block belongs to a lease that has no row yet; steps that are launched later wait for the copy on the
device (`await_imports`), the host does not. All copies in go through one stream, so blocks that
changed hands meanwhile are written in the order in which they were leased.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from .arena import Arena

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor


class Staging:
    """Copies blocks of one pool out and in.

    Args:
      blocks: the pool on the device, [num_blocks, …].
      num_units: blocks that may be on their way in, at least one.
    """

    def __init__(self, blocks: Tensor, num_units: int) -> None:
        self._pool = blocks.view(len(blocks), -1).view(torch.uint8)
        self._device = blocks.device
        is_cuda = blocks.is_cuda
        self._pinned = torch.empty(
            num_units, self._pool.shape[1], dtype=torch.uint8, pin_memory=is_cuda
        )
        self._arena = Arena(num_units)
        self._out = torch.cuda.Stream(self._device) if is_cuda else None
        self._in = torch.cuda.Stream(self._device) if is_cuda else None
        self._arriving: deque[tuple[torch.cuda.Event | None, int, int]] = deque()
        self._last_import: torch.cuda.Event | None = None
        self.unpinned_copies = 0

    def pin(self, memory: memoryview) -> bool:
        """Lock memory into which blocks will be exported, so that the device writes it by itself.

        Returns:
          Whether that was possible; if not, copies into it are slower.
        """
        if self._out is None:
            return True
        with torch.cuda.device(self._device):
            address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
            return not int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))

    def export_blocks(self, block_ids: Sequence[int], target: npt.NDArray[np.uint8]) -> None:
        """Copy some blocks out and wait for it.

        Args:
          block_ids: which.
          target: [len(block_ids), bytes per block]; fastest where it is pinned.
        """
        with _on(self._out):
            for place, block in zip(torch.from_numpy(target), block_ids, strict=True):
                place.copy_(self._pool[block], non_blocking=True)
        if self._out is not None:
            self._out.synchronize()

    def import_blocks(self, block_ids: Sequence[int], payload: npt.NDArray[np.uint8]) -> None:
        """Overwrite some blocks; steps launched from now on see it once they `await_imports`.

        Args:
          block_ids: which.
          payload: [len(block_ids), bytes per block]; may be reused at once.
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
        with _on(self._in):
            for index, block in enumerate(block_ids):
                self._pool[block].copy_(source[index], non_blocking=True)
        event = None
        if self._in is not None:
            event = torch.cuda.Event()
            event.record(self._in)
        self._last_import = event
        if first is not None:
            self._arriving.append((event, first, count))

    def await_imports(self) -> None:
        """Let what the calling thread launches next wait for all that was imported so far."""
        event = self._last_import
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _reclaim(self) -> None:
        """Take back the memory of copies that have arrived."""
        while self._arriving:
            event, first, count = self._arriving[0]
            if event is not None and not event.query():
                return
            self._arriving.popleft()
            self._arena.give(first, count)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
