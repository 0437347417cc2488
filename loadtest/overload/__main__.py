"""`python -m loadtest.overload`: how a fleet behaves under overload.

First measures the capacity, with clients that send the next request after each answer. Then runs
open loops: half to ten times the capacity, with and without each mechanism; a minute of three times
the capacity between calm times; refused clients that retry after Retry-After; tenants that exceed
their share; real traces. Runs in virtual time and takes minutes, or with --real against processes
over HTTP. Writes build/bench/overload.json (or overload-real.json) and the curves.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
from rich.console import Console

from ..harness.progress import announce
from ..harness.report import BENCH, Report, describe
from . import plan
from .goals import Line, Panel, draw, ratios, row
from .lab import in_virtual_time, on_real_processes, real_capacity, virtual_capacity
from .lab_process import ALL, EVERYTHING, NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .lab import Result
    from .plan import Experiment

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
KINDS: Final = ("curve", "surge", "returns", "tenants", "trace")
WIDTH: Final = 240
"""Width of the tables, which have many columns."""
REAL_LOADS: Final = (1.0, 2.0, 4.0, 10.0)
NO_TENANTS: Final = "real processes of the lab have no tenants; see make bench-fairness"
PANELS: Final = (
    ("useful requests per second", "goodput_per_s", 1.0, None, None),
    ("useful tokens per second", "good_tokens_per_s", 1.0, None, None),
    ("TTFT of accepted, p50, s", "ttft_p50_s", 1.0, 8.0, 2.0),
    ("TTFT of accepted, p99, s", "ttft_p99_s", 1.0, 8.0, 2.0),
    ("critical class in SLO, %", "critical_in_slo", 100.0, None, 99.0),
    ("refused, %", "refused", 100.0, None, None),
    ("prefill never decoded, %", "wasted_prefill", 100.0, None, 2.0),
)
"""Panels of the curves: title, field, factor, end of the axis, and goal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments and report them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.overload", description=__doc__)
    parser.add_argument("--real", action="store_true", help="against processes, over HTTP")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--loads", nargs="+", type=float, help="multiples of the capacity")
    parser.add_argument("--mechanisms", nargs="+", choices=ALL, help="mechanisms of the curve")
    parser.add_argument("--capacity", type=float, help="requests per second, if known")
    parser.add_argument(
        "--processes", type=int, default=2, help="concurrent simulations, in virtual time"
    )
    parser.add_argument("--images", type=Path, help="folder for the curves")
    options = parser.parse_args(arguments)
    announce(__doc__)
    console = Console(highlight=False, soft_wrap=True, width=WIDTH)
    began_at = time.monotonic()
    machine = describe(1)
    capacity = options.capacity or _capacity(options)
    console.print(f"capacity: {capacity:.2f} requests per second")
    experiments, skipped = planned(options, capacity)
    results = _made(options, experiments, console.print)
    report = reported(results, machine | {"capacity_per_s": round(capacity, 3)}, skipped, options)
    report.write(BENCH)
    report.show(console)
    for result in results:
        for left in result.course.left:
            console.print(f"LEFT BEHIND by {result.experiment.case}: {left}", markup=False)
    if "curve" in options.kinds:
        picture = draw(panels(report.rows))
        for folder in filter(None, (BENCH, options.images)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{report.name}-curves.svg").write_text(picture)
    console.print(f"{len(results)} experiments in {time.monotonic() - began_at:.0f} s")
    return 0 if all(ratio.is_met for ratio in report.ratios.values()) else 1


def planned(
    options: argparse.Namespace, capacity: float
) -> tuple[list[Experiment], dict[str, str]]:
    """Return the selected experiments, and those that are skipped with the reason."""
    times = plan.SHORT if options.real else plan.Times()
    loads = options.loads or (REAL_LOADS if options.real else plan.LOADS)
    names = options.mechanisms or ((EVERYTHING, NOTHING) if options.real else ALL)
    traced, skipped = plan.traced(capacity, times) if "trace" in options.kinds else ([], {})
    kinds = list(options.kinds)
    if options.real:
        # Over HTTP tenants need keys, which the lab's fleets do not have.
        if "tenants" in kinds:
            kinds.remove("tenants")
            skipped["tenants"] = NO_TENANTS
        if any(one.case == plan.SERVEGEN for one in traced):
            traced = [one for one in traced if one.case != plan.SERVEGEN]
            skipped[plan.SERVEGEN] = NO_TENANTS
    makers: dict[str, Callable[[], list[Experiment]]] = {
        "curve": lambda: plan.curve(capacity, times, loads, names),
        "surge": lambda: plan.surge(capacity, times),
        "returns": lambda: plan.returns(capacity, times),
        "tenants": lambda: plan.tenants(capacity, times),
        "trace": lambda: traced,
    }
    return [one for kind in kinds for one in makers[kind]()], skipped


def reported(
    results: Sequence[Result],
    machine: dict[str, Any],
    skipped: dict[str, str],
    options: argparse.Namespace,
) -> Report:
    """Return the report's data."""
    return Report(
        name="overload-real" if options.real else "overload",
        machine=machine,
        rows=[row(result) for result in results],
        ratios=ratios(results),
        skipped=skipped,
    )


def panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    """Return the panels of the curve's rows."""
    of_curve = [found for found in rows if found["kind"] == "curve"]
    names = list(dict.fromkeys(found["mechanisms"] for found in of_curve))

    def line(name: str, what: str, factor: float) -> Line:
        points = [
            (found["load"], None if found[what] is None else factor * found[what])
            for found in of_curve
            if found["mechanisms"] == name
        ]
        return Line(name, sorted(points, key=lambda point: point[0]))

    return [
        Panel(title, [line(name, what, factor) for name in names], top, mark)
        for title, what, factor, top, mark in PANELS
    ]


def _capacity(options: argparse.Namespace) -> float:
    return trio.run(real_capacity, BENCH / "overload") if options.real else virtual_capacity()


def _made(
    options: argparse.Namespace, experiments: Sequence[Experiment], note: Callable[[str], None]
) -> list[Result]:
    if options.real:
        return trio.run(on_real_processes, experiments, BENCH / "overload", note)
    return in_virtual_time(experiments, options.processes)


if __name__ == "__main__":
    sys.exit(main())
