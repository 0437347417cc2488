"""Measures the memory of worker processes and the budget of this machine, and drops a model's files
from the page cache."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.errors import ConfigError
from triolet.memory import available_memory_bytes
from triolet.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config import ControlConfig, ControlledModelConfig

WEIGHTS: Final = (".safetensors", ".gguf", ".bin", ".pt")
"""Suffixes of files that hold nearly all of a model's bytes."""
OVERHEAD_BYTES: Final = 50 * MIB
"""Guess for a worker process beyond weights and KV, before any was measured: 1.5 times the private
memory of a forked worker of the demo model. A guess that is too high refuses a model that fits; one
that is too low is corrected when the model has run once."""
PROC: Final = Path("/proc")
MAPPING: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S+) [0-9a-f]+ (\S+) (\d+)")
"""First line of each mapping in smaps: addresses, permissions, offset, device and inode."""
CLEAN: Final = "Private_Clean"
PRIVATE: Final = frozenset({CLEAN, "Private_Dirty"})
SHARED: Final = frozenset({"Shared_Clean", "Shared_Dirty"})


def budget_bytes(config: ControlConfig, pids: Iterable[int]) -> int:
    """Return the memory budget of the workers of all models.

    Args:
      config: its memory_bytes, if set, is the budget.
      pids: running workers; their memory belongs to the budget.

    Raises:
      ConfigError: memory_bytes is auto, and this system does not report free memory.
    """
    if config.memory_bytes is not None:
        return config.memory_bytes
    available = available_memory_bytes()
    if available is None:
        raise ConfigError(
            "control.memory_bytes is auto, and this system does not report free memory; set it, "
            "such as control.memory_bytes=16GiB"
        )
    # Mapped file pages already count as available: the kernel can drop them.
    own_bytes = sum(_pages(pid).alone_bytes for pid in pids)
    return int((available + own_bytes) * config.memory_share)


def held_bytes(pids: Iterable[int]) -> int:
    """Return the memory that becomes free when these processes end: the private pages of each, and
    the pages of files that they map, such as weights, counted once.

    Pages shared with the template and pages of programs are not counted, even if only one process
    maps them. Otherwise the size of a model would depend on how many others run beside it.
    Processes that have ended, and processes on a system without /proc, count as 0.
    """
    alone_bytes = 0
    of_file: dict[str, int] = {}
    for pid in pids:
        pages = _pages(pid)
        alone_bytes += pages.alone_bytes + pages.on_disk_bytes
        for file, num_bytes in pages.of_file.items():
            of_file[file] = max(of_file.get(file, 0), num_bytes)
    return alone_bytes + sum(of_file.values())


class _Pages(NamedTuple):
    """Memory of one process.

    Attributes:
      alone_bytes: private anonymous memory.
      on_disk_bytes: private clean file pages, without programs and libraries.
      of_file: shared file pages by device and inode, without programs and libraries.
    """

    alone_bytes: int
    on_disk_bytes: int
    of_file: dict[str, int]


def _pages(pid: int) -> _Pages:
    """Read the memory of a process from smaps (proc_pid_smaps(5))."""
    try:
        lines = (PROC / str(pid) / "smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _Pages(0, 0, {})
    alone_bytes, file = 0, ""
    clean: dict[str, int] = {}
    of_file: dict[str, int] = {}
    programs: set[str] = set()
    for line in lines.split("\n"):  # not splitlines(): a path may contain other line separators
        if begins := MAPPING.match(line):
            permissions, device, inode = begins.groups()
            file = "" if inode == "0" else f"{device} {inode}"
            if file and "x" in permissions:
                programs.add(file)
            continue
        name, _, value = line.partition(":")
        if name == CLEAN and file:
            clean[file] = clean.get(file, 0) + int(value.split()[0]) * KIB
        elif name in PRIVATE:
            alone_bytes += int(value.split()[0]) * KIB
        elif name in SHARED and file:
            of_file[file] = of_file.get(file, 0) + int(value.split()[0]) * KIB
    on_disk_bytes = sum(size for one, size in clean.items() if one not in programs)
    shared = {one: size for one, size in of_file.items() if one not in programs}
    return _Pages(alone_bytes, on_disk_bytes, shared)


def expected_bytes(model: ControlledModelConfig) -> int:
    """Return the expected memory of a model's workers before it was measured: shared weights, KV
    pools, adapters, and the overhead of each process; 0 without workers of its own."""
    if model.workers_of:
        return 0
    weights = sum(size for path, size in _files(model).items() if path.suffix in WEIGHTS)
    own = model.pool_bytes + model.adapter_bytes
    return weights + OVERHEAD_BYTES * model.num_workers + own


def forget_pages(model: ControlledModelConfig) -> None:
    """Drop a model's files from the page cache. Pages that other processes have mapped stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in _files(model):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # the file was deleted, and its pages with it
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _files(model: ControlledModelConfig) -> dict[Path, int]:
    """Return the files of a model with their sizes; empty if they cannot be read."""
    root = Path(model.model_dir)
    try:
        paths = [root] if root.is_file() else sorted(root.glob("*"))
        return {path: path.stat().st_size for path in paths if path.is_file()}
    except OSError:
        return {}


def has_files(model: ControlledModelConfig) -> bool:
    """Return whether a model's directory or file exists and can be reached."""
    try:
        return Path(model.model_dir).exists()
    except OSError:
        return False
