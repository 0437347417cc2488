"""Tests of the queue's estimate of the work ahead of a new request."""

from __future__ import annotations

from server.scheduling.queue import UNKNOWN_TOKENS, FairQueue
from triolet.service_class import Scheduling, ServiceClass

from .test_fair_queue import CONFIG, all_turns, place


def test_who_waits_by_its_own_limit_is_ahead_of_nobody_but_itself() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    full = Scheduling("full", max_running=1, service_class=ServiceClass.CRITICAL)
    for number in range(5):
        queue.add(f"full {number}", place(full, 100))
    line = queue.classes[ServiceClass.CRITICAL]
    assert line.ready_tokens() == 500
    queue.take("full 0")
    assert queue.first() is None
    assert (line.num_waiting, line.ready_tokens()) == (4, 0)
    assert queue.tokens_ahead(place(Scheduling("other"), 0, UNKNOWN_TOKENS)) == 0
    assert queue.tokens_ahead(place(Scheduling("full", max_running=1), 0, UNKNOWN_TOKENS)) == 400
    queue.end("full 0", 5)
    assert line.ready_tokens() == 400


def test_a_crowd_of_tenants_with_one_request_each_is_ahead_of_a_newcomer() -> None:
    queue: FairQueue[int] = FairQueue(CONFIG)
    for name in range(500):
        queue.add(name, place(Scheduling(f"tenant {name}"), 10))
    assert 2000 <= queue.tokens_ahead(place(Scheduling("new"))) <= 5000
    # It has less of them ahead, in proportion to how much larger they are.
    assert queue.tokens_ahead(place(Scheduling("new"), 1, 1)) < 1000


def test_who_had_one_stream_running_has_saved_nothing() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    keeps, busy, quiet = Scheduling("keeps"), Scheduling("busy"), Scheduling("quiet")
    queue.add("stream", place(keeps))
    queue.take("stream")
    for number in range(201):
        queue.add(f"busy {number}", place(busy))
    for number in range(200):
        assert queue.first() == f"busy {number}"
        queue.take(f"busy {number}")
        queue.end(f"busy {number}", 10)
    for number in range(200):
        queue.add(f"keeps {number}", place(keeps))
    queue.add("quiet", place(quiet))
    turns = all_turns(queue, until="quiet")
    assert len(turns) <= 2


def test_rows_that_a_higher_class_leaves_are_for_whoever_may_have_them() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    queue.note_pools(10**6, 16)
    loud, low = Scheduling("loud", service_class=ServiceClass.CRITICAL), Scheduling("low")
    queue.add("low 0", place(low))
    for number in range(32):
        queue.add(f"loud {number}", place(loud))
    turns = all_turns(queue, until="low 0")
    assert len(turns) == 14
    assert queue.first() == queue.first(is_aged_too=False) == "low 0"
    assert not queue.lets_pass("low 0"), "a higher class is paused, so none overtakes"


def test_who_comes_and_goes_while_others_stand_still_leaves_no_notes() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    queue.add("stands still", place(Scheduling("other")))
    queue.add("long", place(Scheduling("ahead")))
    queue.take("long")
    queue.end("long", 10)
    line = queue.classes[ServiceClass.DEFAULT]
    for _ in range(100):
        queue.add("again", place(Scheduling("ahead")))
        queue.end("again", 0)
    assert len(line) == 2
    assert len(line._idle) <= 2
