"""Tests of the metrics: observed events are exported, under our names and vLLM's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from structlog.testing import capture_logs

from ops.control.worker_seconds import SecondsAccount, Version
from server.contract.generation import Usage
from server.contract.request_events import (
    AttemptFailed,
    FirstTokenArrived,
    RequestAccepted,
    RequestDispatched,
    RequestEnded,
    RequestFacts,
    RequestRefused,
)
from server.metrics.fleet import MAX_WORDS
from server.metrics.metrics import Metrics
from server.scheduling.presence import Presence
from server.tenants.memory_store import SpendWatch
from server.tenants.tenancy import TenancyReport
from tests.server.scheduling.fakes import make_request
from tests.server.scheduling.world import World
from tests.server.support.fakes import FakeFleet
from tests.server.support.request_lives import FACTS
from tests.server.support.surface import surface
from transport.control_protocol import ModelNews, Models, ModelState, decode_told, encoded
from transport.frames import Load, WorkerHeartbeat
from triolet.service_class import ServiceClass
from triolet.tenants.plans import Plan
from triolet.units import NANOS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from tests.server.support.surface import Surface


@pytest.fixture
def metrics() -> Metrics:
    subject = Metrics("demo", "vllm")
    subject.watch(FakeFleet().status, lambda: 0)
    return subject


def ended_with(usage: Usage, facts: RequestFacts = FACTS) -> RequestEnded:
    return RequestEnded(replace(facts, is_input=True), "stop", "decoding", usage, 0.5)


def refused_with(code: str) -> RequestRefused:
    return RequestRefused(code, "", ServiceClass.DEFAULT, 503, "demo", "")


def lines(metrics: Metrics) -> set[str]:
    return set(metrics.exposition().decode().splitlines())


def test_a_request_is_counted_once_in_each_of_its_measures(metrics: Metrics) -> None:
    facts = replace(FACTS, service_class=ServiceClass.CRITICAL)
    metrics.fleet.accepted(RequestAccepted(facts, 16))
    metrics.fleet.dispatched(RequestDispatched(facts, 0.02))
    metrics.fleet.prompt_computed(0.001, 0.2)
    metrics.fleet.first_token(FirstTokenArrived(facts, 0.03))
    metrics.fleet.token_gaps.observe(0.012)
    usage = Usage(
        prompt_tokens=100, completion_tokens=2, cached_tokens=64, queue_s=0.02, ttft_s=0.03
    )
    metrics.fleet.ended(ended_with(usage, facts))
    labels = 'engine="0",model_name="demo"'
    assert {
        "triolet_requests_received_total 1.0",
        "triolet_requests_accepted_total 1.0",
        'triolet_requests_total{outcome="stop"} 1.0',
        'triolet_class_queue_seconds_count{class="critical"} 1.0',
        "triolet_prompt_tokens_total 100.0",
        "triolet_completion_tokens_total 2.0",
        "triolet_cached_prompt_tokens_total 64.0",
        'triolet_time_to_first_token_seconds_bucket{le="0.02"} 0.0',
        'triolet_time_to_first_token_seconds_bucket{le="0.04"} 1.0',
        'triolet_inter_token_latency_seconds_bucket{le="0.025"} 1.0',
        "triolet_request_seconds_sum 0.5",
        "triolet_decode_seconds_sum 0.47",
        "triolet_inference_seconds_sum 0.48",
        "triolet_request_token_seconds_sum 0.47",
        f"vllm:prompt_tokens_total{{{labels}}} 100.0",
        f"vllm:generation_tokens_total{{{labels}}} 2.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 64.0",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="demo"} 1.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="demo"} 1.0',
        f"vllm:e2e_request_latency_seconds_sum{{{labels}}} 0.5",
        f"vllm:request_prefill_time_seconds_sum{{{labels}}} 0.2",
        f"vllm:request_queue_time_seconds_sum{{{labels}}} 0.02",
    } <= lines(metrics)


BOARDS = (
    *("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
    "iteration_tokens_total",
)
"""Histograms that vLLM's dashboards and documents, including older ones, use by these names."""


def test_what_dashboards_of_vllm_ask_for_is_there(metrics: Metrics) -> None:
    text = metrics.exposition().decode()
    labels = 'engine="0",model_name="demo"'
    for name in BOARDS:
        assert f"# TYPE vllm:{name} histogram\n" in text
        assert f'vllm:{name}_bucket{{engine="0",le="+Inf",model_name="demo"}} 0.0\n' in text
    for name in ("gpu_cache_usage_perc", "kv_cache_usage_perc"):
        assert f"# TYPE vllm:{name} gauge\n" in text
        assert f"vllm:{name}{{{labels}}} 0.0\n" in text


def test_sizes_of_requests_and_steps_are_counted(metrics: Metrics) -> None:
    world = World()
    world.observe(metrics.fleet)
    metrics.fleet.subscribe_to(world.events)
    first, second, third = (
        make_request(number, max_tokens=n) for number, n in enumerate((5, 3, 7))
    )
    world.submit_together([first, replace(second, origin_id=first.request_id)])
    world.submit(third)
    world.settle()
    world.check_idle()
    decode = world.worker(world.decode)
    for steps, tokens in ((10, 100), (14, 116), (14, 116)):
        load = Load(steps=steps, computed_tokens=tokens)
        world.hear(decode, WorkerHeartbeat(world.decode.epoch, steps, False, False, load))
    assert {
        "triolet_request_max_tokens_count 3.0",
        "triolet_request_max_tokens_sum 15.0",
        "triolet_request_choices_count 2.0",
        'triolet_request_choices_bucket{le="1.0"} 1.0',
        'triolet_request_choices_bucket{le="2.0"} 2.0',
        "triolet_request_longest_completion_tokens_count 2.0",
        "triolet_request_longest_completion_tokens_sum 12.0",
        "triolet_step_tokens_count 14.0",
        "triolet_step_tokens_sum 116.0",
        'triolet_step_tokens_bucket{le="4.0"} 4.0',
    } <= lines(metrics)


def test_tenants_are_counted_by_class_and_outcome_and_nobody_where_there_are_none(
    metrics: Metrics,
) -> None:
    alice = replace(FACTS, tenant="alice", service_class=ServiceClass.CRITICAL)
    usage = Usage(prompt_tokens=100, completion_tokens=2, cached_tokens=64)
    metrics.fleet.ended(ended_with(usage, alice))
    metrics.fleet.ended(ended_with(Usage(10, 0)))
    refused = replace(refused_with("overloaded"), tenant=alice.tenant)
    metrics.fleet.refused(replace(refused, service_class=alice.service_class))
    metrics.tenants.watch(lambda: TenancyReport(2, 3, 1, "no TOML"))
    of_tenants = {line for line in lines(metrics) if line.startswith("triolet_tenant")}
    labels = 'class="critical"'
    assert of_tenants == {
        f'triolet_tenant_requests_total{{{labels},outcome="stop",tenant="alice"}} 1.0',
        f'triolet_tenant_requests_total{{{labels},outcome="rejected",tenant="alice"}} 1.0',
        f'triolet_tenant_tokens_total{{{labels},kind="prompt",tenant="alice"}} 100.0',
        f'triolet_tenant_tokens_total{{{labels},kind="cached",tenant="alice"}} 64.0',
        f'triolet_tenant_tokens_total{{{labels},kind="completion",tenant="alice"}} 2.0',
        "triolet_tenants 2.0",
        "triolet_tenants_file_refused 1.0",
        'triolet_tenants_files_total{outcome="taken"} 3.0',
        'triolet_tenants_files_total{outcome="refused"} 1.0',
    }


def test_tokens_are_counted_by_version() -> None:
    digest, other = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
    metrics = Metrics("chat", "none", "code", digests={"chat": digest})
    metrics.watch(FakeFleet().status, lambda: 0, others={"code": FakeFleet().status})
    usage = Usage(prompt_tokens=100, completion_tokens=2, cached_tokens=64)
    facts = replace(FACTS, model_digest=digest)
    metrics.fleets["chat"].ended(ended_with(usage, facts))
    metrics.set_version("chat", other)
    metrics.fleets["chat"].ended(ended_with(Usage(5, 1), replace(FACTS, model_digest=other)))
    metrics.fleets["chat"].ended(ended_with(usage, facts))  # it began before that
    metrics.fleets["code"].ended(ended_with(Usage(7, 1)))
    assert {line for line in lines(metrics) if line.startswith("triolet_version_tokens")} == {
        f'triolet_version_tokens_total{{kind="{kind}",model="{model}",version="{version}"}} {count}'
        for model, version, counts in (
            ("chat", digest, {"prompt": 200.0, "cached": 128.0, "completion": 4.0}),
            ("chat", other, {"prompt": 5.0, "cached": 0.0, "completion": 1.0}),
            ("code", "", {"prompt": 7.0, "cached": 0.0, "completion": 1.0}),
        )
        for kind, count in counts.items()
    }
    assert metrics.tokens_of("chat") == {"prompt_tokens": 205.0, "completion_tokens": 5.0}
    metrics.remove("chat")
    assert not any('model="chat",version' in line for line in lines(metrics))


def test_what_a_smaller_model_saved_is_shown(metrics: Metrics) -> None:
    metrics.auto.chosen("small", "smallest")
    for charged, on_largest in ((0.5, 2.0), (0.25, 0.125)):
        metrics.quotas.auto_cost("small", charged, on_largest)
    assert {
        'triolet_auto_requests_total{model="small",reason="smallest"} 1.0',
        'triolet_auto_cost_total{model="small"} 0.75',
        'triolet_auto_largest_cost_total{model="small"} 2.125',
    } <= lines(metrics)


def test_what_was_chosen_ends_with_its_model() -> None:
    metrics = Metrics("large", "none", "small", "never")
    for name in ("large", "small"):
        for reason in ("smallest", "room"):
            metrics.auto.chosen(name, reason)
        metrics.quotas.auto_cost(name, 0.5, 2.0)
    for name in ("small", "never"):
        metrics.remove(name)
    shown = [line for line in lines(metrics) if line.startswith("triolet_auto_")]
    assert len(shown) == 4
    assert all('model="large"' in line for line in shown)


def test_worker_seconds_of_versions_add_up_to_those_of_the_processes(metrics: Metrics) -> None:
    """From the supervisor's counts per process to the scraped value."""
    processes = {("chat", "sha256:1"): (1000.123456, 77.5), ("code", ""): (0.25, 3.0, 12_345.678)}
    account = SecondsAccount()
    account.note("run", {Version(*one): sum(seconds) for one, seconds in processes.items()})
    presences = {name: Presence() for name in ("chat", "code", "asleep")}
    for name, presence in presences.items():
        news = ModelNews(name, "", ModelState.SERVING, 0.0, 1, account.by_model().get(name, {}))
        presence.note(decode_told(encoded(Models((news,)))).models[0], 0.0)
    metrics.versions.watch(lambda: {name: one.worker_seconds for name, one in presences.items()})
    shown = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines(metrics)
        if line.startswith("triolet_worker_seconds_total")
    }
    assert set(shown) == {
        'triolet_worker_seconds_total{model="chat",version="sha256:1"}',
        'triolet_worker_seconds_total{model="code",version=""}',
    }
    assert sum(shown.values()) == pytest.approx(sum(map(sum, processes.values())), rel=0.001)
    assert metrics.worker_seconds_of("code") == pytest.approx(12_348.928)
    assert metrics.worker_seconds_of("asleep") is None


def test_refusals_and_losses_are_counted_by_cause(metrics: Metrics) -> None:
    metrics.fleet.refused(refused_with("overloaded"))
    metrics.fleet.attempt_failed(AttemptFailed(FACTS, "peer_lost"))
    metrics.fleet.worker_joined("decode-0")
    metrics.fleet.worker_lost("decode-0", "silent")
    metrics.fleet.worker_refused("decode-0", "another model")
    assert {
        'triolet_requests_rejected_total{class="default",code="overloaded"} 1.0',
        'triolet_attempts_failed_total{cause="peer_lost"} 1.0',
        "triolet_workers_joined_total 1.0",
        'triolet_workers_lost_total{cause="silent"} 1.0',
        "triolet_workers_refused_total 1.0",
    } <= lines(metrics)


@pytest.mark.parametrize(("cause", "level"), [("farewell", "info"), ("silent", "warning")])
def test_a_worker_that_was_drained_is_no_warning(metrics: Metrics, cause: str, level: str) -> None:
    with capture_logs() as logs:
        metrics.fleet.worker_lost("decode-0", cause)
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("worker_lost", level)]


@pytest.mark.parametrize(
    ("away_s", "entry"),
    [(None, {"log_level": "info"}), (1.8004, {"log_level": "warning", "away_s": 1.8})],
)
def test_the_return_of_a_worker_that_was_missed_is_a_warning_as_its_loss_was(
    metrics: Metrics, away_s: float | None, entry: dict[str, object]
) -> None:
    with capture_logs() as logs:
        metrics.fleet.worker_joined("decode-0", away_s)
    assert logs == [{"event": "worker_joined", "worker": "decode-0"} | entry]


def test_faults_and_what_is_done_about_them_are_counted() -> None:
    fleet = FakeFleet()
    fleet.status().workers[1].breaker = "half_open"
    fleet.status().workers[1].load = Load(stale_frames=5, dropped={"stale": 3, "foreign": 2})
    subject = Metrics("demo", "none")
    subject.watch(fleet.status, lambda: 0)
    subject.fleet.retry_unaffordable()
    subject.fleet.quarantined("request", "ab")
    subject.fleet.breaker_changed("decode-0", "open")
    subject.fleet.frames_dropped("old_attempt", 7)
    subject.fleet.server_paused(2.5)
    assert {
        "triolet_retries_refused_total 1.0",
        "triolet_requests_quarantined_total 1.0",
        'triolet_breaker_changes_total{state="open"} 1.0',
        'triolet_frames_dropped_total{reason="old_attempt"} 7.0',
        "triolet_server_pauses_total 1.0",
        "triolet_server_paused_seconds_total 2.5",
        "triolet_retries_left 20.0",
        "triolet_quarantined_prompts 0.0",
        'triolet_worker_breaker_open{role="prefill",worker="prefill-0"} 0.0',
        'triolet_worker_breaker_open{role="decode",worker="decode-0"} 1.0',
        'triolet_worker_frames_dropped_total{reason="stale",role="decode",worker="decode-0"} 3.0',
        'triolet_worker_frames_dropped_total{reason="foreign",role="decode",worker="decode-0"} 2.0',
    } <= lines(subject)


def test_what_alerts_see_increase_is_there_before_its_first_time(metrics: Metrics) -> None:
    plan = Plan(budget=2.0, budget_alerts=(0.5, 1.0))
    watch = SpendWatch(metrics.quotas)
    watch.note("alice", plan)
    assert {
        'triolet_budget_alerts_total{share="0.5",tenant="alice"} 0.0',
        'triolet_budget_alerts_total{share="1",tenant="alice"} 0.0',
        'triolet_workers_lost_total{cause="link_gone"} 0.0',
        'triolet_workers_lost_total{cause="wedged"} 0.0',
    } <= lines(metrics)
    watch.spent("alice", 0, NANOS)
    watch.note("alice", plan)
    assert 'triolet_budget_alerts_total{share="0.5",tenant="alice"} 1.0' in lines(metrics)


def test_a_label_never_has_more_words_than_its_bound(metrics: Metrics) -> None:
    for number in range(10 * MAX_WORDS):
        metrics.fleet.refused(refused_with(f"code-{number}"))
    series = [line for line in lines(metrics) if line.startswith("triolet_requests_rejected_total")]
    assert len(series) == MAX_WORDS + 1
    labels = 'class="default",code="other"'
    assert f"triolet_requests_rejected_total{{{labels}}} {9.0 * MAX_WORDS}" in series


def test_a_worker_that_has_said_nothing_has_no_pool(metrics: Metrics) -> None:
    fleet = FakeFleet()
    fleet.status().workers[0].capacity = None
    subject = Metrics("demo", "none")
    subject.watch(fleet.status, lambda: 0)
    pools = [line for line in lines(subject) if line.startswith("triolet_kv_blocks{")]
    assert len(pools) == 3
    assert all('pool="decode"' in line for line in pools)


def test_what_a_worker_s_sequences_do_is_shown() -> None:
    fleet = FakeFleet()
    fleet.status().workers[1].load = Load(running=3, paused=2, waiting=1, busy_s=1.5)
    subject = Metrics("demo", "none")
    subject.watch(fleet.status, lambda: 0)
    labels = 'role="decode",state="{}",worker="decode-0"'
    assert {
        f"triolet_worker_sequences{{{labels.format(state)}}} {count}"
        for state, count in (("running", 3.0), ("paused", 2.0), ("waiting", 1.0))
    } | {'triolet_worker_busy_seconds_total{role="decode",worker="decode-0"} 1.5'} <= lines(subject)


def test_guesses_are_counted_by_worker() -> None:
    fleet = FakeFleet()
    fleet.status().workers[1].load = Load(
        speculative_rows=3, speculative_proposed=9, speculative_accepted=4
    )
    subject = Metrics("demo", "none")
    subject.watch(fleet.status, lambda: 0)
    assert {
        'triolet_speculative_rows_total{worker="decode-0"} 3.0',
        'triolet_speculative_proposed_total{worker="decode-0"} 9.0',
        'triolet_speculative_accepted_total{worker="decode-0"} 4.0',
    } <= lines(subject)
    assert not any("speculative" in line and "prefill" in line for line in lines(subject))


class Families(Collector):
    """Many families of ten samples; records how many samples each step of a task wrote.

    Attributes:
      num_collected: number of complete collections.
      most_in_a_step: most samples in one step of any task.
    """

    def __init__(self) -> None:
        self.num_collected = 0
        self.most_in_a_step = 0
        self._num_in_step = 0

    def collect(self) -> Iterator[Metric]:
        self.num_collected += 1
        for number in range(80):
            family = GaugeMetricFamily(f"many_{number}", "Many", labels=("of",))
            for value in range(10):
                family.add_metric((f'\\ \n "{value}',), 10.0**value)
            self._num_in_step += len(family.samples)
            yield family


class Steps(trio.abc.Instrument):
    """Ends a step of the families when a task's step ends."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        families = self._families
        families.most_in_a_step = max(families.most_in_a_step, families._num_in_step)
        families._num_in_step = 0


def with_many_families(server: Surface) -> Families:
    """Make a server export many families."""
    families = Families()
    assert isinstance(server.services.metrics, Metrics)
    server.services.metrics._registry.register(families)
    families.num_collected = families._num_in_step = 0
    return families


async def test_a_scrape_lets_others_have_their_turn_after_some_samples() -> None:
    async with surface() as server:
        families = with_many_families(server)
        steps = Steps(families)
        trio.lowlevel.add_instrument(steps)
        answer = await server.request("GET", "/metrics")
        trio.lowlevel.remove_instrument(steps)
    assert answer.body.count(b"\nmany_") == 800
    assert families.num_collected == 1
    assert 0 < families.most_in_a_step < 100


async def test_scrapes_at_once_share_one_text_that_was_begun_after_they_asked() -> None:
    async with surface() as server:
        families = with_many_families(server)
        metrics = server.services.metrics
        seen = []

        async def scrape() -> None:
            metrics.http.request("here")
            seen.append((await metrics.scrape()).decode())

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(scrape)
        # The first two may start before the others have asked.
        assert families.num_collected <= 3
        counts = [text.partition('requests_total{endpoint="here"} ')[2] for text in seen]
        assert {float(count.split()[0]) for count in counts[-38:]} == {40.0}
        with trio.CancelScope() as scope:
            scope.cancel()
            await metrics.scrape()
        assert b"many_" in await metrics.scrape(), "an abandoned scrape does not block others"


def test_the_text_is_the_client_library_s_byte_for_byte(metrics: Metrics) -> None:
    metrics._registry.register(Families())
    metrics.fleet.first_token(FirstTokenArrived(FACTS, 12345678.9))
    quoted = 'a "quoted"\n\\ name'
    metrics.tenants.count(quoted, ServiceClass.DEFAULT, "stop", Usage(10**9, 3))
    for _ in range(2):  # names are cached from the first time on
        ours = metrics.exposition().decode().splitlines()
        theirs = generate_latest(metrics._registry).decode().splitlines()
        assert len(ours) == len(theirs)
        different = [one for one, other in zip(ours, theirs, strict=True) if one != other]
        # The process's age changes between the two.
        assert all(line.startswith("process_") for line in different)
