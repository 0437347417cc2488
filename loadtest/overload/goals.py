"""Judge results: a row per experiment, and the ratios with their goals. Pure."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from triolet.service_class import ServiceClass

from ..harness.report import Ratio
from .lab_process import EVERYTHING
from .outcomes import (
    figures,
    in_slo,
    jain,
    percentile,
    recovery_s,
    taken_at_return,
    tokens_by_tenant,
    wasted,
    within,
)
from .plan import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .lab import Result
    from .outcomes import Outcome


GOODPUT_FLOORS: Final = {2.0: 0.85, 4.0: 0.80}
"""Minimum goodput relative to that at 1x, by load."""
RETURNED_FLOOR: Final = 0.8
"""Minimum share of refused clients that are accepted when they return after exactly `Retry-After`.
The others may meet random bursts or higher classes."""
DROPPED_CEILINGS: Final = {2.0: 0.02}
"""Maximum share of accepted requests that are dropped, by load. Prediction errors of this size are
tolerated."""
NORMAL_TTFT: Final = 1.5
"""Factor on the median TTFT of calm times that counts as back to normal after a surge."""
TENANT_SPREAD: Final = 0.05


def counted(result: Result) -> list[Outcome]:
    """Return the outcomes within the counted time."""
    experiment = result.experiment
    return within(result.course.outcomes, experiment.begin_s, experiment.end_s)


def row(result: Result) -> dict[str, Any]:
    """Return an experiment's figures."""
    experiment, outcomes = result.experiment, counted(result)
    found = figures(outcomes, experiment.end_s - experiment.begin_s)
    critical = [o for o in outcomes if o.arrival.service_class is ServiceClass.CRITICAL]
    return {
        "kind": experiment.kind,
        "case": experiment.case,
        "mechanisms": experiment.mechanisms,
        "load": round(experiment.load, 2),
        "offered_per_s": _rounded(found.offered / (experiment.end_s - experiment.begin_s)),
        "goodput_per_s": _rounded(found.goodput),
        "good_tokens_per_s": _rounded(found.token_goodput),
        "refused": _rounded(found.refused),
        "dropped": _rounded(found.dropped),
        "dropped_of_accepted": _rounded(found.dropped_of_accepted),
        "failed": _rounded(found.failed),
        "ttft_p50_s": _rounded(found.ttft_p50_s),
        "ttft_p99_s": _rounded(found.ttft_p99_s),
        "ttft_p99_over_slo": _rounded(found.ttft_over_slo),
        "critical_in_slo": _rounded(in_slo(critical)) if critical else None,
        "refusal_p99_ms": _rounded(_ms(found.refusal_p99_s)),
        "wasted_prefill": _rounded(wasted(result.course.outcomes, result.course.prompt_tokens)),
        "left_over": len(result.course.left),
        "generator_late_p99_ms": _rounded(_ms(found.late_p99_s)),
        "generator_cores": _rounded(result.course.generator_cpu),
    }


def ratios(results: Sequence[Result]) -> dict[str, Ratio]:
    """Return all measured goals."""
    with_all = [result for result in results if result.experiment.mechanisms == EVERYTHING]
    found = dict(_of_curve([r for r in with_all if r.experiment.kind == "curve"]))
    for result in with_all:
        match result.experiment.kind:
            case "surge":
                found |= _of_surge(result)
            case "returns":
                found |= _of_returns(result)
    found |= _of_tenants({r.experiment.case: r for r in with_all if r.experiment.kind == "tenants"})
    found["experiments with leaked resources"] = Ratio(
        float(sum(bool(result.course.left) for result in results)), ceiling=0.0
    )
    return found


def _of_curve(results: Sequence[Result]) -> Iterator[tuple[str, Ratio]]:
    by_load = {result.experiment.load: result for result in results}
    if 1.0 not in by_load:
        return
    at_one = _goodput(by_load[1.0])
    for load, result in sorted(by_load.items()):
        outcomes = counted(result)
        if load in GOODPUT_FLOORS:
            share = _goodput(result) / at_one
            yield f"goodput at {load:g}x of that at 1x", Ratio(share, GOODPUT_FLOORS[load])
        elif load > 1.0:
            yield f"goodput at {load:g}x of that at 1x", Ratio(_goodput(result) / at_one)
        if load < 2.0:
            continue
        critical = [o for o in outcomes if o.arrival.service_class is ServiceClass.CRITICAL]
        found = figures(outcomes, 1.0)
        yield f"critical in SLO at {load:g}x", Ratio(in_slo(critical), floor=0.99)
        yield (
            f"p99 TTFT over SLO at {load:g}x",
            Ratio(found.ttft_over_slo or 0.0, ceiling=1.25),
        )
        yield (
            f"p99 of refusals at {load:g}x, ms",
            Ratio(1000 * (found.refusal_p99_s or 0.0), ceiling=50.0),
        )
        yield (
            f"dropped at {load:g}x of those accepted",
            Ratio(found.dropped_of_accepted, ceiling=DROPPED_CEILINGS.get(load)),
        )
        share = wasted(result.course.outcomes, result.course.prompt_tokens)
        yield f"prefill never decoded at {load:g}x", Ratio(share, ceiling=0.02)


def _of_surge(result: Result) -> dict[str, Ratio]:
    experiment, outcomes = result.experiment, result.course.outcomes
    before = within(outcomes, 0.0, experiment.begin_s)
    normal_s = percentile([o.first_s for o in before if o.first_s is not None], 0.5) or 0.0
    seconds = recovery_s(outcomes, experiment.end_s, NORMAL_TTFT * normal_s)
    after_s = max(o.arrival.at_s for o in outcomes) - experiment.end_s
    # Without a recovery the value is at least the time to the end of the run.
    return {
        "seconds to a normal median TTFT after a minute of 3x": Ratio(
            after_s if seconds is None else seconds, ceiling=5.0
        )
    }


def _of_returns(result: Result) -> dict[str, Ratio]:
    share = taken_at_return(result.course.outcomes)
    if share is None:
        return {}
    name = f"accepted at the first return, {result.experiment.case}"
    return {name: Ratio(share, floor=RETURNED_FLOOR)}


def _of_tenants(by_case: dict[str, Result]) -> dict[str, Ratio]:
    found: dict[str, Ratio] = {}
    if {"b alone", "b beside a"} <= by_case.keys():
        alone, beside = (_of_b(by_case[case]) for case in ("b alone", "b beside a"))
        found["tenant b's p99 TTFT beside a flood, over alone"] = Ratio(
            beside / alone, ceiling=1.10
        )
        found["tenant b's requests not answered beside a flood"] = Ratio(
            _not_answered(by_case["b beside a"]), ceiling=0.01
        )
    if "equal weights" in by_case:
        got = tokens_by_tenant(counted(by_case["equal weights"]))
        found["Jain's index at equal weights"] = Ratio(jain(list(got.values())), floor=0.95)
    if "weights 1:2:4" in by_case:
        got = tokens_by_tenant(counted(by_case["weights 1:2:4"]))
        whole, weights = sum(got.values()), sum(WEIGHTS.values())
        off = max(
            abs(got.get(name, 0) / whole / (weight / weights) - 1)
            for name, weight in WEIGHTS.items()
        )
        found["farthest from its share, weights 1:2:4"] = Ratio(off, ceiling=TENANT_SPREAD)
    return found


def _of_b(result: Result) -> float:
    outcomes = [o for o in counted(result) if o.arrival.tenant == "b"]
    return percentile([o.first_s for o in outcomes if o.first_s is not None], 0.99) or 0.0


def _not_answered(result: Result) -> float:
    outcomes = [o for o in counted(result) if o.arrival.tenant == "b"]
    return sum(o.first_s is None for o in outcomes) / max(len(outcomes), 1)


def _goodput(result: Result) -> float:
    return figures(counted(result), 1.0).goodput


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


WIDTH, HEIGHT = 360, 220
LEFT, TOP, RIGHT, BOTTOM = 52, 28, 12, 34
GAP: Final = 16
COLOURS: Final = ("#1b6ca8", "#c0392b", "#2e8b57", "#b8860b", "#7d3c98", "#566573")
LEGEND_LINE: Final = 18
LEGEND_WIDTH: Final = 190


class Line(NamedTuple):
    """A line of a panel.

    Attributes:
      name: name in the legend.
      points: (load, value) in order; points without a value are left out.
    """

    name: str
    points: Sequence[tuple[float, float | None]]


class Panel(NamedTuple):
    """A diagram.

    Attributes:
      title: title of the diagram.
      lines: lines, with the same names in all panels.
      top: maximum end of the axis; None for the largest value.
      mark: value of a thin horizontal line, or None.
    """

    title: str
    lines: Sequence[Line]
    top: float | None = None
    mark: float | None = None


def draw(panels: Sequence[Panel], columns: int = 3) -> str:
    """Return an SVG of panels with one legend. The load axis is logarithmic."""
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
    """Round a value up to 1, 2, 4 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value * (1 - 1e-9))
