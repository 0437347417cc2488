"""Tests of merging the metrics of several servers: each is labelled, and nothing appears twice."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from server.contract.request_events import FirstTokenArrived, RequestRefused
from server.metrics.exposition import merging
from server.metrics.metrics import Metrics
from tests.server.support.fakes import FakeFleet
from tests.server.support.request_lives import FACTS
from triolet.service_class import ServiceClass


def exposition(requests: int) -> str:
    metrics = Metrics("demo", "vllm")
    metrics.watch(FakeFleet().status, lambda: requests, lambda: {"direct": 1})
    for _ in range(requests):
        metrics.fleet.first_token(FirstTokenArrived(FACTS, 0.01))
        metrics.fleet.refused(RequestRefused('a"b} c', "", ServiceClass.DEFAULT, 503, "demo", ""))
    return metrics.exposition().decode()


def test_every_sample_of_a_server_has_its_name_and_workers_are_there_once() -> None:
    own = exposition(2)
    merged = "".join(merging({"server-0": own, "server-1": exposition(3), "server-2": None}))
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    alone = {family.name: family for family in text_string_to_metric_families(own)}
    assert set(families) == set(alone) | {"triolet_server_up"}
    received = families["triolet_requests_received"].samples
    assert {s.labels["server"]: s.value for s in received} == {"server-0": 2.0, "server-1": 3.0}
    rejected = families["triolet_requests_rejected"].samples
    assert {s.labels["server"]: s.labels["code"] for s in rejected} == {
        "server-0": 'a"b} c',
        "server-1": 'a"b} c',
    }
    for name in ("triolet_kv_blocks", "triolet_worker_up", "vllm:kv_cache_usage_perc"):
        assert families[name].samples == alone[name].samples
    for name in ("triolet_speculative_rows", "triolet_speculative_accepted"):
        assert families[name].samples == alone[name].samples
    up = families["triolet_server_up"].samples
    assert [s.value for s in up] == [1.0, 1.0, 0.0]
    counts = [
        s for s in families["triolet_time_to_first_token_seconds"].samples if "le" in s.labels
    ]
    assert {s.labels["server"] for s in counts} == {"server-0", "server-1"}
