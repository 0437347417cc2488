"""Facts about this process from Linux's /proc, and a setting of glibc's allocator.

On other systems unknown facts are None.
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
"""Constant of <malloc.h>."""


def process_facts(tasks: int | None, proc: Path = _PROC) -> ProcessFacts:
    """Return the present facts.

    Args:
      tasks: number of live Trio tasks, which the caller's event loop knows.
      proc: mount point of /proc.
    """
    try:
        # One of them is the descriptor that lists the directory.
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
    """Make malloc return blocks of at least `num_bytes` to the system as soon as they are freed.

    By default glibc raises this threshold to the largest block ever freed, up to 32 MiB. From then
    on large blocks lie between small ones that live longer, and are never returned.

    Returns:
      Whether it worked: other C libraries do not support it.
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
