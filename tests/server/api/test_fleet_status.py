"""Tests of GET /fleet/status, the data of the dashboard: its content, and that only callers on this
machine get it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from server.contract.request_events import FirstTokenArrived, RequestRefused
from server.metrics.history import FleetHistory
from server.metrics.metrics import Metrics
from tests.server.scheduling.world import World
from tests.server.support.fakes import FakeFleet
from tests.server.support.request_lives import FACTS
from tests.server.support.surface import CONFIG, requested, surface
from triolet.errors import no_worker, overloaded
from triolet.service_class import Scheduling, ServiceClass

if TYPE_CHECKING:
    from tests.server.support.fakes import FakeGeneration


async def test_it_tells_workers_blocks_and_what_was_counted() -> None:
    answer = await requested("GET", "/fleet/status")
    assert answer.status == 200
    status = answer.json
    assert (status["queued"], status["servers"], status["is_draining"]) == (0, 1, False)
    assert set(status["latencies"]) == {"ttft", "itl", "queue"}
    for histogram in status["latencies"].values():
        assert len(histogram["totals"]) == len(histogram["bounds_s"]) + 1
        assert all(a <= b for a, b in pairwise(histogram["bounds_s"]))
    assert (status["queued_by_class"], status["rejected_by_code"]) == ({}, {})
    for worker in status["workers"]:
        assert set(worker["blocks"]) == {"used", "cached", "free", "all"}


async def test_refusals_are_told_by_code_whatever_their_class() -> None:
    async with surface() as server:
        for service_class in (ServiceClass.DEFAULT, ServiceClass.BATCH):
            refused = RequestRefused("overloaded", "", service_class, 503, "demo", "")
            server.services.metrics.fleet.refused(refused)
        server.services.metrics.fleet.refused(replace(refused, code="no_worker"))
        status = (await server.request("GET", "/fleet/status")).json
    assert status["rejected_by_code"] == {"overloaded": 2, "no_worker": 1}
    assert status["counters"]["requests_rejected"] == 3


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("/fleet/status", "Via"),
        ("/fleet/status/own", "Via"),
        ("/fleet/audit", "Via"),
        ("/fleet/audit", "X-Forwarded-For"),
        ("/fleet/audit", "Forwarded"),
        ("/fleet/audit", "X-Real-IP"),
    ],
)
async def test_what_a_proxy_passes_on_is_refused(path: str, header: str) -> None:
    answer = await requested("GET", path, headers={header: "127.0.0.1"})
    assert (answer.status, answer.error["code"]) == (403, "permission_denied")


async def test_the_page_is_open_and_its_figures_are_not_in_it() -> None:
    page = await requested("GET", "/dashboard", headers={"via": "1.1 proxy"})
    assert page.status == 200
    assert b"/static/dashboard.js" in page.body


async def test_the_last_seconds_are_told_at_once_and_no_more_than_those(
    autojump_clock: trio.testing.MockClock,
) -> None:
    metrics = Metrics("demo", "none")
    recent = FleetHistory(metrics, CONFIG, dict, trio.current_time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(recent.run)
        await trio.testing.wait_all_tasks_blocked()
        metrics.fleet.first_token(FirstTokenArrived(FACTS, 0.02))
        await trio.sleep(CONFIG.recent_s - CONFIG.sample_s / 2)
        assert recent.since_then()["latencies"]["ttft"]["totals"][-1] == 1
        await trio.sleep(CONFIG.recent_s)
        metrics.fleet.first_token(FirstTokenArrived(FACTS, 0.02))
        await trio.sleep(CONFIG.sample_s)
        told = recent.since_then()
        assert told["latencies"]["ttft"]["totals"][-1] == 1, (
            "the first request came before the window"
        )
        assert CONFIG.recent_s <= told["seconds"] <= CONFIG.recent_s + CONFIG.sample_s
        assert told["counters"]["prompt_tokens"] == 0
        nursery.cancel_scope.cancel()


async def test_errors_are_told_by_status() -> None:
    async with surface() as server:
        await server.request("GET", "/v1/nothing")
        status = (await server.request("GET", "/fleet/status")).json
    assert status["errors_by_status"] == {"404": 1}
    assert status["recent"]["seconds"] == 0.0


async def test_a_503_is_told_by_status_unless_the_queue_told_its_reason() -> None:
    def fail(generation: FakeGeneration) -> None:
        generation.fail(no_worker("the worker is gone"))

    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with surface(FakeFleet(fail)) as server:
        for _ in range(2):
            answer = await server.post("/v1/chat/completions", asked)
            assert answer.status == 503
        told = (await server.request("GET", "/fleet/status")).json["errors_by_status"]
        assert told == {"503": 2}
        refusal = overloaded("no room", retry_after_s=1.0)
        World(connect=False).requests.table.reject(Scheduling(), refusal)
        server.fleet.refuse_with = refusal
        assert (await server.post("/v1/chat/completions", asked)).status == 503
        told = (await server.request("GET", "/fleet/status")).json["errors_by_status"]
        assert told == {"503": 2}
        metrics = (await server.request("GET", "/metrics")).body
    assert b'triolet_http_errors_total{status="503"} 3.0' in metrics
