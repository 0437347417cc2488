"""Tests of decode rows that tenants leave free for each other."""

from __future__ import annotations

from server.scheduling.queue import FairQueue
from triolet.service_class import Scheduling

from .test_fair_queue import CONFIG, next_turn, place


def full_of(queue: FairQueue[str], scheduling: Scheduling, count: int) -> list[str]:
    """Queue far too many requests of one tenant, and return those that may run."""
    for number in range(count):
        queue.add(f"{scheduling.tenant} {number}", place(scheduling))
    turns = []
    while (turn := queue.first()) is not None and turn.startswith(scheduling.tenant):
        queue.take(turn)
        turns.append(turn)
    return turns


def test_who_is_alone_has_every_row() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    queue.note_pools(10**6, 16)
    assert len(full_of(queue, Scheduling("alone"), 16)) == 16


def test_who_has_its_share_leaves_rows_for_others_that_come_now_and_then() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    queue.note_pools(10**6, 16)
    queue.add("quiet", place(Scheduling("quiet")))
    queue.take("quiet")
    queue.end("quiet", 3)
    turns = full_of(queue, Scheduling("loud"), 32)
    assert len(turns) == 14
    queue.add("quiet", place(Scheduling("quiet")))
    assert queue.first() == "quiet"
    queue.take("quiet")
    queue.end("quiet", 3)
    for turn in turns:
        assert queue.first() is None
        queue.end(turn, 3)
        next_turn(queue)
