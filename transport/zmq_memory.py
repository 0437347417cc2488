"""Configure glibc to keep freed memory of ZeroMQ messages instead of returning it to the kernel.

libzmq allocates each received part and frees it once it is copied. By default this memory may be
returned to the kernel each time. The next message of a few MiB then touches new pages, which costs
as much as copying it.
"""

from __future__ import annotations

import ctypes
from typing import Final

from triolet.units import MIB

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MOST_MMAP_THRESHOLD: Final = 32 * MIB
"""glibc's limit: half of a heap that is not the main thread's."""


def keep_received_memory(num_bytes: int) -> bool:
    """Let this process's heap keep up to `num_bytes` of free memory.

    Returns:
      Whether it worked: without glibc it does not, and messages arrive all the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting either one disables glibc's automatic adjustment of both, so set both.
    is_kept = mallopt(_M_TRIM_THRESHOLD, min(num_bytes, 2**31 - 1))
    return bool(is_kept and mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD))
