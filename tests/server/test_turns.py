"""Tests of fair turns between keys: the scheduling decisions, and the thread limiter that uses
them."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from server.text.turns import ALL_LINES, OWN_LINE, Job, LineFull, Turns, enter_line
from tests.server.support.held_work import HeldWork, held_work
from triolet.config import TurnsConfig
from triolet.errors import RequestError


def turns(slots: int = 1, *, waiting: int = 100, each: int = 100) -> Turns[str]:
    return Turns(slots, TurnsConfig(waiting, each, recent_s=10.0))


def begun(line: Turns[str], now: float) -> Job[str]:
    """Start the next job."""
    job = line.begin(now)
    assert job is not None
    return job


def test_a_key_with_long_jobs_gets_no_more_time_than_one_with_short_ones() -> None:
    line, now = turns(), 0.0
    seconds = {"long": 0.1, "short": 0.01}
    for key in seconds:
        for _ in range(50):
            line.join(key, key, now)
    used: Counter[str] = Counter()
    for _ in range(44):
        job = begun(line, now)
        now += seconds[job.key]
        used[job.key] += round(100 * seconds[job.key])
        line.end(job, now)
    assert abs(used["long"] - used["short"]) <= 10


def test_who_comes_first_beside_a_full_line_is_next() -> None:
    line = turns()
    for n in range(20):
        line.join("flood", str(n), 0.0)
    running = begun(line, 0.0)
    line.join("victim", "v", 0.05)
    line.end(running, 0.1)
    following = begun(line, 0.1)
    assert following.key == "victim"


def test_who_was_away_has_saved_nothing_up() -> None:
    line, now = turns(), 0.0
    for _ in range(10):
        line.join("a", "a", now)
        job = begun(line, now)
        now += 1.0
        line.end(job, now)
    for key in ("a", "b"):
        for _ in range(10):
            line.join(key, key, now)
    order = []
    for _ in range(6):
        job = begun(line, now)
        order.append(job.key)
        now += 1.0
        line.end(job, now)
    assert sorted(order[:2]) == sorted(order[2:4]) == ["a", "b"]


def test_jobs_without_length_are_begun_in_turns() -> None:
    line = turns()
    for key in ("a", "b", "c"):
        for _ in range(3):
            line.join(key, key, 0.0)
    order = []
    while (job := line.begin(0.0)) is not None:
        order.append(job.key)
        line.end(job, 0.0)
    assert order == ["a", "b", "c"] * 3


def test_one_key_leaves_a_slot_to_others_while_there_are_any() -> None:
    line = turns(slots=2)
    for n in range(5):
        line.join("flood", str(n), 0.0)
    alone = [line.begin(0.0), line.begin(0.0)]
    assert None not in alone, "a single key uses all slots"
    for job in alone:
        assert job is not None
        line.end(job, 1.0)
    line.join("victim", "v", 1.0)
    begun = [line.begin(1.0), line.begin(1.0)]
    assert {job.key for job in begun if job} == {"flood", "victim"}
    line.end(next(job for job in begun if job and job.key == "victim"), 1.1)
    assert line.begin(1.1) is None, "the flood has its slot, the other slot is kept for others"
    line.join("victim", "v", 2.0)
    assert line.begin(2.0) is not None
    assert line.begin(20.0) is None
    for job in begun:
        if job is not None and job.key == "flood":
            line.end(job, 20.0)
    assert line.begin(20.0) is not None


def test_a_key_fills_its_own_line_only_and_all_lines_have_a_bound() -> None:
    line = turns(waiting=3, each=2)
    for _ in range(2):
        line.join("flood", "f", 0.0)
    with pytest.raises(LineFull) as own:
        line.join("flood", "f", 0.0)
    line.join("victim", "v", 0.0)
    with pytest.raises(LineFull) as every:
        line.join("third", "t", 0.0)
    assert (own.value.line, every.value.line) == (OWN_LINE, ALL_LINES)
    assert line.refused == {OWN_LINE: 1, ALL_LINES: 1}


@given(st.lists(st.tuples(st.sampled_from("jble"), st.integers(0, 3)), max_size=80))
def test_whatever_happens_the_numbers_add_up(steps: list[tuple[str, int]]) -> None:
    line = turns(slots=2, waiting=6, each=3)
    waiting: list[Job[str]] = []
    running: list[Job[str]] = []
    for now, (what, number) in enumerate(steps):
        if what == "j":
            try:
                waiting.append(line.join(f"key {number}", "", float(now)))
            except LineFull:
                assert len(waiting) == 6 or sum(j.key == f"key {number}" for j in waiting) == 3
        elif what == "b" and (job := line.begin(float(now))) is not None:
            waiting.remove(job)
            running.append(job)
        elif what == "l" and waiting:
            line.leave(waiting.pop(number % len(waiting)))
        elif what == "e" and running:
            line.end(running.pop(number % len(running)), float(now))
        assert (line.num_waiting, line.num_running) == (len(waiting), len(running))
        assert len(running) <= 2


async def test_jobs_have_turns_by_the_line_of_their_tasks(
    autojump_clock: trio.testing.MockClock,
) -> None:
    order: list[str] = []

    async def work(held: HeldWork, key: str) -> None:
        enter_line(key)
        await held.do(order.append, key)

    async with held_work() as held, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(work, held, "flood")
        await held.waits(4)
        nursery.start_soon(work, held, "victim")
        await held.waits(5)
        await trio.sleep(1)
        held.let_all_go()
    assert order.index("victim") == 1
    assert (held.turns.num_running, held.turns.num_waiting) == (0, 0)


async def test_who_finds_a_line_full_is_told_whose_and_who_leaves_is_forgotten() -> None:
    turns = TurnsConfig(max_waiting=2, max_waiting_each=1)

    async def wait(held: HeldWork, key: str) -> None:
        enter_line(key)
        await held.do(len, key)

    async with held_work(turns=turns) as held, trio.open_nursery() as nursery:
        for number, key in enumerate(("first", "a", "b")):
            nursery.start_soon(wait, held, key)
            await held.waits(number)
            await trio.testing.wait_all_tasks_blocked()
        for key, status in (("a", 429), ("c", 503)):
            with pytest.raises(RequestError) as caught:
                await wait(held, key)
            assert (caught.value.status, caught.value.retry_after_s) == (status, 1.0)
        nursery.cancel_scope.cancel()
    assert held.turns.num_waiting == 0
