"""Which cores and which GPU each process of a fleet may use. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .process_spec import ProcessSpec


def own_cores(
    decode_names: Sequence[str], threads: int, cores: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Give each decode worker as many cores as it has threads, from the last on.

    What is left is for everybody else together: servers and prefill workers come and go with
    requests, and the kernel shares cores among such better than any plan. At least one must be
    left, for nobody could send what decode computes.

    Args:
      decode_names: of the decode workers.
      threads: of each worker.
      cores: that this process may use, whatever machine and container have more.

    Returns:
      Each decode worker's cores; nothing where there are too few.
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
    """Return the processes with their cores: their own, or what `pinned` leaves of all."""
    if not pinned:
        return list(specs)
    taken = {core for own in pinned.values() for core in own}
    rest = tuple(core for core in cores if core not in taken)
    return [replace(spec, cores=pinned.get(spec.name, rest)) for spec in specs]


GPU: Final = "cuda"
VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"
"""The CUDA driver's variable: which GPUs a process sees, numbered from 0 in this order."""


def gpu_names(visible: str | None, num_files: int) -> tuple[str, ...]:
    """Return the GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.

    Args:
      visible: that variable, None if it is not set.
      num_files: device files of GPUs.
    """
    if visible is None:
        return tuple(str(number) for number in range(num_files))
    return tuple(name for part in visible.split(",") if (name := part.strip()))


def own_gpus(device: str, workers: Sequence[str], gpus: Sequence[str]) -> dict[str, str]:
    """Give each worker one GPU, the only one that it then sees.

    Args:
      device: `cuda` spreads the workers over all GPUs in turn; `cuda:N` puts them all on one.
      workers: their names; neighbours share a GPU last.
      gpus: what this machine has; none known leaves every worker as it is.

    Returns:
      Each worker's GPU; nothing where they are left as they are.

    Raises:
      ConfigError: the device is a GPU that is not there.
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
