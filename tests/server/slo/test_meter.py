"""Tests of which request events count as good, bad or not at all for each objective, and that the
counts match the usage ledger."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.contract.generation import CancelReason, Usage
from server.contract.request_events import (
    FirstTokenArrived,
    RequestDispatched,
    RequestEnded,
    RequestEvents,
    RequestRefused,
)
from server.metrics.metrics import Metrics
from server.scheduling.outcome import Outcome
from server.slo.meter import SloMeter
from server.tenants.usage_ledger import opened_ledger
from tests.server.scheduling.fakes import make_request
from tests.server.scheduling.world import World
from tests.server.support.request_lives import FACTS
from triolet.config import ObjectivesConfig, UsageConfig
from triolet.errors import RequestError
from triolet.service_class import Scheduling, ServiceClass
from triolet.slo.objectives import read_objectives
from triolet.usage_database import FILE_NAME

from .ledger import FAILED, OF_CLIENTS, SERVED, availability_by

if TYPE_CHECKING:
    from pathlib import Path

    from server.contract.request_events import RequestEvent

OBJECTIVES = read_objectives(ObjectivesConfig())
STREAM = replace(FACTS, model="chat", model_digest="sha256:1", is_streamed=True)
EVEN = Usage(10, 101)


def counted(*events: RequestEvent, meter: SloMeter | None = None) -> dict[str, list[int]]:
    """Return good and total events of each objective that has events."""
    meter = meter or SloMeter(OBJECTIVES)
    stream = RequestEvents()
    meter.subscribe_to(stream)
    for event in events:
        stream.publish(event)
    sums = {
        one.objective.name: [sum(values) for values in zip(*one.series.values(), strict=True)]
        for one in meter.counters
    }
    for counter in meter.counters:
        found = counter.windows.over(300.0, 0.0)
        assert [found.good, found.total] == (sums[counter.objective.name] or [0, 0])
    return {name: counts for name, counts in sums.items() if counts}


def ended(outcome: Outcome, *, is_streamed: bool = True, usage: Usage = EVEN) -> RequestEnded:
    facts = replace(STREAM, is_streamed=is_streamed)
    status = outcome.value.status
    return RequestEnded(facts, outcome.account, "decoding", usage, 9.0, status=status, zone="a")


@pytest.mark.parametrize("outcome", Outcome, ids=lambda one: one.name)
def test_every_outcome_counts_as_the_document_says(outcome: Outcome) -> None:
    is_of_client = outcome.account in OF_CLIENTS or outcome is Outcome.GRAMMAR_TOO_COSTLY
    good = int(is_of_client or outcome.account in SERVED)
    assert good or outcome.account in FAILED
    found = counted(ended(outcome))
    assert found.pop("inter-token") == [1, 1]
    assert found.pop("stream-completion") == [good, 1]
    assert found == ({} if is_of_client else {"availability": [good, 1]})
    assert "stream-completion" not in counted(ended(outcome, is_streamed=False))


@pytest.mark.parametrize(
    ("status", "service_class", "is_counted"),
    [
        (503, ServiceClass.DEFAULT, True),
        (500, ServiceClass.SHEDDABLE, True),
        (503, ServiceClass.BATCH, False),
        (400, ServiceClass.DEFAULT, False),
        (429, ServiceClass.DEFAULT, False),
    ],
)
def test_refusals_count_unless_the_client_is_at_fault_or_a_batch_line_returns(
    status: int, service_class: ServiceClass, is_counted: bool
) -> None:
    refused = RequestRefused("a_code", "alice", service_class, status, "chat", "")
    assert counted(refused) == ({"availability": [0, 1]} if is_counted else {})


@pytest.mark.parametrize(("elapsed_s", "good"), [(2.5, 1), (2.51, 0)])
def test_times_are_good_up_to_the_threshold(elapsed_s: float, good: int) -> None:
    events = (RequestDispatched(STREAM, elapsed_s - 1.5), FirstTokenArrived(STREAM, elapsed_s))
    assert counted(*events) == {"queue-wait": [good, 1], "first-token": [good, 1]}
    batch = replace(STREAM, service_class=ServiceClass.BATCH)
    assert counted(RequestDispatched(batch, 1e6), FirstTokenArrived(batch, 1e6)) == {}


@pytest.mark.parametrize(
    ("tokens", "slow_gaps", "found"),
    [(1, 0, None), (2, 0, [1, 1]), (100, 1, [0, 1]), (101, 1, [1, 1]), (201, 3, [0, 1])],
)
def test_a_stream_is_even_if_99_percent_of_its_gaps_are_short(
    tokens: int, slow_gaps: int, found: list[int] | None
) -> None:
    usage = Usage(10, tokens, slow_gaps=slow_gaps)
    assert counted(ended(Outcome.STOP, usage=usage)).get("inter-token") == found
    assert "inter-token" not in counted(ended(Outcome.STOP, is_streamed=False, usage=usage))


def test_an_objective_counts_the_models_and_classes_that_it_names() -> None:
    narrow = replace(
        OBJECTIVES[0], models=frozenset({"chat"}), classes=frozenset({ServiceClass.CRITICAL})
    )
    stop = ended(Outcome.STOP)
    critical = replace(stop.facts, service_class=ServiceClass.CRITICAL)
    others = (stop, replace(stop, facts=replace(critical, model="code")))
    assert counted(*others, meter=SloMeter([narrow])) == {}
    assert counted(replace(stop, facts=critical), meter=SloMeter([narrow])) == {
        "availability": [1, 1]
    }


def test_an_objective_counts_every_version_of_the_name_that_it_has() -> None:
    meter = SloMeter([replace(OBJECTIVES[0], models=frozenset({"chat"}))])
    meter.public_name = {"chat-2": "chat", "code": "code"}.__getitem__
    events = [
        replace(one, facts=replace(one.facts, model=model))
        for one in (ended(Outcome.STOP),)
        for model in ("chat-2", "code")
    ]
    assert counted(*events, meter=meter) == {"availability": [1, 1]}


def test_series_have_version_class_and_zone_and_tenants_their_own() -> None:
    meter = SloMeter(OBJECTIVES[:1], ObjectivesConfig(shown_tenants=1))
    stop = ended(Outcome.STOP)
    refused = RequestRefused("overloaded", "carol", ServiceClass.DEFAULT, 503, "chat", "sha256:1")
    tenants = [replace(stop, facts=replace(STREAM, tenant=name)) for name in ("bob", "alice")]
    counted(*tenants, stop, refused, meter=meter)
    metrics = Metrics("chat", "none", slos=meter).exposition().decode()
    chat = 'class="default",model="chat",slo="availability",version="sha256:1"'
    wanted = {
        f'events_total{{{chat},zone="a"}}': 3,
        f'good_total{{{chat},zone="a"}}': 3,
        f'events_total{{{chat},zone=""}}': 1,
        f'good_total{{{chat},zone=""}}': 0,
        'tenant_events_total{slo="availability",tenant="bob"}': 1,
        'tenant_events_total{slo="availability",tenant="other"}': 2,
        'tenant_good_total{slo="availability",tenant="other"}': 1,
    }
    for labels, value in wanted.items():
        assert f"triolet_slo_{labels} {float(value)}\n" in metrics


def test_the_zone_is_that_of_the_decode_worker_and_empty_without_one() -> None:
    world, meter = World(), SloMeter(OBJECTIVES)
    meter.subscribe_to(world.events)
    world.decode.labels = {"zone": "north"}
    decode = world.worker(world.decode)
    world.restart(decode)
    world.submit(replace(make_request(1, max_tokens=3), is_streamed=True))
    world.end()
    zones = {one.objective.name: {labels[3] for labels in one.series} for one in meter.counters}
    assert zones == {one.name: {"north"} for one in OBJECTIVES}
    world.lose(decode)
    waiting = world.submit(make_request(2))
    world.requests.end([waiting.request], Outcome.ERROR.failure("a fault"), world.now)
    assert {labels[3] for labels in meter.counters[0].series} == {"north", ""}


def test_tenants_that_are_no_longer_shown_have_no_counters() -> None:
    meter = SloMeter(OBJECTIVES[:1], ObjectivesConfig(shown_tenants=1, tracked_tenants=4))
    small, large = (
        replace(ended(Outcome.STOP, usage=Usage(0, tokens)), facts=replace(STREAM, tenant=name))
        for name, tokens in (("small", 1), ("large", 100))
    )
    counted(small, large, large, large, large, meter=meter)
    assert dict(meter.counters[0].tenants) == {"other": [3, 3], "large": [1, 1]}


def test_versions_are_bounded_and_end_with_their_model() -> None:
    meter = SloMeter(OBJECTIVES[:1], ObjectivesConfig(kept_versions=2))
    stop = ended(Outcome.STOP)
    for digest in ("1", "2", "1", "3"):
        meter.ended(replace(stop, facts=replace(STREAM, model_digest=digest)))
    [counter] = meter.counters
    assert list(counter.versions) == [("chat", "1"), ("chat", "3")]
    assert {labels[1] for labels in counter.series} == {"1", "3"}
    assert counter.windows.over(300.0, 0.0).total == 4, "the whole keeps all"
    Metrics("chat", "none", slos=meter).remove("chat")
    assert not counter.versions
    assert not counter.series


def test_gaps_count_as_slow_unless_the_client_had_to_read_first() -> None:
    world = World(token_window=4)
    world.observer.slow_gap_s = 0.5
    reader = world.submit(make_request(max_tokens=6))
    for seconds in (0.0, 0.0, 0.0, 0.0, 1.0, 0.4, 1.0, 0.0):
        world.settle(read=reader.request.output.num_taken < 2)
        world.sweep(seconds)
    world.end()
    assert reader.finished.usage.completion_tokens == 6
    assert reader.finished.usage.slow_gaps == 0, "all came as soon as the client had read"


def test_a_gap_of_a_client_that_reads_counts() -> None:
    world = World()
    world.observer.slow_gap_s = 0.5
    reader = world.submit(make_request(max_tokens=4))
    for _ in range(100):
        world.deliver()
        world.read(reader)
        num_busy = sum(world.compute(worker) for worker in world.workers)
        if not num_busy:
            break
        num_tokens = len(reader.request.relay.token_ids)
        world.sweep({1: 0.6, 2: 0.4}.get(num_tokens, 0.0))
    world.end()
    assert reader.finished.usage.slow_gaps == 1


def run_of(rng: Random, world: World) -> dict[bytes, bool]:
    """Submit, cancel, kill and wait at random; return which requests are streams."""
    streamed: dict[bytes, bool] = {}
    tenants = [Scheduling(tenant=name) for name in ("", "alice", "bob")]
    for number in range(1, 25):
        request = replace(
            make_request(
                number,
                max_tokens=rng.randint(1, 8),
                deadline_s=rng.choice([5.0, 600.0]),
                scheduling=replace(rng.choice(tenants), service_class=rng.choice([*ServiceClass])),
            ),
            is_streamed=rng.random() < 0.5,
        )
        try:
            world.submit(request)
            streamed[request.request_id] = request.is_streamed
        except RequestError:
            pass  # the ledger has no refusals
        match rng.randrange(5):
            case 0:
                world.cancel(rng.choice(world.readers), rng.choice([*CancelReason]))
            case 1:
                world.restart(rng.choice(world.workers))
            case 2:
                world.sweep(rng.choice([0.1, 6.0]))
            case 3:
                world.settle()
            case _:
                world.compute(rng.choice(world.workers))
    for _ in range(100):
        world.settle()
        world.sweep(6.0)
    world.end()
    return streamed


@given(st.integers(0, 2**32))
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_counts_equal_the_usage_ledgers(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder: Path = tmp_path_factory.mktemp("usage")
    world = World(num_decodes=2)
    meter = SloMeter(OBJECTIVES)
    refusals: list[RequestRefused] = []
    world.events.subscribe(RequestRefused, refusals.append)
    with opened_ledger(UsageConfig(directory=str(folder), interval_s=1e6)) as ledger:
        assert ledger is not None
        ledger.subscribe_to(world.events)
        meter.subscribe_to(world.events)
        streamed = run_of(Random(seed), world)
    available, completed = meter.counters[0], meter.counters[1]
    wanted = availability_by(str(folder), ["model", "version", "class"])
    for refusal in refusals:
        if refusal.status >= 500 and refusal.service_class is not ServiceClass.BATCH:
            key = (refusal.model, refusal.model_digest, refusal.service_class.name.lower())
            wanted.setdefault(key, [0, 0])[1] += 1
    found: dict[tuple[str, ...], list[int]] = {}
    for (model, version, name, _), (good, total) in available.series.items():
        counts = found.setdefault((model, version, name), [0, 0])
        counts[0] += good
        counts[1] += total
    assert found == wanted
    with closing(sqlite3.connect(folder / FILE_NAME)) as database:
        rows = database.execute("SELECT request_id, outcome FROM requests").fetchall()
    assert len(rows) == len(streamed)
    ends = [outcome for name, outcome in rows if streamed[bytes.fromhex(name)]]
    num_whole = sum(outcome not in FAILED for outcome in ends)
    sums = [sum(values) for values in zip(*completed.series.values(), strict=True)]
    assert (sums or [0, 0]) == [num_whole, len(ends)]
