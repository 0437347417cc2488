"""Read the free memory of this machine and its control groups, and allocate zeroed memory."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """Files of a memory control group.

    Attributes:
      limit: file with the limit [bytes].
      used: file with the usage [bytes].
      reclaimable: pattern of the line of `memory.stat` with reclaimable pages.
    """

    limit: str
    used: str
    reclaimable: str


_VERSION_2: Final = _Files("memory.max", "memory.current", r"^inactive_file (\d+)$")
_VERSION_1: Final = _Files(
    # Without a limit the number is about 2 ** 63, more than any machine has.
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    r"^total_inactive_file (\d+)$",
)


def available_memory_bytes(
    meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own_cgroup: Path = _OWN_CGROUP
) -> int | None:
    """Return the bytes available without swapping, or None if unknown.

    Args:
      meminfo: Linux's account of the machine.
      cgroup: folder of the control groups: of version 2, or of version 1 with a folder `memory`.
      own_cgroup: file that names this process's groups; limits of their parents apply too.
    """
    machine = _number(meminfo, r"^MemAvailable:\s*(\d+) kB")
    known = [] if machine is None else [machine * 1024]
    for root, pattern, files in (
        (cgroup, r"^0::/(.*)$", _VERSION_2),
        (cgroup / "memory", r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$", _VERSION_1),
    ):
        lefts = (_left(folder, files) for folder in _groups(root, own_cgroup, pattern))
        known += [left for left in lefts if left is not None]
    return min(known, default=None)


def zeroed_memory(num_bytes: int) -> mmap.mmap:
    """Return private zeroed memory, on large pages where the system has them.

    Nothing is written: the kernel provides each page on first use. With large pages, walking
    through much of the memory waits less for page tables (saves a tenth of a step's time).

    Raises:
      OSError: there is not enough memory.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _groups(root: Path, own: Path, pattern: str) -> Iterator[Path]:
    """Yield the folders of the process's group and of its parents, which a container may hide."""
    yield root
    try:
        named = re.search(pattern, own.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return
    folder = root
    for part in Path(named[1]).parts if named else ():
        folder /= part
        yield folder


def _left(group: Path, files: _Files) -> int | None:
    """Return the bytes that a control group may still use; None without a limit."""
    limit = _number(group / files.limit, r"^(\d+)$")  # the word `max` where there is no limit
    used = _number(group / files.used, r"^(\d+)$")
    if limit is None or used is None:
        return None
    # Pages of files that were not read lately count as used but are reclaimed when needed.
    reclaimable = _number(group / "memory.stat", files.reclaimable) or 0
    return max(0, limit - used + reclaimable)


def _number(file: Path, pattern: str) -> int | None:
    try:
        match = re.search(pattern, file.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
