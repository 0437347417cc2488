"""Memory of worker processes and of this machine, and the page cache of a model's files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triolet.errors import ConfigError
from triolet.memory import available_memory_bytes
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config import ControlConfig, ControlledModelConfig

WEIGHTS: Final = (".safetensors", ".gguf", ".bin", ".pt")
"""Suffixes of files that hold nearly all of a model's bytes."""
OVERHEAD_BYTES: Final = 100 * MIB
"""Of one worker process beside weights and KV, before any was measured: what a worker that was
forked from a template holds of its own. A guess that is too high would refuse a model that fits;
one that is too low is put right when the model has run once."""
PROC: Final = Path("/proc")


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
    return int((available + held_bytes(pids)) * config.memory_share)


def held_bytes(pids: Iterable[int]) -> int:
    """Return the memory that processes hold together: pages that several of them map are counted
    in parts (PSS). Processes that are gone, or of a system without /proc, hold nothing."""
    return sum(_held(pid) for pid in pids)


def _held(pid: int) -> int:
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^Pss:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


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
