"""GET /fleet/status: figures for the dashboard, for callers on this machine."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.server.support.surface import surface


async def test_it_tells_workers_blocks_and_what_was_counted() -> None:
    async with surface() as server:
        answer = await server.request("GET", "/fleet/status")
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


@pytest.mark.parametrize("path", ["/fleet/status", "/fleet/status/own"])
async def test_what_a_proxy_passes_on_is_refused(path: str) -> None:
    async with surface() as server:
        answer = await server.request("GET", path, headers={"via": "1.1 proxy"})
    assert (answer.status, answer.error["code"]) == (403, "permission_denied")


async def test_the_page_is_open_and_its_figures_are_not_in_it() -> None:
    async with surface() as server:
        page = await server.request("GET", "/dashboard", headers={"via": "1.1 proxy"})
    assert page.status == 200
    assert b"/static/dashboard.js" in page.body
