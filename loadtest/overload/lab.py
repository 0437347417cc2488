"""Run experiments of the load lab, concurrently in virtual time or one by one on processes."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from simulation.campaign import keep_quiet
from simulation.fleet import FleetShape

from ..harness.progress import progress
from . import real as real_run
from . import virtual as virtual_run
from .lab_process import NOTHING, configured
from .plan import SIZES
from .real import RealShape, real_fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .plan import Experiment
    from .virtual import Course

CLIENTS: Final = 64
"""Concurrent clients while capacity is measured: twice the rows of a fleet."""
CAPACITY_S: Final = 60.0
REAL_CAPACITY_S: Final = 30.0


class Result(NamedTuple):
    """Result of an experiment."""

    experiment: Experiment
    course: Course


def virtual_capacity() -> float:
    """Return the requests per second that a virtual fleet answers."""
    keep_quiet()
    return virtual_run.capacity(_virtual(NOTHING), SIZES, CLIENTS, CAPACITY_S)


def in_virtual_time(experiments: Sequence[Experiment], num_processes: int) -> list[Result]:
    """Run experiments in virtual time and yield the results in order.

    Args:
      experiments: the experiments.
      num_processes: number of processes to use; 0 for this one.
    """
    if not num_processes:
        keep_quiet()
        return [_one(experiment) for experiment in experiments]
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes, initializer=keep_quiet) as pool:
        results = []
        for result in pool.imap(_one, experiments):
            results.append(result)
            one = result.experiment
            progress(f"{one.mechanisms}: {one.kind} {one.case} {one.load:.2f}x")
        return results


def _one(experiment: Experiment) -> Result:
    load = virtual_run.VirtualLoad(
        experiment.arrivals, experiment.schedulings, do_return=experiment.do_return
    )
    return Result(experiment, virtual_run.drive(_virtual(experiment.mechanisms), load))


def _virtual(name: str) -> FleetShape:
    shape = FleetShape()
    return replace(shape, server=configured(shape.server, name))


async def real_capacity(logs: Path) -> float:
    """Return the requests per second that a fleet of real processes answers."""
    with real_fleet(RealShape(mechanisms=NOTHING), logs / "capacity") as fleet:
        return await real_run.capacity(fleet, SIZES, CLIENTS, REAL_CAPACITY_S)


async def on_real_processes(
    experiments: Sequence[Experiment], logs: Path, note: Callable[[str], None]
) -> list[Result]:
    """Run experiments on real processes. Those with the same mechanisms share a fleet.

    Args:
      experiments: the experiments.
      logs: folder of the processes' output.
      note: called with a line about the next experiment.
    """
    results: list[Result] = []
    ordered = sorted(experiments, key=lambda experiment: experiment.mechanisms)
    for name, group in groupby(ordered, key=lambda experiment: experiment.mechanisms):
        with real_fleet(RealShape(mechanisms=name), logs / name.replace(" ", "-")) as fleet:
            for experiment in group:
                note(f"{name}: {experiment.kind} {experiment.case} {experiment.load:.2f}x")
                load = real_run.RealLoad(experiment.arrivals, do_return=experiment.do_return)
                results.append(Result(experiment, await real_run.drive(fleet, load)))
    return results
