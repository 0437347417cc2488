"""`python -m loadtest.bench.admission`: what it costs a request that somebody decides on it.

Times the product's own way from a request's key to its place in the queue, with every mechanism
on and with every one off, beside queues of several lengths; then what dispatch and the end of a
request take; then refusals of a real server over HTTP. Exits with 1 if one of them takes too long.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

import trio
from rich.console import Console

from .admission_path import OFF, ON, Course, Found, measure, spread, step_rows, whole_row
from .admission_refusals import time_refusals
from .admission_server import Form
from .engines import BENCH
from .machine import describe
from .own_redis import is_installed, own_redis
from .report import Ratio, Report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WAITING: Final = (0, 1_000, 10_000)
MOST_US: Final = 1000.0
"""Of the whole way at the 99th percentile."""
MOST_REFUSAL_MS: Final = 50.0
ROUNDS: Final = 3
"""Of each two servers, one after the other: what the machine does besides meets both."""
REAL_OFF, REAL_ON, REDIS = "off, real time", "on, real time", "on, real time, Redis"
WITHOUT: Final = {ON: OFF, REAL_ON: REAL_OFF}
"""With what each server that decides is compared."""
READING: Final = (
    "whole: from the key's check until the request has its place in the queue or its refusal, all "
    "that is in between but for parsing the body and for looking who may leave the queue; p99 is "
    "what one in a hundred takes longer than. 'more' is what the mechanisms add. Real time: one "
    "request every 10 ms, with nothing in a processor's caches. steps: the same in its parts, then "
    "what comes on top: looking for room when a request has come, beginning those who wait (of "
    "each, and where nobody could go), ends with their charges and log line, sweeps. refusals: a "
    "real server, from a client's first byte to the last of the answer."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1500, help="timed, of each server")
    parser.add_argument("--waiting", type=int, nargs="*", default=WAITING, help="others in queue")
    parser.add_argument("--refusals", type=int, default=1000, help="over HTTP, of each kind")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    skipped: dict[str, str] = {}
    found = time_paths(options.waiting, options.requests)
    time_in_real(found, options.requests)
    if not is_installed():
        skipped["accounts in Redis"] = "there is no redis-server here"
    else:
        with own_redis() as redis:
            form = Form(limits=redis.url, is_real=True)
            measure(Course(form, 0, options.requests), found.setdefault((0, REDIS), Found()))
    refusals = trio.run(time_refusals, options.refusals) if options.refusals else {}
    report = report_of(describe(1), found, refusals, skipped)
    report.show(console)
    console.print(READING)
    report.write(BENCH)
    return 0 if all(ratio.is_met for ratio in report.ratios.values()) else 1


def time_paths(
    waiting: Sequence[int], requests: int, rounds: int = ROUNDS
) -> dict[tuple[int, str], Found]:
    """Return what was timed in this process, by the length of the queue and by server."""
    found: dict[tuple[int, str], Found] = {}
    for others in waiting:
        for number in range(rounds):
            for name in (OFF, ON):
                form = Form(is_on=name == ON, seed=number)
                into = found.setdefault((others, name), Found())
                measure(Course(form, others, -(-requests // rounds)), into)
    return found


def time_in_real(found: dict[tuple[int, str], Found], requests: int, rounds: int = ROUNDS) -> None:
    """Add the same where nobody waits, one request every few milliseconds."""
    for number in range(rounds):
        for name in (REAL_OFF, REAL_ON):
            form = Form(is_on=name == REAL_ON, is_real=True, seed=number)
            into = found.setdefault((0, name), Found())
            measure(Course(form, 0, -(-requests // rounds)), into)


def report_of(
    machine: dict[str, Any],
    found: Mapping[tuple[int, str], Found],
    refusals: Mapping[int, Sequence[float]],
    skipped: dict[str, str],
) -> Report:
    """Return rows, steps and ratios."""
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    for (others, name), one in found.items():
        place = whole_row("a place", others, name, one.accepted)
        rows.append(place)
        if one.refused and name in WITHOUT:
            rows.append(whole_row("a refusal", others, name, one.refused))
        steps += step_rows(others, name, one)
        if name in WITHOUT:
            of_off = whole_row("", others, "", found[others, WITHOUT[name]].accepted)
            rows.append(
                {
                    "what": "more",
                    "waiting": others,
                    "mechanisms": f"{name} - off",
                    "times": 0,
                    "p50_us": place["p50_us"] - of_off["p50_us"],
                    "p99_us": place["p99_us"] - of_off["p99_us"],
                }
            )
            title = f"p99 of the whole way to a place, us, {others:,} waiting ({name})"
            ratios[title] = Ratio(place["p99_us"], ceiling=MOST_US)
    said = [{"status": status, **_in_ms(taken)} for status, taken in refusals.items()]
    for row in said:
        name = f"p99 of a refusal over HTTP, ms, status {row['status']}"
        ratios[name] = Ratio(row["p99_ms"], ceiling=MOST_REFUSAL_MS)
    more = {"steps": steps} | ({"refusals": said} if said else {})
    plotted = (("what", "waiting", "mechanisms"), "p99_us")
    return Report("admission", machine, rows, ratios, skipped, plotted, more)


def _in_ms(taken_ns: Sequence[float]) -> dict[str, float]:
    found = spread(taken_ns)
    return {
        "times": found["times"],
        "p50_ms": found["p50_us"] / 1000,
        "p99_ms": found["p99_us"] / 1000,
    }


if __name__ == "__main__":
    sys.exit(main())
