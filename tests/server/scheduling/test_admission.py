"""Tests of admission: one request, tenant or sample must not distort the server's estimate of its
load."""

from __future__ import annotations

from itertools import count, pairwise
from typing import TYPE_CHECKING

import pytest

from server.contract.generation import input_request
from server.scheduling.admission import Admission, AdmissionAsk, Admit, Refusal
from server.scheduling.attempt import due_at
from server.scheduling.overload import LEAST_SAMPLES, AimdLimiter, Demand, Level, Overload
from server.scheduling.queue import FairQueue
from server.scheduling.request import Phase
from server.scheduling.status import OverloadObserver
from server.scheduling.wait_estimate import FleetCapacity, Outstanding, OutstandingRequest, Stage
from triolet.config import (
    AdmissionConfig,
    BrownoutConfig,
    GuardConfig,
    OverloadConfig,
    QueueConfig,
    ServerConfig,
    SloConfig,
)
from triolet.errors import RequestError
from triolet.pooling import VectorForm
from triolet.service_class import Scheduling, ServiceClass

from .fakes import make_request
from .test_fair_queue import all_turns, next_turn, place
from .world import World

if TYPE_CHECKING:
    from server.contract.generation import GenerationRequest

TICK_S = 0.05
D = ServiceClass.DEFAULT
DEADLINE_S = 600.0


class Scene:
    """Admission with a queue of strings and workers that announce their speed.

    Args:
      tokens_per_s: prefill's rate.
      rows: decode's rows.
    """

    def __init__(self, tokens_per_s: float, rows: int = 16) -> None:
        world = World()
        world.prefill.prompt_tokens_per_s = tokens_per_s
        world.greet_all()
        self.now = 0.0
        self.line: FairQueue[str] = FairQueue(QueueConfig())
        self.line.note_pools(10**6, rows)
        self.admission = Admission(
            ServerConfig("", "tiny", (), ()),
            world.roster,
            (self.line, self.line),  # type: ignore[arg-type]
            world.requests.table,
            world.requests.recovery,
            OverloadObserver(),
            self.now,
        )
        self._names = count()
        self.sweep(TICK_S)

    def wait(self, scheduling: Scheduling, prompt_tokens: int) -> str:
        """Add a waiting request."""
        name = f"{scheduling.tenant} {next(self._names)}"
        self.line.add(name, place(scheduling, prompt_tokens))
        return name

    def decide(self, requests: list[GenerationRequest]) -> Admit | Refusal:
        """Ask admission about requests that arrive together."""
        return self.admission.decide(AdmissionAsk.of(tuple(requests)), self.now)

    def sweep(self, seconds: float) -> None:
        """Advance time and sweep."""
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self.admission.sweep(self.now, is_able=True)


def overload(tokens_per_s: float, slo_s: float = 10.0, **changes: object) -> Overload:
    """Return overload control for a fleet with 64 rows."""
    config = OverloadConfig(SloConfig(slo_s, slo_s, slo_s), **changes)  # type: ignore[arg-type]
    one = Overload(config, OverloadObserver(), 0.0)
    one.sweep(FleetCapacity(64, tokens_per_s, tokens_per_s), lambda _: 0.0, 0.0)
    return one


def served(one: Overload, num_tokens: int, ttft_s: float, now: float) -> None:
    """Give a request its first token and its end."""
    demand = Demand(Scheduling(), num_tokens, DEADLINE_S)
    forecast = one.judge(demand, 0.0, now)
    one.took(forecast, now)
    one.dispatched(forecast, now)
    one.first_token(forecast, now + ttft_s)
    one.ended(forecast, now + 1.0, is_well=True)


def test_nobody_is_refused_for_a_long_prompt_that_it_overtakes() -> None:
    config = OverloadConfig(SloConfig(10.0, 10.0, 10.0))
    one = Overload(config, OverloadObserver(), 0.0, overtaken_s=1.0)
    one.sweep(FleetCapacity(64, 100.0, 100.0), lambda _: 0.0, 0.0)
    long = Demand(Scheduling(), 5000, DEADLINE_S)
    forecast = one.judge(long, 0.0, 0.0)
    one.took(forecast, 0.0)
    one.dispatched(forecast, 0.0)
    short = one.judge(Demand(Scheduling(), 100, DEADLINE_S), 0.0, 0.0)
    assert short.ttft_s == pytest.approx(1.0)
    with pytest.raises(RequestError, match="too late"):
        one.judge(
            Demand(Scheduling(), 101, DEADLINE_S), 0.0, 0.0
        )  # as long as to wait for its turn
    lower = Scheduling(service_class=ServiceClass.SHEDDABLE)
    with pytest.raises(RequestError, match="too late"):
        one.judge(Demand(lower, 100, DEADLINE_S), 0.0, 0.0)
    one.first_token(forecast, 50.0)
    one.judge(Demand(lower, 100, DEADLINE_S), 0.0, 50.0)


@pytest.mark.parametrize("max_running", [1, None])
def test_who_waits_by_its_own_limit_is_load_to_nobody(max_running: int | None) -> None:
    scene = Scene(tokens_per_s=100.0)
    limited = Scheduling("limited", max_running=max_running)
    scene.line.take(scene.wait(limited, 100))
    for _ in range(50):
        scene.wait(limited, 100)
    scene.sweep(5.0)
    is_load = max_running is None
    assert (scene.admission.overload.brownout.pressure > 0.5) == is_load
    assert (scene.admission.overload.brownout.level > Level.NORMAL) == is_load


def test_a_wait_for_a_tenants_own_limit_teaches_nothing_of_the_queue() -> None:
    one = overload(1000.0)
    limited = Demand(Scheduling(max_running=1), 100, DEADLINE_S)
    forecasts = [one.judge(limited, 200.0, 1.0) for _ in range(52)]
    for forecast in forecasts[:50]:
        one.took(forecast, 1.0)
        assert one.expired(forecast, 100.0) is not None
        one.ended(forecast, 100.0, is_well=False)
    assert one.prediction.bias[D] == 1.0
    rate = one.prediction.rate(100.0)
    one.dispatched(forecasts[50], 100.0)
    assert one.prediction.rate(100.0) == rate
    one.prediction.advance(100.0, is_waiting=True)
    rate = one.prediction.rate(100.0)
    one.dispatched(forecasts[51], 100.0)
    assert one.prediction.rate(100.0) != rate


def test_the_pace_of_a_line_is_seen_while_it_leaves_rows_to_others() -> None:
    scene = Scene(tokens_per_s=30_000.0)
    both = Scheduling("one"), Scheduling("other")
    for scheduling in both:
        for _ in range(100):
            scene.wait(scheduling, 100)
    running = all_turns(scene.line)
    assert scene.line.classes[D].is_waiting
    for number in range(60):
        scene.sweep(1.0)
        scene.line.end(running.pop(0), 10)
        turn = next_turn(scene.line)
        running.append(turn)
        scene.admission.overload.prediction.left(100, scene.now)
        scene.wait(both[number % 2], 100)
    rate = scene.admission.overload.prediction.rate(scene.now)
    assert rate is not None
    # The earlier guess still weighs like a second or so of fifteen.
    assert rate < 3000.0


def test_rows_that_one_class_leaves_free_are_for_those_below_it() -> None:
    line: FairQueue[str] = FairQueue(QueueConfig())
    line.note_pools(10**6, 64)
    line.add("seldom", place(Scheduling("seldom")))
    line.take("seldom")
    line.end("seldom", 5)
    critical = Scheduling("critical", service_class=ServiceClass.CRITICAL)
    for number in range(100):
        line.add(f"critical {number}", place(critical))
    assert len(all_turns(line)) < 64
    line.add("seldom", place(Scheduling("seldom")))
    assert line.first() == "seldom"
    # It overtakes no request that could run, so it lets none pass.
    assert not line.lets_pass("seldom")


def test_a_request_of_many_prompts_is_taken_on_by_an_idle_fleet() -> None:
    scene = Scene(tokens_per_s=300.0)
    requests = [make_request(n, prompt="x" * 300, deadline_s=DEADLINE_S) for n in range(32)]
    decision = scene.decide(requests)
    assert isinstance(decision, Admit)
    first, *others = (one for one in decision.forecasts if one is not None)
    assert first.first_token_by is not None
    assert first.first_token_by < scene.now + 60.0
    for other in others:
        assert other.first_token_by == scene.now + DEADLINE_S
        assert (other.queue_s, other.ttft_s, other.slo_s) == (None, None, None)


def test_the_limit_adds_up_what_comes_together() -> None:
    scene = Scene(tokens_per_s=300.0)
    overload = scene.admission.overload
    overload.limiter.limit_tokens = 1024.0
    pair = [make_request(n, prompt="x" * 300) for n in (1, 2)]
    many = [make_request(n, prompt="x" * 300) for n in range(9)]
    assert isinstance(scene.decide(pair), Admit)
    assert isinstance(scene.decide(many), Admit), "none are owed"
    overload.outstanding.apply(None, OutstandingRequest(Stage.QUEUED, D, 600))
    assert isinstance(scene.decide(pair[:1]), Admit)
    refusal = scene.decide(pair)
    assert isinstance(refusal, Refusal)
    assert "600 prompt tokens already wait" in str(refusal.error)
    assert refusal.error.status == 503


def test_to_be_asked_whether_a_request_would_be_refused_changes_nothing() -> None:
    scene = Scene(tokens_per_s=300.0)
    overload = scene.admission.overload
    ask = AdmissionAsk(Scheduling(), DEADLINE_S, b"request", key=7)
    assert not scene.admission.would_refuse(ask, scene.now)
    overload.limiter.limit_tokens = 600.0
    overload.outstanding.apply(None, OutstandingRequest(Stage.QUEUED, D, 600))
    before = overload.status(scene.now)
    assert scene.admission.would_refuse(ask, scene.now)
    assert overload.status(scene.now) == before
    with pytest.raises(RequestError):
        scene.admission.admit(ask, scene.now)
    assert overload.status(scene.now).expected_returns == before.expected_returns + 1


def test_what_a_first_token_takes_by_itself_is_no_pressure() -> None:
    one = overload(30_000.0, slo_s=0.05)
    now = 0.0
    while now < 60.0:
        now += 0.2
        served(one, 100, 0.03, now)
        for tick in range(4):
            one.sweep(one.prediction.capacity, lambda _: 0.0, now + tick * TICK_S)
    assert one.brownout.level is Level.NORMAL
    assert one.brownout.pressure == 0.0


def test_who_is_taken_on_is_not_dropped_in_the_same_breath() -> None:
    one = overload(1000.0, slo_s=2.0)
    now = 0.0
    for _ in range(100):  # prompts take more than twice the time that workers announce
        now += 1.0
        served(one, 100, 0.25, now)
    demand = Demand(Scheduling(), 100, DEADLINE_S)
    forecast = one.judge(demand, 0.0, now)
    one.took(forecast, now)
    one.dispatched(forecast, now)
    long = one.judge(Demand(Scheduling(), 4000, DEADLINE_S), 0.0, now)
    assert one.expired(long, now) is None
    assert one.expired(long, now + 3.0) is not None


def limiter() -> tuple[AimdLimiter, Outstanding]:
    outstanding = Outstanding()
    return AimdLimiter(GuardConfig(), SloConfig(), outstanding, 0.0), outstanding


def test_a_limit_that_refuses_rises_however_little_is_owed() -> None:
    limit, outstanding = limiter()
    limit.limit_tokens = 1024.0
    now = 0.0
    for _ in range(100):
        now += 0.2
        owed = OutstandingRequest(Stage.QUEUED, D, 600)
        outstanding.apply(None, owed)
        limit.took()
        if not limit.admits(D, 600):
            limit.refused()
        limit.came(0.1, now)
        outstanding.apply(owed, None)
    assert limit.limit_tokens > 1200.0


def test_the_limit_has_room_for_tenants_that_ask_for_less_than_their_share() -> None:
    limit, outstanding = limiter()
    limit.limit_tokens = 1024.0
    outstanding.apply(None, OutstandingRequest(Stage.QUEUED, D, 1000))
    assert not limit.admits(D, 100)
    assert limit.admits(D, 100, is_under_share=True)
    outstanding.apply(None, OutstandingRequest(Stage.COMPUTING, D, 1000))
    assert not limit.admits(D, 100, is_under_share=True)


def test_what_batches_are_owed_is_no_measure_of_the_limit() -> None:
    limit, outstanding = limiter()
    outstanding.apply(None, OutstandingRequest(Stage.QUEUED, ServiceClass.BATCH, 100_000))
    outstanding.apply(None, OutstandingRequest(Stage.QUEUED, D, 4000))
    limit.took()
    for _ in range(LEAST_SAMPLES):
        limit.came(2.0, 1.0)
    assert limit.limit_tokens == pytest.approx(0.7 * 4000)


def test_one_prompt_has_one_worker_and_is_not_late_for_that() -> None:
    one = overload(400.0)
    one.prediction.see(FleetCapacity(64, 400.0, 100.0))
    for number in range(200):
        served(one, 5000, 50.0, 100.0 * number)
    assert one.limiter.limit_tokens is None


def test_who_was_refused_unread_is_reckoned_with_like_the_usual_request() -> None:
    one = overload(100.0)
    for _ in range(100):
        one.prediction.ended(1.0, 200)
    waits = []
    for key in (7, 8, 9):
        with pytest.raises(RequestError) as refusal:
            one.judge(Demand(Scheduling(), 1, DEADLINE_S, key, is_unread=True), 10_000.0, 1.0)
        assert refusal.value.retry_after_s is not None
        waits.append(refusal.value.retry_after_s)
    jitter = (AdmissionConfig().retry_jitter_least + AdmissionConfig().retry_jitter_most) / 2
    rate = one.prediction.class_rate(D, 1.0)
    assert rate is not None
    gap_s = jitter * 200.0 / rate / AdmissionConfig().return_rate_share
    assert [b - a for a, b in pairwise(waits)] == pytest.approx([gap_s, gap_s], rel=0.02)


def test_who_waits_in_vain_is_swept_when_its_first_token_is_too_late() -> None:
    config = OverloadConfig(
        SloConfig(2.0, 2.0, 2.0),
        AdmissionConfig(),
        BrownoutConfig(is_on=False),
        GuardConfig(is_on=False),
    )
    world = World(overload=config)
    scheduling = Scheduling("limited", max_running=1)
    world.submit(make_request(1, scheduling=scheduling))
    waiting = world.submit(make_request(2, scheduling=scheduling))
    assert waiting.request.phase is Phase.QUEUED
    assert due_at(waiting.request, world.config) <= world.now + 2.5
    for _ in range(60):
        world.sweep(TICK_S)
    assert waiting.request.phase is Phase.FINISHED


def test_brownout_pauses_inputs_of_batches_too() -> None:
    world = World()
    world.announce(world.prefill, token_credit=0)
    scheduling = Scheduling(service_class=ServiceClass.BATCH)
    for number in range(2):
        request = input_request(
            number.to_bytes(16, "big"), (1, 2, 3), VectorForm(), 600.0, scheduling=scheduling
        )
        world.requests.submit([request], world.now)
    line = world.requests._attempts.inputs
    assert line.first() is not None
    world.requests.admission.overload.brownout.level = Level.PAUSE_BATCH
    world.sweep()
    assert line.first() is None
    assert len(line) == 1
    world.requests.admission.overload.brownout.level = Level.NORMAL
    world.sweep()
    assert line.first() is not None
