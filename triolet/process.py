"""What the operating system says of this process when it is asked, and how it gets memory back.

Linux tells all of it below /proc; elsewhere what is not known is None.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Final

from .audit import ProcessFacts

_PROC: Final = Path("/proc/self")
_STATUS: Final = re.compile(r"^(Threads|VmRSS):\s*(\d+)", re.MULTILINE)
KIB: Final = 1024
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 1024 * KIB
"""Allocations that are mapped one by one; what is freed of smaller ones at the heap's end goes back
to the kernel beyond as much."""


def give_large_memory_back() -> bool:
    """Have this process keep no large allocation that it has freed.

    glibc would take the largest that was ever freed for usual, and keep memory of all up to that
    size: some request bodies of megabytes at once, and it is hundreds of megabytes larger for good.

    Returns:
      Whether that could be done: not without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES) and mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))


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
