"""Streams for copies that run beside the steps: CUDA streams on a GPU, plain calls elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from .host_copies import Mark

if TYPE_CHECKING:
    from collections.abc import Callable


class CopyMark(Protocol):
    """A point in a stream."""

    @property
    def is_reached(self) -> bool:
        """Return whether everything queued before the mark has run, without waiting."""
        ...

    def hold_back(self) -> None:
        """Make work that the calling thread queues next wait for the mark."""
        ...


class CopyStream(Protocol):
    """Runs work in queue order, independent of other streams."""

    def queue(self, work: Callable[[], object]) -> None:
        """Queue the device operations that `work` launches."""
        ...

    def record(self) -> CopyMark:
        """Return a mark after everything queued so far."""
        ...

    def wait_for(self, mark: CopyMark) -> None:
        """Make work queued from now on wait for a mark of another stream."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued so far has run."""
        ...


class CudaStream:
    """A CUDA stream. See CopyStream.

    Args:
      device: the device. Every call makes it the calling thread's current device, which events and
        launches use and which is device 0 in a new thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def queue(self, work: Callable[[], object]) -> None:
        """See CopyStream."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()

    def record(self) -> Mark:
        """See CopyStream."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return Mark(self._device)

    def wait_for(self, mark: CopyMark) -> None:
        """See CopyStream."""
        self.queue(mark.hold_back)

    def synchronize(self) -> None:
        """See CopyStream."""
        self._stream.synchronize()


class HostStream:
    """Runs work at once. See CopyStream."""

    def queue(self, work: Callable[[], object]) -> None:
        """See CopyStream."""
        work()

    def record(self) -> Mark:
        """See CopyStream."""
        return Mark(torch.device("cpu"))

    def wait_for(self, mark: CopyMark) -> None:
        """See CopyStream."""
        mark.hold_back()

    def synchronize(self) -> None:
        """See CopyStream."""


def copy_stream(device: torch.device) -> CopyStream:
    """Return a stream for copies to and from a device."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
