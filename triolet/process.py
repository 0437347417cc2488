"""This process and the system below it: what Linux says of it, and how glibc keeps its memory.

Linux tells all of it below /proc; elsewhere what is not known is None.
"""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from .audit import ProcessFacts

_PROC: Final = Path("/proc/self")
_STATUS: Final = re.compile(r"^(Threads|VmRSS):\s*(\d+)", re.MULTILINE)
KIB: Final = 1024
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""As <malloc.h> names them."""


def process_facts(tasks: int | None, proc: Path = _PROC) -> ProcessFacts:
    """Return the facts of now.

    Args:
      tasks: Trio tasks alive; the caller's event loop knows.
      proc: where the system tells them.
    """
    try:
        # One of them is the descriptor that reads the directory.
        open_fds = len(os.listdir(proc / "fd")) - 1
        status = dict(_STATUS.findall((proc / "status").read_text()))
    except OSError:
        return ProcessFacts(pid=os.getpid(), tasks=tasks)
    return ProcessFacts(
        pid=os.getpid(),
        open_fds=open_fds,
        threads=int(status["Threads"]) if "Threads" in status else None,
        tasks=tasks,
        rss_bytes=int(status["VmRSS"]) * KIB if "VmRSS" in status else None,
    )


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


def return_free_memory() -> None:
    """Give the system what is free between blocks in use.

    By default glibc keeps it: once a tokenizer was read, tens of MiB. Other C libraries do nothing.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
