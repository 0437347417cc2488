"""Memory of worker processes and of this machine, and the page cache of a model's files."""

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
"""Of one worker process beside weights and KV, before any was measured: what a worker that was
forked from a template holds of its own, half as much again as one of the demo model. A guess that
is too high would refuse a model that fits; one that is too low is put right when the model has run
once."""
PROC: Final = Path("/proc")
MAPPING: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S+) [0-9a-f]+ (\S+) (\d+)")
"""Addresses, permissions, offset, device and inode: the first line of each mapping in smaps."""
CLEAN: Final = "Private_Clean"
PRIVATE: Final = frozenset({CLEAN, "Private_Dirty"})
SHARED: Final = frozenset({"Shared_Clean", "Shared_Dirty"})


def budget_bytes(config: ControlConfig, pids: Iterable[int]) -> int:
    """Return the memory for the workers of all models.

    Args:
      config: may name it.
      pids: of workers that run; what they hold is theirs already.

    Raises:
      ConfigError: it is not named, and this system does not say what there is.
    """
    if config.memory_bytes is not None:
        return config.memory_bytes
    available = available_memory_bytes()
    if available is None:
        raise ConfigError(
            "control.memory_bytes is auto, and this system does not say how much memory is left; "
            "give it, such as control.memory_bytes=16GiB"
        )
    # What is mapped of files counts as available already: it is on disk, and dropped at need.
    own_bytes = sum(_pages(pid).alone_bytes for pid in pids)
    return int((available + own_bytes) * config.memory_share)


def held_bytes(pids: Iterable[int]) -> int:
    """Return the memory that is free once these processes have ended: the pages that each has
    alone, and those of the files that they map, once, such as weights.

    What all forked processes share with their template, and the pages of programs, stay, also where
    only one process was spawned that maps them. To count them, or parts, would make a model smaller
    the more others run beside it, and larger as these end.
    Processes that are gone, or of a system without /proc, hold nothing.
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
      alone_bytes: that no other process maps and no file has.
      on_disk_bytes: that no other process maps, of files; without programs and libraries.
      of_file: that others may map too, by device and inode; without programs and libraries.
    """

    alone_bytes: int
    on_disk_bytes: int
    of_file: dict[str, int]


def _pages(pid: int) -> _Pages:
    """Read what the kernel says of a process (proc_pid_smaps(5))."""
    try:
        lines = (PROC / str(pid) / "smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _Pages(0, 0, {})
    alone_bytes, file = 0, ""
    clean: dict[str, int] = {}
    of_file: dict[str, int] = {}
    programs: set[str] = set()
    for line in lines.split("\n"):  # a path may have any other sign that ends a line
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
    """Return what a model's workers will hold together, before that was measured: the weights,
    which they map in common, the pools, the adapters, and what each process takes."""
    weights = sum(size for path, size in _files(model).items() if path.suffix in WEIGHTS)
    own = model.pool_bytes + model.adapter_bytes
    return weights + OVERHEAD_BYTES * model.num_workers + own


def forget_pages(model: ControlledModelConfig) -> None:
    """Let the page cache give up a model's files; what other processes have mapped stays."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in _files(model):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, and its pages with it
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _files(model: ControlledModelConfig) -> dict[Path, int]:
    """Return the files of a model with their sizes; none where its directory is gone or its file
    system does not answer."""
    root = Path(model.model_dir)
    try:
        paths = [root] if root.is_file() else sorted(root.glob("*"))
        return {path: path.stat().st_size for path in paths if path.is_file()}
    except OSError:
        return {}


def has_files(model: ControlledModelConfig) -> bool:
    """Return whether a model's directory or file is there, and its file system answers."""
    try:
        return Path(model.model_dir).exists()
    except OSError:
        return False
