"""Small asynchronous copies between host and device.

On a GPU, host memory is pinned and a mark is a CUDA event. On a CPU, memory is ordinary and marks
do nothing, so that the callers can be tested without a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


def host_tensor(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return host memory that a device can read and write asynchronously."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


class Mark:
    """A point in the current stream of a device, set by the thread that creates it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has reached the mark, with the interpreter's lock released."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_reached(self) -> bool:
        """Return whether the device has reached the mark, without waiting."""
        return self._event is None or self._event.query()

    def hold_back(self) -> None:
        """Make work that the calling thread launches next wait for the mark on the device."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class HostUpload:
    """Uploads arrays to the device through reused pinned buffers.

    Args:
      device: target device.
      rows: rows of each array.
      max_columns: most columns of an array.
      depth: most uploads in flight; the caller must keep to it.
    """

    def __init__(self, device: torch.device, rows: int, max_columns: int, depth: int) -> None:
        self._staging = [host_tensor(device, torch.int64, rows * max_columns) for _ in range(depth)]
        self._device = device
        self._next = 0

    def send(self, array: npt.NDArray[np.int64]) -> Tensor:
        """Return a copy on the device, of the array's shape."""
        staging = self._staging[self._next]
        self._next = (self._next + 1) % len(self._staging)
        source = staging[: array.size].view(array.shape)
        source.numpy()[:] = array
        return source.to(self._device, non_blocking=True, copy=True)
