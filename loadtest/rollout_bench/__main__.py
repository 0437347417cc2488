"""`python -m loadtest.rollout_bench`: real rollouts of candidates with and without faults.

One fleet serves 20 requests a second of 400 users on devices that only take time. One candidate
after the other is rolled out by 10, 50 and 100 %. Its devices break when it gets requests.

How to read the table: `found s` is the median time from the fault to the verdict; `late s` the
longest time from a verdict to the last new request to the candidate; `stable failed` counts failed
requests of the other version, `strays` users that went back to it, and answers of two versions
among the `resumed` ones.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import trio

from ..harness.control import admin_of
from ..harness.progress import progress
from ..harness.redis import is_installed
from ..harness.report import Ratio, Report, describe, run_bench
from ..harness.statistics import percentile
from .candidates import CANDIDATES, FIRST, GOOD, MODEL, write_versions
from .course import PLAN, Versions, middle, roll_out
from .fleet import bench_fleet
from .stores import measure_hosts, measure_journal
from .traffic import USERS, Users

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .candidates import Candidate
    from .course import Course
    from .fleet import BenchFleet

MAX_LATE_S: Final = 2.0
STORES: Final = "stores"
"""What `--only` calls the rollouts whose store goes away."""
MAX_STABLE_S: Final = 10.0
MAX_APART_S: Final = 1.0


@dataclass(slots=True)
class BenchRun:
    """A run of the benchmark.

    Attributes:
      candidates: candidates to roll out.
      folder: folder with models and logs.
      rounds: rollouts of each; None for those of the candidate.
      plan: fields of the orders that start them.
      settle_s: time of traffic before the first one; 0 for no objective for first tokens.
      has_costs: whether costs of versions are compared, which takes 90 s.
      has_stores: whether stores go away, too.
      courses: what happened, in order.
      stores: figures of stores that went away.
    """

    candidates: Sequence[Candidate]
    folder: Path
    rounds: int | None = None
    plan: Mapping[str, object] = field(default_factory=lambda: PLAN)
    settle_s: float = 10.0
    has_costs: bool = True
    has_stores: bool = False
    courses: list[Course] = field(default_factory=list)
    stores: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Roll all candidates out in one fleet, one after the other."""
        good = tuple(one for one in CANDIDATES if one.name == GOOD and self.has_stores)
        candidates = (*{*self.candidates, *good},)
        digests = write_versions(self.folder, candidates, has_costs=self.has_costs)
        ttft_s = None
        if self.settle_s:
            with bench_fleet(self.folder) as fleet:
                ttft_s = trio.run(self._usual_ttft_s, fleet)
            progress(f"objective for first tokens on this machine: {ttft_s:.3f} s")
        with bench_fleet(self.folder, ttft_s) as fleet:
            trio.run(self._roll_out, fleet, digests)
        if self.has_stores and is_installed():
            self.stores.append(measure_hosts(self.folder, digests))

    async def _usual_ttft_s(self, fleet: BenchFleet) -> float:
        """Return the time in which 95 % of the first version's first tokens come."""
        users = Users(fleet.process.url, 0)
        with trio.move_on_after(2 * self.settle_s):
            await users.run()
        times = [one.ttft_s for one in users.asked[USERS // 4 :] if one.ttft_s is not None]
        return percentile(times, 95)

    async def _roll_out(self, fleet: BenchFleet, digests: dict[str, str]) -> None:
        users, stable = Users(fleet.process.url, 1), FIRST
        async with admin_of(fleet.process.url) as admin, trio.open_nursery() as nursery:
            nursery.start_soon(users.run)
            await trio.sleep(self.settle_s)
            if self.has_stores:
                self.stores.append(await measure_journal(fleet, admin, users, digests[GOOD]))
            rounds = ([one] * (self.rounds or one.rounds) for one in self.candidates)
            for one in chain.from_iterable(rounds):
                # A version that was promoted can only be replaced by the one before.
                tag = FIRST if stable == one.name else one.name
                versions = Versions(digests[stable], digests[tag])
                ref = f"{MODEL}:{tag}"
                course = await roll_out(fleet, admin, users, one, versions, ref, self.plan)
                self.courses.append(course)
                progress(f"{one.name}: {course.phase} in step {course.step}: {course.said}")
                stable = tag if course.phase == "promoted" else stable
            nursery.cancel_scope.cancel()


def row_of(candidate: Candidate, courses: Sequence[Course]) -> dict[str, Any]:
    """Return a candidate's row of the table."""
    ends = Counter(one.phase for one in courses)
    return {
        "candidate": candidate.name,
        "rollouts": len(courses),
        "promoted": ends["promoted"],
        "rolled back": ends["rolled_back"],
        "paused": ends["paused"],
        "step": middle(one.step for one in courses),
        "found s": middle(one.found_s for one in courses),
        "late s": max(one.late_s for one in courses),
        "canary": middle(one.canary for one in courses),
        "canary failed": sum(one.failed for one in courses),
        "stable failed": sum(len(one.failed_stable) for one in courses),
        "strays": sum(len(one.strays) for one in courses),
        "resumed": sum(one.resumed for one in courses),
        "shadow": sum(one.pairs for one in courses),
    }


def goals_of(candidate: Candidate, courses: Sequence[Course]) -> dict[str, Ratio]:
    """Return a candidate's figures with their goals."""
    counts = {
        "shadow rows while requests waited": sum(one.waiting for one in courses),
        "traces of shadow copies": sum(one.leaks for one in courses),
        "strays": sum(len(one.strays) for one in courses),
        "failed requests of the stable version": sum(len(one.failed_stable) for one in courses),
        "failed requests": sum(one.failed for one in courses),
    }
    if candidate.is_killed:  # a killed server takes its streams along
        del counts["failed requests of the stable version"]
    if candidate.is_killed or not candidate.is_good:
        del counts["failed requests"]
    right = sum(one.phase in candidate.ends for one in courses) / len(courses)
    found_s, late_s = middle(one.found_s for one in courses), max(one.late_s for one in courses)
    goals = {"ended as they should": Ratio(right, floor=1.0)}
    goals |= {what: Ratio(number, ceiling=0) for what, number in counts.items()}
    goals["s from verdict to last request"] = Ratio(late_s, ceiling=MAX_LATE_S)
    if candidate.max_verdict_s is not None and found_s is not None:
        goals["s from fault to verdict"] = Ratio(found_s, ceiling=candidate.max_verdict_s)
    return {f"{candidate.name}: {what}": goal for what, goal in goals.items()}


def run(options: argparse.Namespace) -> Report:
    """Run the benchmark."""
    names = options.only.split(",") if options.only else []
    wanted = [one for one in CANDIDATES if not names or one.name in names]
    with TemporaryDirectory() as folder:
        bench = BenchRun(
            wanted,
            options.out or Path(folder),
            options.rounds,
            has_stores=not names or STORES in names,
        )
        bench.run()
    by_name = {
        one: [course for course in bench.courses if course.candidate == one.name] for one in wanted
    }
    goals: dict[str, Ratio] = {}
    for pair in by_name.items():
        goals |= goals_of(*pair)
    for row in bench.stores:
        goals[f"{row['store']}: s until stable"] = Ratio(row["stable after s"], None, MAX_STABLE_S)
        if row["apart s"] is not None:
            goals[f"{row['store']}: s of different routes"] = Ratio(
                row["apart s"], ceiling=MAX_APART_S
            )
    more = {"courses": [course.shown() for course in bench.courses], "stores": bench.stores}
    rows = [row_of(*pair) for pair in by_name.items()]
    shown = {name: table for name, table in more.items() if table}
    return Report("rollout", describe(1), rows or bench.stores, goals, {}, shown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.rollout_bench", description=__doc__)
    parser.add_argument("--only", default="", help="candidates, separated by commas")
    parser.add_argument("--rounds", type=int, help="rollouts of each candidate")
    parser.add_argument("--out", type=Path, help="folder for models and logs, kept afterwards")
    return run_bench(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
