"""A benchmark's result: table, JSON, plot, and the ratios that it is judged by."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

BAR_HEIGHT: Final = 16
BAR_WIDTH: Final = 480
LABEL_WIDTH: Final = 320


@dataclass(frozen=True, slots=True)
class Ratio:
    """One number that says whether a goal is met.

    Attributes:
      value: what was measured.
      floor: it should be at least this; None if that is no goal.
      ceiling: it should be at most this; None if that is no goal.
    """

    value: float
    floor: float | None = None
    ceiling: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether it is."""
        return (self.floor is None or self.value >= self.floor) and (
            self.ceiling is None or self.value <= self.ceiling
        )

    @property
    def goal(self) -> str:
        """In words."""
        bounds = {"at least": self.floor, "at most": self.ceiling}
        return " and ".join(f"{word} {b}" for word, b in bounds.items() if b is not None)

    def fields(self) -> dict[str, float]:
        """As it is written."""
        bounds = {"floor": self.floor, "ceiling": self.ceiling}
        return {"value": round(self.value, 3)} | {k: v for k, v in bounds.items() if v is not None}


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a run found out.

    Attributes:
      name: of the benchmark; files are called by it.
      machine: see machine.describe.
      rows: measurements, all with the same fields.
      ratios: by name.
      skipped: peers that did not run, and why.
      plotted: the fields of a row that label its bar, and the one that is its length.
      more: further tables by name; written under their names.
    """

    name: str
    machine: dict[str, Any]
    rows: list[dict[str, Any]]
    ratios: dict[str, Ratio]
    skipped: dict[str, str]
    plotted: tuple[tuple[str, ...], str]
    more: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write NAME.json and NAME.svg; return the former's path."""
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
        labels, length = self.plotted
        bars = [(" ".join(str(row[name]) for name in labels), row[length]) for row in self.rows]
        (folder / f"{self.name}.svg").write_text(plot(f"{self.name}: {length}", bars))
        return path

    def show(self, console: Console) -> None:
        """Print the rows, the ratios and what was skipped."""
        machine = self.machine
        console.print(
            f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, "
            f"{' '.join(machine['instructions'])}, load {machine['load_average']:.1f}"
        )
        for name, rows in {self.name: self.rows, **self.more}.items():
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


def show_value(value: object) -> str:
    """Return a cell of the table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def plot(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return horizontal bars as SVG."""
    longest = max(length for _, length in bars)
    lines = [f'<text x="4" y="14" font-weight="bold">{escape(title)}</text>']
    for index, (label, length) in enumerate(bars):
        top = 24 + index * (BAR_HEIGHT + 4)
        width = BAR_WIDTH * length / longest
        lines += [
            f'<text x="{LABEL_WIDTH - 6}" y="{top + 12}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{top}" width="{width:.1f}" height="{BAR_HEIGHT}" '
            'fill="#4a7ab5"/>',
            f'<text x="{LABEL_WIDTH + width + 4:.1f}" y="{top + 12}">{length:,.0f}</text>',
        ]
    height = 28 + len(bars) * (BAR_HEIGHT + 4)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL_WIDTH + BAR_WIDTH + 80}" '
        f'height="{height}" font-family="sans-serif" font-size="12">\n' + "\n".join(lines) + "\n"
        "</svg>\n"
    )
