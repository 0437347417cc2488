"""`python -m loadtest.bench.queue`: cost of one step of the fair queue with 100 to 10,000 requests.

Drives server/scheduling/queue.py directly: many tenants with skewed loads in every class, and one
tenant alone compared with the sorted list that would suffice for it. No processes, no network.
Exits with 1 if a step at the largest size costs too much.
"""

from __future__ import annotations

import argparse
import random
import sys
from bisect import insort
from statistics import mean
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from server.scheduling.queue import FairQueue, QueuePlace
from triolet.config import QueueConfig
from triolet.service_class import Scheduling, ServiceClass

from ..harness.progress import announce, progress
from ..harness.report import Ratio, Report, describe, finish
from ..harness.statistics import percentile

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES: Final = (100, 1_000, 10_000)
"""Queue sizes. A server's queue holds 1,024 requests."""
MOST_US: Final = 100.0
"""Limit for the mean of a step at the largest size."""
REPETITIONS: Final = 5_000
NUM_TENANTS: Final = 500


def place(rng: random.Random, order: int, num_tenants: int) -> QueuePlace:
    """Return a request of a random tenant. A few tenants send most requests."""
    tenant = min(int(rng.expovariate(8.0) * num_tenants), num_tenants - 1)
    service_class = ServiceClass.DEFAULT if num_tenants == 1 else ServiceClass(rng.randrange(4))
    scheduling = Scheduling(f"tenant {tenant}", 1.0 + tenant % 3, service_class)
    own = 0 if num_tenants == 1 else rng.choice((0, 0, 0, 1))
    return QueuePlace(
        scheduling, own, order + rng.uniform(0, 1000), order, rng.randint(1, 4000), 200
    )


class Timed:
    """Times calls by name, in nanoseconds."""

    def __init__(self) -> None:
        self.taken_ns: dict[str, list[int]] = {}

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        """Call a function and record its time."""
        before = perf_counter_ns()
        result = function(*args)
        self.taken_ns.setdefault(name, []).append(perf_counter_ns() - before)
        return result

    def rows(self, what: str, size: int) -> list[dict[str, Any]]:
        """Return a row for each name, and print the slowest."""
        rows: list[dict[str, Any]] = []
        for name, taken in self.taken_ns.items():
            rows.append(
                {
                    "queue": what,
                    "waiting": size,
                    "step": name,
                    "mean_us": mean(taken) / 1000,
                    "p50_us": percentile(taken, 50) / 1000,
                    "p99_us": percentile(taken, 99) / 1000,
                }
            )
        slowest_us = max(row["mean_us"] for row in rows)
        progress(f"{what}, {size:,} waiting: mean of the slowest step {slowest_us:.1f} us")
        return rows


def fair(size: int, num_tenants: int) -> list[dict[str, Any]]:
    """Time the fair queue at a constant size."""
    rng = random.Random(size)
    queue: FairQueue[int] = FairQueue(QueueConfig())
    queue.note_pools(10**9, 0)
    for order in range(size):
        queue.add(order, place(rng, order, num_tenants))
    timed = Timed()
    newest = size
    waiting = set(range(size))
    running: list[int] = []
    for _ in range(REPETITIONS):
        new = place(rng, newest, num_tenants)
        timed.call("tokens_ahead", queue.tokens_ahead, new)
        timed.call("add", queue.add, newest, new)
        waiting.add(newest)
        newest += 1
        turn = timed.call("first", queue.first)
        timed.call("take", queue.take, turn)
        waiting.remove(turn)
        running.append(turn)
        if len(running) > 64:
            over = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.2:
                timed.call("give_back", queue.give_back, over)
                queue.take(over)
            timed.call("end", queue.end, over, rng.randrange(300))
        # A request in the middle of the queue is cancelled, and another one arrives.
        gone = rng.randrange(newest)
        if gone in waiting:
            timed.call("cancel", queue.end, gone, 0)
            waiting.remove(gone)
            waiting.add(newest)
            queue.add(newest, place(rng, newest, num_tenants))
            newest += 1
    return timed.rows("fair, one tenant" if num_tenants == 1 else "fair, many tenants", size)


def plain(size: int) -> list[dict[str, Any]]:
    """Time a sorted list without tenants."""
    rng = random.Random(size)
    line = [(0, order, 1000) for order in range(size)]
    timed = Timed()

    def ahead(order: int) -> int:
        return sum(tokens for _, at, tokens in line if at < order)

    def take() -> None:
        del line[0]

    for order in range(size, size + REPETITIONS // 10):
        timed.call("tokens_ahead", ahead, order)
        timed.call("add", insort, line, (0, order, rng.randint(1, 4000)))
        timed.call("take", take)
    return timed.rows("sorted list", size)


def main() -> None:
    """Measure, write and show it."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    announce(__doc__)
    rows = [
        row for size in SIZES for row in (*plain(size), *fair(size, 1), *fair(size, NUM_TENANTS))
    ]
    of_fair = [row for row in rows if row["waiting"] == SIZES[-1] and "fair" in row["queue"]]
    ratios = {
        f"microseconds of {row['step']} at {SIZES[-1]:,} ({row['queue']})": Ratio(
            row["mean_us"], ceiling=MOST_US
        )
        for row in of_fair
    }
    report = Report("queue", describe(1), rows, ratios, {})
    sys.exit(finish(report))


if __name__ == "__main__":
    main()
