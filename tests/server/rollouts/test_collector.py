"""Tests of what control is told about requests and workers of models with a rollout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_fields

from server.contract.generation import AssignedVersion, Usage
from server.contract.request_events import RequestEnded, RequestEvents
from server.rollouts.collector import AT_ONCE, RolloutCollector
from server.scheduling.status import Observer
from server.slo.meter import SloMeter
from tests.server.slo.test_meter import OBJECTIVES
from tests.server.support.request_lives import FACTS
from transport.control_protocol import MAX_MESSAGE_BYTES, Observed, encoded
from transport.rollout_protocol import FinishedRequest, RolloutPhase, RolloutView, SeenIncident
from triolet.config.routes import RoutesConfig

VIEW = RolloutView("r", "chat", "old", "new", "", RolloutPhase.CANARY, 1, (0.1, 1.0), 0.0, "")
ASSIGNED = AssignedVersion("chat", "new", 7, 50.0)
ABOVE = 2 * SloMeter(OBJECTIVES).slow_gap_s
USAGE = Usage(3, 5, queue_s=1.0, ttft_s=1.25)


def collector(most: int = 100) -> RolloutCollector:
    found = RolloutCollector(RoutesConfig(max_observed=most), SloMeter(OBJECTIVES), lambda: 60.0)
    found.hear((VIEW,))
    return found


def ended(status: int = 200, usage: Usage = USAGE, **facts: object) -> RequestEnded:
    of = replace(FACTS, assigned=ASSIGNED, **facts)  # type: ignore[arg-type]
    return RequestEnded(of, "stop", "decoding", usage, 9.0, status=status)


def seen(one: RolloutCollector) -> tuple[FinishedRequest, ...]:
    return tuple(request for message in one.take("server") for request in message.requests)


def test_a_request_is_told_once_with_its_times_without_the_queue() -> None:
    one, events = collector(), RequestEvents()
    one.watch("new", events, Observer())
    events.publish(ended())
    [message] = one.take("server")
    request = FinishedRequest(7, "new", 50.0, 60.0, frozenset(), {"ttft": 0.25})
    assert message == Observed("server", (request,))
    assert one.take("server") == []


@pytest.mark.parametrize(
    ("status", "missed"),
    [
        *((status, "errors") for status in (500, 503, 504)),
        *((status, "rejected") for status in (400, 404)),
        *((status, "") for status in (200, 403, 408, 429, 499)),
    ],
)
def test_what_a_status_says_about_a_version(status: int, missed: str) -> None:
    one = collector()
    one.ended(ended(status))
    [request] = seen(one)
    assert request.missed == {missed} - {""}
    one.refused(ASSIGNED, status)
    found = [(request.missed, request.seconds) for request in seen(one)]
    assert found == ([({missed}, {})] if missed else []), "a refusal that is the client's own"


@pytest.mark.parametrize(
    ("slow_gaps", "completion_tokens", "is_streamed", "itl"),
    [
        (0, 5, True, 0.0),
        (1, 5, True, ABOVE),
        (1, 101, True, 0.0),
        (2, 101, True, ABOVE),
        (1, 1, True, None),
        (1, 5, False, None),
    ],
)
def test_gaps_are_above_the_objective_or_not(
    slow_gaps: int, completion_tokens: int, is_streamed: bool, itl: float | None
) -> None:
    one = collector()
    usage = replace(USAGE, slow_gaps=slow_gaps, completion_tokens=completion_tokens)
    one.ended(ended(usage=usage, is_streamed=is_streamed))
    [request] = seen(one)
    assert request.seconds.get("itl") == itl


def test_a_client_that_leaves_without_a_token_has_waited() -> None:
    one, usage = collector(), replace(USAGE, ttft_s=None)
    for event in (ended(499, usage), ended(504, usage), replace(ended(499, usage), is_begun=False)):
        one.ended(event)
    assert [request.seconds for request in seen(one)] == [{"ttft": 8.0}, {}, {}]


def test_only_models_with_a_rollout_count() -> None:
    one = collector()
    one.ended(replace(ended(), facts=FACTS))
    one.note_incident("other", "tcp://a")
    one.hear(())
    one.ended(ended())
    one.refused(ASSIGNED, 500)
    one.note_incident("new", "tcp://a")
    assert one.take("server") == []


def test_a_flood_drops_the_oldest() -> None:
    one = collector(most=3)
    for user in range(5):
        one.refused(ASSIGNED._replace(user=user), 500)
    [message] = one.take("server")
    assert [request.user for request in message.requests] == [2, 3, 4]


def test_messages_fit_into_frames() -> None:
    one = collector(most=2 * AT_ONCE + 1)
    name = "n" * 200
    one.hear((RolloutView("r", "chat", "old", name, "", RolloutPhase.CANARY, 1, (1.0,), 0.0, ""),))
    for _ in range(3 * AT_ONCE):
        one.refused(AssignedVersion("chat", name, 2**64 - 1, 1795892203.9638648), 500)
        one.note_incident(name, "tcp://" + name)
    messages = one.take("server")
    assert [len(message.requests) for message in messages] == [AT_ONCE, AT_ONCE, 1, 0]
    assert len(messages[-1].incidents) == AT_ONCE
    assert all(len(encoded(message)) <= MAX_MESSAGE_BYTES for message in messages)


def test_an_incident_is_told_without_requests() -> None:
    one, observer = collector(), Observer()
    one.watch("old", RequestEvents(), observer)
    observer.incident("tcp://a")
    assert one.take("server") == [Observed("server", (), (SeenIncident("tcp://a", 60.0, "old"),))]


def test_a_spent_budget_and_a_burning_alert_freeze_rollouts() -> None:
    now = [0.0]
    meter = SloMeter(OBJECTIVES, clock=lambda: now[0])
    one, events = RolloutCollector(slos=meter), RequestEvents()
    meter.subscribe_to(events)
    events.publish(ended())
    assert one.freezes() == []
    for _ in range(100):
        events.publish(ended(500))
    now[0] = 60.0
    found = one.freezes()
    assert "the page alert of availability fires" in found
    assert not any("budget" in reason for reason in found), "most of the month is still to come"
    now[0] = 29 * 86_400.0
    assert one.freezes() == ["the error budget of availability is spent"]


def test_the_alert_of_a_candidate_that_was_rolled_back_freezes_nothing() -> None:
    now = [0.0]
    meter = SloMeter(OBJECTIVES, clock=lambda: now[0])
    one, events = RolloutCollector(slos=meter), RequestEvents()
    meter.subscribe_to(events)
    view = RolloutView("r", "chat", "old", "new", "d", RolloutPhase.CANARY, 1, (0.5,), 0.0, "")
    for minute in range(3):
        now[0] = 60.0 * minute
        for _ in range(50):
            events.publish(ended(model="old", model_digest="c"))
            events.publish(ended(500, model="new", model_digest="d"))
    now[0] += 60.0
    one.hear((view,))
    assert "the page alert of availability fires" in one.freezes()
    back = replace_fields(view, phase=RolloutPhase.ROLLED_BACK)
    one.hear((back,))
    one.hear((back,))
    meter.forget("new")
    now[0] += 60.0
    assert one.freezes() == []
    one.hear((replace_fields(view, id="next"),))
    now[0] += 60.0
    assert one.freezes() == [], "the news have room for one rollout of each model"
    for _ in range(50):
        events.publish(ended(500, model="new", model_digest="d"))
    now[0] += 60.0
    assert "the page alert of availability fires" in one.freezes(), "of its next rollout"
    one.hear((replace_fields(back, id="next"),))
    now[0] += 60.0
    assert one.freezes() == []
    for _ in range(50):
        events.publish(ended(500, model="old", model_digest="c"))
    now[0] += 60.0
    assert "the page alert of availability fires" in one.freezes(), "this is another one"
