"""Where ZeroMQ puts what arrives: memory of the C heap that stays there when a message is done.

Knows glibc's allocator; knows no messages. Each received part is allocated by libzmq and freed once
it is copied out. As the heap is set up such memory may go back to the kernel each time, and the
next message of a few MiB then touches fresh pages, which costs as much as copying it.
"""

from __future__ import annotations

import ctypes
from typing import Final

from triolet.units import MIB

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MOST_MMAP_THRESHOLD: Final = 32 * MIB
"""What glibc takes: half of a heap that is not the main thread's."""


def keep_received_memory(num_bytes: int) -> bool:
    """Let the heap keep up to so much free memory for what is received next, in this process.

    Returns:
      Whether that could be done: not without glibc, where messages arrive all the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either one switches off glibc's own adjustment of both, so both are set.
    is_kept = mallopt(_M_TRIM_THRESHOLD, min(num_bytes, 2**31 - 1))
    return bool(is_kept and mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD))
