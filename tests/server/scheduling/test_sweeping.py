"""Tests of sweeps: few requests are all checked each time, many in turns, none twice per round."""

from __future__ import annotations

from server.contract.generation import FinishReason
from server.contract.request_events import RequestEvents
from server.scheduling.output import RelayEnd
from server.scheduling.request import MAX_SWEPT, MIN_SWEPT, SWEEP_TURNS, RequestTable

from .fakes import make_request, server_config
from .world import TEXT


def book_of(count: int) -> RequestTable:
    book = RequestTable(server_config(), TEXT, RequestEvents())
    for number in range(count):
        book.accept(make_request(number), now=0.0)
    return book


def test_few_are_all_looked_after_every_time() -> None:
    book = book_of(MIN_SWEPT)
    for _ in range(3):
        assert book.next_swept() == list(book)


def test_many_have_their_turns_and_newcomers_theirs() -> None:
    book = book_of(10 * MIN_SWEPT)
    first = list(book)
    swept = [request for _ in range(SWEEP_TURNS) for request in book.next_swept()]
    assert swept == first
    late = book.accept(make_request(10 * MIN_SWEPT), now=1.0)
    assert late in [request for _ in range(SWEEP_TURNS) for request in book.next_swept()]


def test_no_turn_is_longer_than_others_can_wait_for() -> None:
    book = book_of(SWEEP_TURNS * MAX_SWEPT + MIN_SWEPT)
    turns = [book.next_swept() for _ in range(SWEEP_TURNS + 1)]
    assert [len(turn) for turn in turns] == [MAX_SWEPT] * SWEEP_TURNS + [MIN_SWEPT]
    assert [request for turn in turns for request in turn] == list(book)


def test_who_has_ended_is_looked_after_no_more() -> None:
    book = book_of(4 * MIN_SWEPT)
    book.next_swept()
    gone = list(book)[MIN_SWEPT]
    book.finish(gone, RelayEnd(FinishReason.STOP), now=1.0)
    assert gone not in book.next_swept()
