"""What the operating system says of this process, read when it is asked.

Linux tells all of it below /proc; elsewhere what is not known is None.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from .audit import ProcessFacts

_PROC: Final = Path("/proc/self")
_STATUS: Final = re.compile(r"^(Threads|VmRSS):\s*(\d+)", re.MULTILINE)
KIB: Final = 1024


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
