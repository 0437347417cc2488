"""`python -m loadtest.bench.admission`: the cost of admission control per request.

Times the product's own path from a request's key to its place in the queue, with every mechanism on
and off and with queues of several lengths; then dispatch and the end of requests; then refusals of
a real server over HTTP. Exits with 1 if one of them takes too long.
"""

from __future__ import annotations

import argparse
import gc
import io
import random
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio
from rich.console import Console

from server.main import GC_THRESHOLDS
from simulation.deterministic import run
from triolet.units import MILLISECONDS

from ..harness.progress import announce, progress
from ..harness.redis import is_installed, own_redis
from ..harness.report import Ratio, Report, describe, finish
from ..harness.statistics import percentile
from ..harness.streams import COMPLETIONS, Clients, StreamBrokenError, completion, post
from ..harness.tenants import key_of, write_tenants
from ..overload.real import RealShape, real_fleet
from .admission_server import DISPATCH, STEPS, Form, RunningServer, Stopwatch, running_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .admission_server import Lap


VIRTUAL_GAP_S: Final = 0.25
"""Virtual time between two requests: longer than an idle fleet takes for one, so that with an empty
queue they do not wait for one another either."""
REAL_GAP_S: Final = 10 * MILLISECONDS
"""The same in real time."""
CALM_S: Final = 2.0
"""After filling the queue: workers are busy and their pace is known."""
WARM: Final = 50
"""Requests that are not counted."""
FILL_TURN: Final = 100
"""Requests that fill the queue between two turns of the loop."""
OFF, ON = "off", "on"
OK, REFUSED = 200, 503


@dataclass(frozen=True, slots=True)
class Course:
    """One server and its requests.

    Attributes:
      form: configuration of the server.
      others: constant number of untimed requests in its queue.
      requests: number of timed requests.
    """

    form: Form
    others: int
    requests: int

    @property
    def gap_s(self) -> float:
        """Time between two requests."""
        return REAL_GAP_S if self.form.is_real else VIRTUAL_GAP_S


@dataclass(slots=True)
class Found:
    """Measurements for one kind of server and one queue length.

    Attributes:
      accepted: laps of accepted requests.
      refused: laps of refused requests.
      taken_ns: durations of steps that no single request waits for, by name.
      statuses: HTTP statuses of the answers before the end.
    """

    accepted: list[Lap] = field(default_factory=list)
    refused: list[Lap] = field(default_factory=list)
    taken_ns: dict[str, list[float]] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)

    def add(self, stopwatch: Stopwatch, statuses: Sequence[int]) -> None:
        """Add the measurements of a course."""
        for lap in stopwatch.laps:
            (self.refused if lap.is_refused else self.accepted).append(lap)
        for name, taken in stopwatch.taken_ns.items():
            self.taken_ns.setdefault(name, []).extend(taken)
        self.statuses += statuses


def measure(course: Course, into: Found) -> None:
    """Run one server to its end, and add its measurements."""
    with Stopwatch().running() as stopwatch, _as_a_server_does():
        main = partial(_go, course, stopwatch, into)
        if course.form.is_real:
            trio.run(main)
        else:
            run(main, course.form.seed)
    p99_us = spread([lap.whole_ns for lap in into.accepted])["p99_us"]
    state = "on" if course.form.is_on else "off"
    progress(f"{course.others:,} waiting, mechanisms {state}: p99 {p99_us:.0f} us")


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
    """Send requests one at a time and keep the queue at its length."""
    for _ in range(count):
        asking.start_soon(server.ask)
        await trio.sleep(course.gap_s)
        for _ in range(course.others - server.fleet.status().queued):
            await server.queue_other()


@contextmanager
def _as_a_server_does() -> Iterator[None]:
    """Collect garbage and write the log as a server process does, but discard the log."""
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
    """Discards everything written to it."""

    def write(self, text: str, /) -> int:
        """Discard the text."""
        return len(text)


def spread(taken_ns: Sequence[float]) -> dict[str, float | int]:
    """Return the count, median and 99th percentile of times, in microseconds."""
    p50, p99 = (percentile(taken_ns or [0.0], percent) for percent in (50, 99))
    return {"times": len(taken_ns), "p50_us": p50 / 1000, "p99_us": p99 / 1000}


def whole_row(what: str, waiting: int, server: str, laps: Sequence[Lap]) -> dict[str, Any]:
    """Return the row for whole paths."""
    whole = spread([lap.whole_ns for lap in laps])
    return {"what": what, "waiting": waiting, "mechanisms": server, **whole}


def step_rows(waiting: int, server: str, found: Found) -> list[dict[str, Any]]:
    """Return a row for each step of accepted requests, and for the steps after admission."""
    steps: dict[str, list[float]] = {
        step: [lap.steps[step] for lap in found.accepted if step in lap.steps]
        for step in (*STEPS, DISPATCH)
    }
    return [
        {"step": step, "waiting": waiting, "mechanisms": server, **spread(taken)}
        for step, taken in {**steps, **found.taken_ns}.items()
        if taken
    ]


OVERLOADED, LIMITED = 503, 429
FLOOD: Final = "flood"
TENANTS: Final = {OVERLOADED: "late", LIMITED: "limited"}
"""Tenants with refused requests, and the status of their refusals."""
PLANS: Final = {
    FLOOD: "",
    TENANTS[OVERLOADED]: 'classes = ["sheddable"]',
    TENANTS[LIMITED]: "requests_per_minute = 1",
}
FLOODERS: Final = 64
"""Clients of the tenant that exceeds its share: twice as many as the fleet has rows."""
WARM_S: Final = 8.0
"""Seconds until the server has measured the fleet's speed and its queue is full."""
GAP_S: Final = 0.03
"""Seconds between two timed requests, alternating between two tenants: 17 refusals a second of
each. Above 20 a second the server delays a tenant's refusals."""
LATE_S: Final = 30.0
"""Timeout of an answer. Requests that are not refused must end by themselves."""
FIRST_ID, LAST_ID = 256, 1000
PROMPT_TOKENS, MAX_TOKENS = 100, 20


async def time_refusals(requests: int) -> dict[int, list[float]]:
    """Run a fleet and return how many nanoseconds its refusals take, by status. See
    `ask_too_much`."""
    with TemporaryDirectory(prefix="admission-") as folder:
        tenants = write_tenants(Path(folder), PLANS)
        shape = RealShape(server_options=("--tenants", str(tenants)))
        with real_fleet(shape, Path(folder) / "logs") as fleet:
            return await ask_too_much(fleet.url, requests, WARM_S)


async def ask_too_much(url: str, requests: int, warm_s: float) -> dict[int, list[float]]:
    """Overload a server, and return the duration of its refusals in nanoseconds.

    Args:
      url: address of the server.
      requests: number of requests of each kind; accepted ones are not counted.
      warm_s: duration of the overload before measuring.

    Returns:
      Durations by status.
    """
    taken_ns: dict[int, list[float]] = {status: [] for status in TENANTS}
    async with (
        Clients(url, trio.current_time).reading() as clients,
        trio.open_nursery() as flood,
    ):
        for request in _bodies(FLOOD, FLOODERS):
            flood.start_soon(_keep_asking, clients, request)
        await trio.sleep(warm_s)
        bodies = {status: _bodies(name, requests) for status, name in TENANTS.items()}
        async with trio.open_nursery() as asking:
            for number in range(requests):
                for status, requests_of in bodies.items():
                    taken = taken_ns[status]
                    asking.start_soon(_time, clients, requests_of[number], taken, status)
                    await trio.sleep(GAP_S)
        flood.cancel_scope.cancel()
    return taken_ns


async def _time(clients: Clients, request: bytes, into: list[float], status: int) -> None:
    began_at = trio.current_time()
    with trio.move_on_after(LATE_S), suppress(StreamBrokenError):
        answer = await clients.ask(request)
        if answer.status == status:
            into.append((trio.current_time() - began_at) * 1e9)


async def _keep_asking(clients: Clients, request: bytes) -> None:
    """Send the next request after each answer, or after the refusal's Retry-After."""
    while True:
        answer = await clients.ask(request)
        await trio.sleep(answer.retry_after_s or 0.0)


def _bodies(tenant: str, count: int) -> list[bytes]:
    numbers = random.Random(tenant)
    headers = {"authorization": f"Bearer {key_of(tenant)}"}
    more = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}}

    def request() -> bytes:
        prompt = numbers.choices(range(FIRST_ID, LAST_ID), k=PROMPT_TOKENS)
        return post(COMPLETIONS, completion(prompt, MAX_TOKENS, **more), headers)

    return [request() for _ in range(count)]


WAITING: Final = (0, 1_000, 10_000)
MOST_US: Final = 1000.0
"""Limit for the whole path at the 99th percentile."""
MOST_REFUSAL_MS: Final = 50.0
ROUNDS: Final = 3
"""Rounds of each pair of servers, in turns, so that other load on the machine affects both."""
REAL_OFF, REAL_ON, REDIS = "off, real time", "on, real time", "on, real time, Redis"
WITHOUT: Final = {ON: OFF, REAL_ON: REAL_OFF}
"""The baseline of each server with admission control."""
READING: Final = (
    "whole: from the key check until the request is queued or refused, including everything "
    "in between except parsing the body and dispatch; p99 is "
    "the time that one in a hundred exceeds. 'more' is what the mechanisms add. Real time: one "
    "request every 10 ms, with cold CPU caches. steps: the same path by step, then "
    "the additional work: dispatch on arrival, starting waiting requests (for "
    "each, and when none could start), ends with their charges and log line, sweeps. refusals: a "
    "real server, from a client's first byte to the last byte of the answer."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1500, help="timed requests per server")
    parser.add_argument("--waiting", type=int, nargs="*", default=WAITING, help="others in queue")
    parser.add_argument("--refusals", type=int, default=1000, help="HTTP refusals of each kind")
    options = parser.parse_args(arguments)
    announce(__doc__)
    console = Console(highlight=False)
    skipped: dict[str, str] = {}
    found = time_paths(options.waiting, options.requests)
    time_in_real(found, options.requests)
    if not is_installed():
        skipped["accounts in Redis"] = "redis-server is not installed"
    else:
        with own_redis() as redis:
            form = Form(limits=redis.url, is_real=True)
            measure(Course(form, 0, options.requests), found.setdefault((0, REDIS), Found()))
    refusals = trio.run(time_refusals, options.refusals) if options.refusals else {}
    report = report_of(describe(1), found, refusals, skipped)
    console.print(READING)
    return finish(report, console)


def time_paths(
    waiting: Sequence[int], requests: int, rounds: int = ROUNDS
) -> dict[tuple[int, str], Found]:
    """Return the measurements of this process, by queue length and server."""
    found: dict[tuple[int, str], Found] = {}
    for others in waiting:
        for number in range(rounds):
            for name in (OFF, ON):
                form = Form(is_on=name == ON, seed=number)
                into = found.setdefault((others, name), Found())
                measure(Course(form, others, -(-requests // rounds)), into)
    return found


def time_in_real(found: dict[tuple[int, str], Found], requests: int, rounds: int = ROUNDS) -> None:
    """Add measurements in real time, with an empty queue and a request every few milliseconds."""
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
            title = f"p99 of the whole admission, us, {others:,} waiting ({name})"
            ratios[title] = Ratio(place["p99_us"], ceiling=MOST_US)
    said = [{"status": status, **_in_ms(taken)} for status, taken in refusals.items()]
    for row in said:
        name = f"p99 of a refusal over HTTP, ms, status {row['status']}"
        ratios[name] = Ratio(row["p99_ms"], ceiling=MOST_REFUSAL_MS)
    more = {"steps": steps} | ({"refusals": said} if said else {})
    return Report("admission", machine, rows, ratios, skipped, more)


def _in_ms(taken_ns: Sequence[float]) -> dict[str, float]:
    found = spread(taken_ns)
    return {
        "times": found["times"],
        "p50_ms": found["p50_us"] / 1000,
        "p99_ms": found["p99_us"] / 1000,
    }


if __name__ == "__main__":
    sys.exit(main())
