"""How much memory this machine, or the control groups around this process, have left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")


def available_memory_bytes(
    meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own_cgroup: Path = _OWN_CGROUP
) -> int | None:
    """Return what can be had without swapping, or None where that is not known.

    Args:
      meminfo: Linux's account of the machine.
      cgroup: folder of the control groups (version 2).
      own_cgroup: file that names the group of this process; its parents limit it too.
    """
    machine = _number(meminfo, r"^MemAvailable:\s*(\d+) kB")
    known = [] if machine is None else [machine * 1024]
    known += [left for folder in _groups(cgroup, own_cgroup) if (left := _left(folder)) is not None]
    return min(known, default=None)


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the process's group and of its parents, which a container may hide."""
    yield root
    try:
        named = re.search(r"^0::/(.*)$", own.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return
    folder = root
    for part in Path(named[1]).parts if named else ():
        folder /= part
        yield folder


def _left(group: Path) -> int | None:
    """Return what a control group may still take; None without a limit."""
    limit = _number(group / "memory.max", r"^(\d+)$")  # the word `max` where there is no limit
    used = _number(group / "memory.current", r"^(\d+)$")
    if limit is None or used is None:
        return None
    # Pages of files that were not read lately are counted as used, and given back at need.
    reclaimable = _number(group / "memory.stat", r"^inactive_file (\d+)$") or 0
    return max(0, limit - used + reclaimable)


def _number(file: Path, pattern: str) -> int | None:
    try:
        match = re.search(pattern, file.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
