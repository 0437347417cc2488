"""Who asks for less than its share beside others: let past them, and paid for."""

from __future__ import annotations

from itertools import count

from server.fleet.fair_queue import FairQueue
from server.fleet.flow import Place
from server.fleet.newcomer import is_modest
from triolet.config_queue import QueueConfig
from triolet.service_class import Claim

CONFIG = QueueConfig(expected_completion_tokens=10, completion_memory=0.0, head_start_tokens=100)
ORDERS = count(1)


def place(claim: Claim) -> Place:
    return Place(claim, 0, 9.0, next(ORDERS), 10, 10)


def flooded(queue: FairQueue[str], num_turns: int) -> None:
    """Let one tenant flood, and give turns."""
    for number in range(num_turns + 100):
        queue.add(f"flood {number}", place(Claim("flood")))
    for number in range(num_turns):
        queue.take(f"flood {number}")


def turns_of(queue: FairQueue[str], num_turns: int) -> list[tuple[str, bool]]:
    """Give turns; return whose they were, and whether beyond their shares."""
    turns = []
    for _ in range(num_turns):
        turn = queue.first()
        assert turn is not None
        turns.append((turn.split()[0], queue.is_beyond(turn)))
        queue.take(turn)
    return turns


def test_a_burst_of_who_asks_for_little_goes_before_a_flood_and_is_computed_before_it() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    flooded(queue, 20)
    for number in range(5):
        assert is_modest(queue, Claim("quiet"), 20)
        assert queue.tokens_ahead(Claim("quiet"), 0, 9.0, 10, 10) == 10 * number
        queue.add(f"quiet {number}", place(Claim("quiet")))
    assert not is_modest(queue, Claim("quiet"), 20)
    assert not is_modest(queue, Claim("flood"))
    turns = turns_of(queue, 12)
    assert turns[:5] == [("quiet", False)] * 5
    assert turns[5:] == [("flood", True)] * 7


def test_who_asks_for_more_than_it_left_unused_is_ahead_of_nobody() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    flooded(queue, 20)
    for number in range(6):
        queue.add(f"quiet {number}", place(Claim("quiet")))
    assert {name for name, is_beyond in turns_of(queue, 12) if not is_beyond} == {"quiet"}
    # What it was ahead by is paid for: in the long run both have the same.
    for number in range(6, 60):
        queue.add(f"quiet {number}", place(Claim("quiet")))
    turns = turns_of(queue, 60)
    assert all(is_beyond for _, is_beyond in turns)
    assert 24 <= sum(name == "quiet" for name, _ in turns) <= 33


def test_alone_nobody_is_ahead_and_nobody_is_beyond_a_share_of_others() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    assert not is_modest(queue, Claim("a"))
    queue.add("a 0", place(Claim("a")))
    assert turns_of(queue, 1) == [("a", True)]
    assert is_modest(queue, Claim("b"), 100)
    assert not is_modest(queue, Claim("b"), 101)
    assert is_modest(queue, Claim("b", weight=2.0), 200)


def test_what_is_left_unused_comes_back_as_others_are_served() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    flooded(queue, 1)
    for number in range(5):
        queue.add(f"quiet {number}", place(Claim("quiet")))
    turns_of(queue, 5)
    assert not is_modest(queue, Claim("quiet"), 20)
    turns_of(queue, 10)  # the flood's, of 20 tokens each
    assert is_modest(queue, Claim("quiet"), 60)
