"""Lines as SVG: one figure over load, a line for each set of mechanisms. Pure text."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 360, 220
LEFT, TOP, RIGHT, BOTTOM = 52, 28, 12, 34
GAP: Final = 16
COLOURS: Final = ("#1b6ca8", "#c0392b", "#2e8b57", "#b8860b", "#7d3c98", "#566573")
LEGEND_LINE: Final = 18
LEGEND_WIDTH: Final = 190


class Line(NamedTuple):
    """One line.

    Attributes:
      name: in the legend.
      points: (load, value), in order; those without a value are left out.
    """

    name: str
    points: Sequence[tuple[float, float | None]]


class Panel(NamedTuple):
    """One figure.

    Attributes:
      title: above.
      lines: all with the same names.
      top: the axis ends here at the latest; None for the largest value.
      mark: a value that a thin line shows; None for none.
    """

    title: str
    lines: Sequence[Line]
    top: float | None = None
    mark: float | None = None


def draw(panels: Sequence[Panel], columns: int = 3) -> str:
    """Return panels side by side, above one legend. Load is drawn by its logarithm."""
    num_rows = -(-len(panels) // columns)
    names = [line.name for line in panels[0].lines]
    legend_columns = max(1, (columns * (WIDTH + GAP)) // LEGEND_WIDTH)
    legend_height = LEGEND_LINE * -(-len(names) // legend_columns)
    width, height = columns * (WIDTH + GAP), num_rows * (HEIGHT + GAP) + legend_height + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for index, panel in enumerate(panels):
        x, y = index % columns * (WIDTH + GAP), index // columns * (HEIGHT + GAP)
        parts.append(f'<g transform="translate({x},{y})">{_panel(panel)}</g>')
    for index, name in enumerate(names):
        x = 12 + index % legend_columns * LEGEND_WIDTH
        y = num_rows * (HEIGHT + GAP) + 10 + index // legend_columns * LEGEND_LINE
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<path d="M{x} {y}h22" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 28}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel) -> str:
    loads = [load for line in panel.lines for load, _ in line.points]
    values = [value for line in panel.lines for _, value in line.points if value is not None]
    first, last = min(loads, default=1.0), max(loads, default=1.0)
    top = _round_up(min(max(values, default=1.0), panel.top or math.inf) or 1.0)
    span = max(math.log(last / first), 1e-9)
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(load: float, value: float) -> tuple[float, float]:
        x = LEFT + inner_width * math.log(load / first) / span
        return x, TOP + inner_height * (1 - min(value, top) / top)

    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(panel.title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = at(first, share * top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e0e0e0"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * top:g}</text>'
        )
    for load in sorted(set(loads)):
        x, _ = at(load, 0.0)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{load:g}</text>'
        )
    if panel.mark is not None and panel.mark <= top:
        _, y = at(first, panel.mark)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#444" stroke-dasharray="4 3"/>'
        )
    for index, line in enumerate(panel.lines):
        points = [at(load, value) for load, value in line.points if value is not None]
        if points:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            colour = COLOURS[index % len(COLOURS)]
            parts.append(
                f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" '
                'stroke-linejoin="round"/>'
            )
    return "".join(parts)


def _round_up(value: float) -> float:
    """Return 1, 2, 4 or 8 times a power of ten that is not below a value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value * (1 - 1e-9))
