"""Reports a run of the fault matrix as a table and as JSON. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .matrix import Bound
from .outcomes import CANCEL_BOUND_S, OWNER_BOUND_S
from .phases import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .run_cell import CellResult

PERCENTILE = 99
PROMISES = (
    ("a cancel", Bound.CANCEL, CANCEL_BOUND_S),
    ("an owner's death", Bound.OWNER, OWNER_BOUND_S),
)


@dataclass(eq=False)
class Line:
    """All runs of one cell."""

    phase: Phase
    fault: str
    surfaces: str
    outcome: str
    bound: Bound
    runs: int = 0
    complaints: list[str] = field(default_factory=list)
    free_s: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def lines_of(results: Iterable[CellResult]) -> list[Line]:
    """Group runs by cell, in the order of the matrix."""
    lines: dict[str, Line] = {}
    for result in results:
        cell = result.cell
        surfaces = "+".join(sorted({surface.value for surface in cell.surfaces}))
        line = lines.setdefault(
            cell.name, Line(cell.phase, cell.fault, surfaces, cell.outcome.value, cell.bound)
        )
        line.runs += 1
        line.complaints += result.complaints
        line.free_s += result.free_s
        line.states += [result.state] if result.state else []
    order = list(Phase)
    return sorted(lines.values(), key=lambda line: order.index(line.phase))


def times_by_phase(lines: Iterable[Line], bound: Bound) -> dict[Phase, list[float]]:
    """Return the times of all cells with the same time bound."""
    times: dict[Phase, list[float]] = defaultdict(list)
    for line in lines:
        if line.bound is bound and line.free_s:
            times[line.phase] += line.free_s
    return times


def broken_bounds(lines: Iterable[Line]) -> list[str]:
    """Return the time bounds that were exceeded, by phase."""
    lines = list(lines)
    return [
        f"{phase.value}: {what} p{PERCENTILE} {_show(worst)} until free; promised: {_show(limit)}"
        for what, bound, limit in PROMISES
        for phase, times in times_by_phase(lines, bound).items()
        if (worst := percentile(times, PERCENTILE)) > limit
    ]


def summary_of(lines: Iterable[Line]) -> Table:
    """Return times and bounds, phase by phase."""
    lines = list(lines)
    table = Table(title="until KV is free", show_edge=False)
    for name in ("phase", "after", "promised"):
        table.add_column(name, no_wrap=True)
    for name in ("n", "p50", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in _summary(lines):
        table.add_row(*row)
    return table


def _summary(lines: Sequence[Line]) -> Iterator[tuple[str, ...]]:
    for what, bound, limit in PROMISES:
        for phase, times in times_by_phase(lines, bound).items():
            yield (phase.value, what, _show(limit), *_times(times))


def table_of(lines: Iterable[Line]) -> Table:
    """Return the table for people."""
    table = Table(title="phase x fault", show_edge=False)
    for name in ("phase", "fault", "over", "outcome"):
        table.add_column(name, no_wrap=True)
    for name in ("runs", "n", "p50", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for line in lines:
        verdict = "[red]FAILED[/red]" if line.complaints else "ok"
        table.add_row(line.phase.value, *_columns(line), verdict)
    return table


def markdown_of(lines: Sequence[Line]) -> str:
    """Return both tables as Markdown."""
    rows = ["| phase | after | promised | n | p50 | p99 | max |", "|---" * 7 + "|"]
    rows += ["| " + " | ".join(row) + " |" for row in _summary(lines)]
    rows += ["", "| phase | fault | over | outcome | runs | n | p50 | p99 | max | |"]
    rows.append("|---" * 10 + "|")
    for line in lines:
        verdict = "FAILED" if line.complaints else "ok"
        rows.append("| " + " | ".join((line.phase.value, *_columns(line), verdict)) + " |")
    return "\n".join(rows) + "\n"


def json_of(lines: Sequence[Line], broken: Sequence[str], took_s: float) -> dict[str, Any]:
    """Return everything as JSON values."""
    return {
        "took_s": round(took_s, 1),
        "ok": not broken and not any(line.complaints for line in lines),
        "broken_bounds": list(broken),
        "until_free_s": {
            bound.name.lower(): {
                phase.value: {
                    "n": len(times),
                    "p50": round(percentile(times, 50), 4),
                    "p99": round(percentile(times, PERCENTILE), 4),
                    "max": round(max(times), 4),
                }
                for phase, times in times_by_phase(lines, bound).items()
            }
            for _, bound, _ in PROMISES
        },
        "cells": [
            {
                "phase": line.phase.value,
                "fault": line.fault,
                "over": line.surfaces,
                "outcome": line.outcome,
                "runs": line.runs,
                "free_s": [round(value, 4) for value in line.free_s],
                "complaints": line.complaints,
                "states": line.states,
            }
            for line in lines
        ],
    }


def _columns(line: Line) -> tuple[str, ...]:
    return (line.fault, line.surfaces, line.outcome, str(line.runs), *_times(line.free_s))


def _times(times: Sequence[float]) -> tuple[str, ...]:
    if not times:
        return ("", "", "", "")
    shown = (percentile(times, 50), percentile(times, PERCENTILE), max(times))
    return (str(len(times)), *(_show(value) for value in shown))


def _show(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
