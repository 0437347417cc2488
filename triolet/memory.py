"""How much memory this machine, or the container around this process, has left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return what can be had without swapping, or None where that is not known.

    Args:
      meminfo: Linux's account of the machine.
      cgroup: folder of the control group (version 2) that limits this process.
    """
    machine = _number(meminfo, r"^MemAvailable:\s*(\d+) kB")
    known = [] if machine is None else [machine * 1024]
    limit = _number(cgroup / "memory.max", r"^(\d+)$")  # the word `max` where there is no limit
    used = _number(cgroup / "memory.current", r"^(\d+)$")
    if limit is not None and used is not None:
        # Pages of files that were not read lately are counted as used, and given back at need.
        reclaimable = _number(cgroup / "memory.stat", r"^inactive_file (\d+)$") or 0
        known.append(max(0, limit - used + reclaimable))
    return min(known, default=None)


def _number(file: Path, pattern: str) -> int | None:
    try:
        match = re.search(pattern, file.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
