"""What a request's way into the queue takes, with everything that decides on it and with nothing.

One server after another in this process, in virtual time: between two requests all tasks wait, so
that what is timed is what is computed for one of them. Or in real time, in which a processor that
had nothing to do for a while has forgotten some of what it needs; with accounts in Redis there is
no other. Knows who comes and how often; the steps are admission_stopwatch's.
"""

from __future__ import annotations

import gc
import io
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ops.simulation.deterministic import run
from server.main import GC_THRESHOLDS
from triolet.units import MILLISECONDS

from .admission_server import Form, RunningServer, running_server
from .admission_stopwatch import DISPATCH, STEPS, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .admission_stopwatch import Lap

VIRTUAL_GAP_S: Final = 0.25
"""Of virtual time between two requests: longer than a fleet with nothing else to do takes for one,
so that where nobody else waits none of these wait for one another either."""
REAL_GAP_S: Final = 10 * MILLISECONDS
"""The same where the time has to pass."""
CALM_S: Final = 2.0
"""After the queue was filled: workers have what they take, and their pace is known."""
WARM: Final = 50
"""Requests that nobody counts."""
FILL_TURN: Final = 100
"""Of those who fill the queue come between two turns of the loop."""
OFF, ON = "off", "on"
OK, REFUSED = 200, 503


@dataclass(frozen=True, slots=True)
class Course:
    """One server and who comes to it.

    Attributes:
      form: of the server.
      others: that wait in its queue, all the time.
      requests: that are timed.
    """

    form: Form
    others: int
    requests: int

    @property
    def gap_s(self) -> float:
        """Between two requests."""
        return REAL_GAP_S if self.form.is_real else VIRTUAL_GAP_S


@dataclass(slots=True)
class Found:
    """What was timed, of one kind of server and one length of its queue.

    Attributes:
      accepted: requests that got a place.
      refused: those that got none.
      taken_ns: of what no single request waits for, by name.
      statuses: of the answers that came before the end.
    """

    accepted: list[Lap] = field(default_factory=list)
    refused: list[Lap] = field(default_factory=list)
    taken_ns: dict[str, list[float]] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)

    def add(self, stopwatch: Stopwatch, statuses: Sequence[int]) -> None:
        """Take in a course."""
        for lap in stopwatch.laps:
            (self.refused if lap.is_refused else self.accepted).append(lap)
        for name, taken in stopwatch.taken_ns.items():
            self.taken_ns.setdefault(name, []).extend(taken)
        self.statuses += statuses


def measure(course: Course, into: Found) -> None:
    """Run one server to its end."""
    with Stopwatch().running() as stopwatch, _as_a_server_does():
        main = partial(_go, course, stopwatch, into)
        if course.form.is_real:
            trio.run(main)
        else:
            run(main, course.form.seed)


async def _go(course: Course, stopwatch: Stopwatch, into: Found) -> None:
    async with running_server(course.form) as server:
        gc.collect()
        gc.freeze()
        for number in range(course.others):
            await server.queue_other()
            if number % FILL_TURN == 0:
                await trio.lowlevel.checkpoint()
        await trio.sleep(CALM_S)
        async with trio.open_nursery() as asking:
            await _come(server, course, WARM, asking)
            stopwatch.forget()
            server.statuses.clear()
            await _come(server, course, course.requests, asking)
            into.add(stopwatch, server.statuses)
            asking.cancel_scope.cancel()


async def _come(server: RunningServer, course: Course, count: int, asking: trio.Nursery) -> None:
    """Let some ask, one after the other, and the queue be as long as it was."""
    for _ in range(count):
        asking.start_soon(server.ask)
        await trio.sleep(course.gap_s)
        for _ in range(course.others - server.fleet.status().queued):
            await server.queue_other()


@contextmanager
def _as_a_server_does() -> Iterator[None]:
    """Collect garbage and write the log as a server's process does; nobody reads the latter."""
    before = gc.get_threshold()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(default=repr),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.WriteLoggerFactory(_Nowhere()),
    )
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        structlog.reset_defaults()


class _Nowhere(io.StringIO):
    """Takes lines and keeps none."""

    def write(self, text: str, /) -> int:
        """Forget it."""
        return len(text)


def spread(taken_ns: Sequence[float]) -> dict[str, float | int]:
    """Return how many times, their median and their 99th percentile, in microseconds."""
    p99 = quantiles(taken_ns, n=100)[98] if len(taken_ns) > 1 else max(taken_ns, default=0.0)
    p50 = median(taken_ns) if taken_ns else 0.0
    return {"times": len(taken_ns), "p50_us": p50 / 1000, "p99_us": p99 / 1000}


def whole_row(what: str, waiting: int, server: str, laps: Sequence[Lap]) -> dict[str, Any]:
    """Return the row of whole ways."""
    whole = spread([lap.whole_ns for lap in laps])
    return {"what": what, "waiting": waiting, "mechanisms": server, **whole}


def step_rows(waiting: int, server: str, found: Found) -> list[dict[str, Any]]:
    """Return a row for each step of those who got a place, and for what comes after it."""
    steps: dict[str, list[float]] = {
        step: [lap.steps[step] for lap in found.accepted if step in lap.steps]
        for step in (*STEPS, DISPATCH)
    }
    return [
        {"step": step, "waiting": waiting, "mechanisms": server, **spread(taken)}
        for step, taken in {**steps, **found.taken_ns}.items()
        if taken
    ]
