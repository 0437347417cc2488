"""Small copies between host and device that are waited for as late as possible.

On a GPU the host's side is pinned memory and a mark is an event; anywhere else both are nothing, so
that whatever uses them runs in tests without a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


def host_tensor(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return host memory that a device can read and write while the host goes on."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


class Mark:
    """A point in what the device was told to do, by the thread that makes it.

    Args:
      device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return when the device has come to it. Python's lock is released meanwhile."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_reached(self) -> bool:
        """Whether the device has come to it. Does not wait."""
        return self._event is None or self._event.query()

    def hold_back(self) -> None:
        """Let what the calling thread launches next wait for it on the device."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class HostUpload:
    """Copies arrays of one shape to the device, through host memory that it may reuse.

    Args:
      device: where to.
      rows: of each array.
      max_columns: most of them.
      depth: arrays that may be under way; the caller sees to it that no more are.
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
