"""Which cores each process of a fleet may use, where decode is to have cores of its own. Pure."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .process_spec import ProcessSpec


class Pinning(StrEnum):
    """Whether decode workers are given cores of their own."""

    OFF = "off"
    AUTO = "auto"


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
