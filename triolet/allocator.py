"""How the C library keeps memory that was freed. Knows glibc's switches and no other's."""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""As <malloc.h> names them."""


def return_large_blocks(num_bytes: int) -> bool:
    """Have blocks of at least so many bytes given back to the system as soon as they are freed.

    By default glibc moves this bound up to the largest block that was ever freed, 32 MiB at most.
    From then on large blocks lie between small ones that live longer, and stay this process's.

    Returns:
      Whether it could be done: not with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, num_bytes) and mallopt(_M_TRIM_THRESHOLD, num_bytes))
