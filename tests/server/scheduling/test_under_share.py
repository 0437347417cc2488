"""Tests of tenants below their share: they go ahead of others and are charged for it."""

from __future__ import annotations

from itertools import count

from server.scheduling.admission import is_under_share
from server.scheduling.queue import UNKNOWN_TOKENS, FairQueue, QueuePlace
from triolet.config import QueueConfig
from triolet.service_class import Scheduling, ServiceClass

CONFIG = QueueConfig(expected_completion_tokens=10, completion_memory=0.0, head_start_tokens=100)
ORDERS = count(1)
FLOOD = Scheduling("flood")
QUIET = Scheduling("quiet")


def place(scheduling: Scheduling) -> QueuePlace:
    return QueuePlace(scheduling, 0, 9.0, next(ORDERS), 10, 10)


def flooded(queue: FairQueue[str], num_turns: int) -> None:
    """Flood the queue with one tenant's requests, and take turns."""
    for number in range(num_turns + 100):
        queue.add(f"flood {number}", place(FLOOD))
    for number in range(num_turns):
        queue.take(f"flood {number}")


def turns_of(queue: FairQueue[str], num_turns: int) -> list[tuple[str, bool]]:
    """Take turns; return each one's tenant and whether it was beyond its share."""
    turns = []
    for _ in range(num_turns):
        turn = queue.first()
        assert turn is not None
        turns.append((turn.split()[0], queue.is_over_share(turn)))
        queue.take(turn)
    return turns


def is_under_share_with(queue: FairQueue[str], scheduling: Scheduling, prompt_tokens: int) -> bool:
    """Ask for a new request with a completion of the usual length."""
    return is_under_share(queue, [QueuePlace(scheduling, 0, 9.0, 0, prompt_tokens, UNKNOWN_TOKENS)])


def test_a_burst_of_who_asks_for_little_goes_before_a_flood_and_is_computed_before_it() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    flooded(queue, 20)
    for number in range(5):
        assert is_under_share_with(queue, QUIET, 10)
        assert queue.tokens_ahead(place(QUIET)) == 10 * number
        queue.add(f"quiet {number}", place(QUIET))
    assert not is_under_share_with(queue, QUIET, 1)
    turns = turns_of(queue, 12)
    assert turns[:5] == [("quiet", False)] * 5
    assert turns[5:] == [("flood", True)] * 7


def test_who_asks_for_more_than_it_left_unused_is_ahead_of_nobody() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    flooded(queue, 20)
    for number in range(6):
        queue.add(f"quiet {number}", place(QUIET))
    assert {name for name, is_over_share in turns_of(queue, 12) if not is_over_share} <= {"quiet"}
    # Its lead is paid for: in the long run both have the same.
    for number in range(6, 60):
        queue.add(f"quiet {number}", place(QUIET))
    turns = turns_of(queue, 60)
    assert all(is_over_share for _, is_over_share in turns)
    assert 24 <= sum(name == "quiet" for name, _ in turns) <= 33


def test_alone_nobody_is_spared_but_its_first_ones_are_within_its_share() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    assert not is_under_share_with(queue, FLOOD, 1)
    for number in range(8):
        queue.add(f"flood {number}", place(FLOOD))
        assert not is_under_share_with(queue, FLOOD, 1)
        turns = turns_of(queue, 1)
        assert turns == [("flood", number >= 5)]
    assert is_under_share_with(queue, QUIET, 90)
    assert not is_under_share_with(queue, QUIET, 91)
    assert is_under_share_with(queue, Scheduling("quiet", weight=2.0), 190)


def test_a_flood_is_not_modest_in_a_moment_in_which_nothing_of_it_waits() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    queue.add("quiet 0", place(QUIET))
    for number in range(50):
        queue.add(f"flood {number}", place(FLOOD))
        queue.take(f"flood {number}")
    assert not is_under_share_with(queue, FLOOD, 1)
    assert not is_under_share_with(queue, FLOOD, 0)


def test_all_completions_of_one_request_count() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    queue.add("flood 0", place(FLOOD))
    assert is_under_share(queue, [QueuePlace(QUIET, 0, 9.0, 0, 10, 10)] * 5)
    assert not is_under_share(queue, [QueuePlace(QUIET, 0, 9.0, 0, 10, 10)] * 6)
    assert not is_under_share(queue, [QueuePlace(QUIET, 0, 9.0, 0, 10, 1000)] * 6), (
        "the tokens expected of it"
    )
    assert is_under_share(queue, [QueuePlace(QUIET, 0, 9.0, 0, 10, 1)] * 6)


def test_who_uses_all_of_its_share_one_by_one_is_ahead_of_nobody() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    flooded(queue, 1)
    num_ahead = 0
    for number in range(60):
        queue.add(f"even {number}", place(Scheduling("even")))
        name = ""
        while name != f"even {number}":
            name = str(queue.first())
            num_ahead += name == f"even {number}" and not queue.is_over_share(name)
            queue.take(name)
            queue.end(name, 10)
        queue.add(f"more {number}", place(FLOOD))
    assert num_ahead <= 6, "no more than its first credit, although it idles in between"


def test_what_is_left_unused_comes_back_as_others_are_served() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    flooded(queue, 1)
    for number in range(5):
        queue.add(f"quiet {number}", place(QUIET))
    turns_of(queue, 5)
    assert not is_under_share_with(queue, QUIET, 10)
    turns_of(queue, 10)  # the flooding tenant's, of 20 tokens each
    assert is_under_share_with(queue, QUIET, 50)


def test_who_left_all_of_it_unused_is_forgotten() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    flooded(queue, 1)
    for number in range(20):
        queue.add(f"once {number}", place(Scheduling(f"once {number}")))
        turns_of(queue, 2)
        queue.end(f"once {number}", 10)
        turns_of(queue, 4)
    assert len(queue.classes[ServiceClass.DEFAULT]) <= 6
