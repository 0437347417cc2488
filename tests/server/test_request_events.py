"""Tests of request events: each handler receives them, even if another one raises."""

from __future__ import annotations

from dataclasses import replace

from structlog.testing import capture_logs

from server.contract.generation import Usage
from server.contract.request_events import (
    FirstTokenArrived,
    RequestAccepted,
    RequestEnded,
    RequestEvents,
)
from tests.server.scheduling.fakes import make_request
from tests.server.scheduling.world import World
from tests.server.support.request_lives import FACTS


def fail(event: object) -> None:
    raise RuntimeError(f"no room for {event is not None}")


def test_a_handler_that_raises_stops_no_stream_and_is_logged_once_in_ten() -> None:
    world, seen = World(), list[str]()
    for kind in (RequestAccepted, FirstTokenArrived, RequestEnded):
        world.events.subscribe(kind, fail)
        world.events.subscribe(kind, lambda event: seen.append(event.facts.request_id.hex()))
    with capture_logs() as logs:
        for number in range(12):
            world.submit(make_request(number, max_tokens=3))
        world.settle()
    world.check_idle()
    assert len(seen) == 3 * 12, "later handlers are called"
    failures = [line for line in logs if line["event"] == "request_event_handler_failed"]
    assert sorted((line["kind"], line["failures"]) for line in failures) == [
        (kind, count)
        for kind in ("FirstTokenArrived", "RequestAccepted", "RequestEnded")
        for count in (1, 10)
    ]
    assert {(line["handler"], line["error"]) for line in failures} == {("fail", "no room for True")}


def test_in_sums_the_first_of_several_completions_counts_their_prompt() -> None:
    usage = Usage(100, 7, cached_tokens=64)
    first = RequestEnded(replace(FACTS, request_id=b"1", prompt_id=b"1"), "stop", "", usage, 0.5)
    second = replace(first, facts=replace(first.facts, request_id=b"2"))
    assert (first.counted, second.counted) == (usage, Usage(0, 7))


def test_handlers_of_other_kinds_are_not_called() -> None:
    events = RequestEvents()
    events.subscribe(RequestEnded, fail)
    with capture_logs() as logs:
        events.publish(RequestAccepted(FACTS, 16))
    assert logs == []
