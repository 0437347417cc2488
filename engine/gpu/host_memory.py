"""Pin existing host memory with `cudaHostRegister`, so that a GPU can read and write it directly.

The CUDA runtime latches the error of a failed call and reports it at the next launch of an
unrelated kernel. Every failure here therefore clears the error at once.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import structlog
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger()

_MAPS: Final = Path("/proc/self/maps")
_RUNTIME: Final = "libcudart.so"
_FOR_EVERY_DEVICE: Final = 1
"""cudaHostRegisterPortable: pinned in every CUDA context, not only the current device's."""


class Cudart(Protocol):
    """The CUDA runtime calls used here, as in `torch.cuda.cudart()`."""

    # The library's own names.
    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any: ...  # noqa: ANN401

    def cudaHostUnregister(self, address: int) -> Any: ...  # noqa: ANN401


class HostMemory:
    """Pinned host memory. Calls are idempotent.

    Args:
      runtime: the CUDA runtime; results are error numbers, 0 for success.
      drain_error: clears the runtime's latched error and returns its number.
    """

    def __init__(self, runtime: Cudart, drain_error: Callable[[], int]) -> None:
        self._runtime = runtime
        self._drain_error = drain_error
        self._pinned: dict[int, int] = {}  # bytes by address

    def pin(self, memory: memoryview) -> bool:
        """Pin memory. Return whether it succeeded."""
        address = _address(memory)
        if self._pinned.get(address) == len(memory):
            return True
        error = int(self._runtime.cudaHostRegister(address, len(memory), _FOR_EVERY_DEVICE))
        if error:
            self._drain_error()
            log.warning("memory_not_pinned", bytes=len(memory), cuda_error=error)
            return False
        self._pinned[address] = len(memory)
        return True

    def unpin(self, memory: memoryview) -> None:
        """Unpin memory. Call it before the memory is freed."""
        address = _address(memory)
        if self._pinned.get(address) != len(memory):
            return
        del self._pinned[address]
        error = int(self._runtime.cudaHostUnregister(address))
        if error:
            self._drain_error()
            log.warning("memory_not_unpinned", bytes=len(memory), cuda_error=error)


def cuda_host_memory() -> HostMemory:
    """Return a HostMemory for the CUDA runtime that torch uses."""
    return HostMemory(torch.cuda.cudart(), error_drain(_MAPS.read_text()))


def error_drain(maps: str) -> Callable[[], int]:
    """Return a function that clears the latched error of the CUDA runtime.

    torch has no call for it, and every copy of the runtime has a separate error, so the library
    that this process has loaded is called.

    Args:
      maps: the process's memory map, as `/proc/self/maps` shows it.
    """
    path = next((line.split()[-1] for line in maps.splitlines() if _RUNTIME in line), None)
    if path is None:  # linked into torch: a launch clears the error and raises it
        return _drain_by_launch
    take: Callable[[], int] = ctypes.CDLL(path).cudaGetLastError
    return take


def _drain_by_launch() -> int:
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        log.info("cuda_error_taken_back", error=str(error))
    return 0


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data
