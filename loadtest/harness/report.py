"""Reports of benchmarks: the machine, a table, JSON, and ratios with their goals."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from ..harness.progress import announce

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence


_INTERESTING: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe(threads: int) -> dict[str, Any]:
    """Return the machine and its load."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = set(cpuinfo.partition("\nflags")[2].partition("\n")[0].split())
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "instructions": [flag for flag in _INTERESTING if flag in flags],
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


BENCH: Final = Path(__file__).parents[2] / "build" / "bench"
TABLE_WIDTH: Final = 170


@dataclass(frozen=True, slots=True)
class Ratio:
    """A measured number and its goal.

    Attributes:
      value: measured value.
      floor: minimum of the goal, or None.
      ceiling: maximum of the goal, or None.
    """

    value: float
    floor: float | None = None
    ceiling: float | None = None

    @property
    def is_met(self) -> bool:
        """Return whether the goal is met."""
        return (self.floor is None or self.value >= self.floor) and (
            self.ceiling is None or self.value <= self.ceiling
        )

    @property
    def goal(self) -> str:
        """The goal as text."""
        bounds = {"at least": self.floor, "at most": self.ceiling}
        return " and ".join(f"{word} {b}" for word, b in bounds.items() if b is not None)

    def fields(self) -> dict[str, float]:
        """The fields for JSON."""
        bounds = {"floor": self.floor, "ceiling": self.ceiling}
        return {"value": round(self.value, 3)} | {k: v for k, v in bounds.items() if v is not None}


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a run.

    Attributes:
      name: name of the benchmark and of its files.
      machine: result of `describe`.
      rows: measurements, all with the same fields.
      ratios: ratios by name.
      skipped: peers that did not run, with the reason.
      more: further tables by name.
      title: title of the table of rows; `name` if empty.
    """

    name: str
    machine: dict[str, Any]
    rows: list[dict[str, Any]]
    ratios: dict[str, Ratio]
    skipped: dict[str, str]
    more: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    title: str = ""

    def write(self, folder: Path) -> Path:
        """Write NAME.json and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        fields = {
            "machine": self.machine,
            "rows": self.rows,
            "ratios": {name: ratio.fields() for name, ratio in self.ratios.items()},
            "skipped": self.skipped,
            **self.more,
        }
        path.write_text(json.dumps(fields, indent=1) + "\n")
        return path

    def show(self, console: Console) -> None:
        """Print the rows, the ratios and the skipped peers."""
        machine = self.machine
        console.print(
            f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, "
            f"{' '.join(machine['instructions'])}, load {machine['load_average']:.1f}"
        )
        for name, rows in {self.title or self.name: self.rows, **self.more}.items():
            table = Table(*rows[0], title=name.replace("_", " "), title_justify="left")
            for row in rows:
                table.add_row(*(show_value(value) for value in row.values()))
            console.print(table)
        for name, ratio in self.ratios.items():
            verdict = "met" if ratio.is_met else "[red]missed[/red]"
            goal = f" ({ratio.goal}: {verdict})" if ratio.goal else ""
            console.print(f"{name}: {ratio.value:.2f}{goal}")
        for name, reason in self.skipped.items():
            console.print(f"{name} skipped: {reason}", markup=False)


def finish(report: Report, console: Console | None = None) -> int:
    """Print a report and write it to build/bench/. Return 1 if it missed a goal."""
    # A pipe has no width, and rich would assume a narrow terminal.
    console = console or Console(
        highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH
    )
    report.show(console)
    console.print(str(report.write(BENCH)))
    return 0 if all(ratio.is_met for ratio in report.ratios.values()) else 1


def run_bench(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], Report],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the command line, announce the benchmark, run it, and finish.

    Args:
      parser: parser with the description of the program.
      run: runs the benchmark.
      arguments: command-line arguments; None for those of this process.
    """
    options = parser.parse_args(arguments)
    announce(parser.description)
    return finish(run(options))


def line_of(row: Mapping[str, object]) -> str:
    """Return a row of a table as a line of progress."""
    return ", ".join(f"{name} {show_value(value)}" for name, value in row.items())


def show_value(value: object) -> str:
    """Return a cell of the table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)
