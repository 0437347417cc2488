"""Assigns CPU cores and GPUs to the processes of a fleet. No I/O."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .process_spec import ProcessSpec


def own_cores(
    decode_names: Sequence[str], threads: int, cores: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Give each decode worker as many cores as it has threads, from the last core down.

    The other processes share the remaining cores: servers and prefill workers have bursty load,
    which the kernel distributes better than a fixed plan. At least one core must remain for them.

    Args:
      decode_names: names of the decode workers.
      threads: threads of each worker.
      cores: cores that this process may use.

    Returns:
      The cores of each decode worker; empty if there are too few.
    """
    if len(decode_names) * threads >= len(cores):
        return {}
    taken = sorted(cores, reverse=True)
    return {
        name: tuple(sorted(taken[index * threads : (index + 1) * threads]))
        for index, name in enumerate(decode_names)
    }


def placed(
    specs: Sequence[ProcessSpec], pinned: Mapping[str, tuple[int, ...]], cores: Sequence[int]
) -> list[ProcessSpec]:
    """Return the processes with their cores: those in `pinned`, or all remaining ones."""
    if not pinned:
        return list(specs)
    taken = {core for own in pinned.values() for core in own}
    rest = tuple(core for core in cores if core not in taken)
    return [replace(spec, cores=pinned.get(spec.name, rest)) for spec in specs]


GPU: Final = "cuda"
VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"
"""Variable of the CUDA driver: the GPUs that a process sees, numbered from 0 in this order."""


_LISTED: Final = re.compile(r"^GPU (\d+):|^\s+MIG .*\(UUID: (MIG-[^)\s]+)\)", re.MULTILINE)
"""Lines of `nvidia-smi -L`: a GPU, and below it its MIG instances."""


def gpu_names(visible: str | None, num_files: int, listing: str = "") -> tuple[str, ...]:
    """Return the GPUs of this machine, as CUDA_VISIBLE_DEVICES names them. A GPU that is divided
    into MIG instances is left out, and each instance counts as a GPU.

    Args:
      visible: value of CUDA_VISIBLE_DEVICES; None if not set.
      num_files: number of GPU device files.
      listing: output of `nvidia-smi -L`; empty without that program.
    """
    if visible is not None:
        return tuple(name for part in visible.split(",") if (name := part.strip()))
    instances: dict[str, list[str]] = {str(number): [] for number in range(num_files)}
    number = ""
    for listed in _LISTED.finditer(listing):
        number = listed[1] or number
        if listed[2] and number in instances:
            instances[number].append(listed[2])
    return tuple(name for gpu, parts in instances.items() for name in parts or [gpu])


def own_gpus(device: str, workers: Sequence[str], gpus: Sequence[str]) -> dict[str, str]:
    """Assign each worker one GPU, the only one that it will see.

    Args:
      device: `cuda` distributes the workers over all GPUs; `cuda:N` puts them all on one.
      workers: names of the workers; assigned in turn, so that neighbours share a GPU last.
      gpus: GPUs of this machine; empty leaves the workers unassigned.

    Returns:
      The GPU of each worker; empty if unassigned.

    Raises:
      ConfigError: the GPU does not exist.
    """
    kind, _, number = device.partition(":")
    if kind != GPU or not gpus:
        return {}
    if not number:
        return {name: gpus[place % len(gpus)] for place, name in enumerate(workers)}
    if not number.isdecimal() or int(number) >= len(gpus):
        raise ConfigError(
            f"device is {device!r}; allowed: cpu, cuda, cuda:0 to cuda:{len(gpus) - 1}"
        )
    return dict.fromkeys(workers, gpus[int(number)])
