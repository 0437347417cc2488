"""Tests of the history of the last hour and of GET /fleet/history, with an injected clock."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from server.contract.generation import Usage
from server.contract.request_events import FirstTokenArrived, RequestEnded, RequestRefused
from server.metrics.history import FleetHistory, add_row, model_figures
from server.metrics.metrics import Metrics
from server.slo.meter import SloMeter
from tests.server.support.request_lives import FACTS
from tests.server.support.surface import CONFIG, requested, surface
from triolet.config import ObjectivesConfig
from triolet.service_class import ServiceClass
from triolet.slo.objectives import read_objectives

if TYPE_CHECKING:
    import trio.testing

SAMPLE_S = CONFIG.sample_s
REFUSED = RequestRefused("overloaded", "", ServiceClass.DEFAULT, 503, "demo", "")


class Hour:
    """A history whose wall clock is the virtual clock."""

    def __init__(self, clock: trio.testing.MockClock, *models: str, most_models: int = 16) -> None:
        self.at_s = 1_000_000.0
        objectives = read_objectives(ObjectivesConfig())
        slos = SloMeter(objectives, ObjectivesConfig(shown_tenants=1), lambda: self.at_s)
        self.metrics = Metrics("demo", "none", *models, slos=slos)
        config = replace(CONFIG, history_models=most_models)
        self.history = FleetHistory(self.metrics, config, dict, lambda: self.at_s)
        self._clock = clock
        self.history.sample()

    def next_sample(self, seconds: float = SAMPLE_S) -> None:
        self.at_s += seconds
        self._clock.jump(seconds)
        self.history.sample()

    @property
    def last(self) -> dict[str, float | None]:
        return model_figures(list(self.history.rows.values())[-1]["models"]["demo"])


async def test_a_row_has_the_rates_and_quantiles_of_its_interval(
    mock_clock: trio.testing.MockClock,
) -> None:
    hour = Hour(mock_clock)
    hour.metrics.fleet.first_token(FirstTokenArrived(FACTS, 0.09))
    hour.metrics.fleet.token_gaps.observe(0.004)
    hour.metrics.fleet.refused(REFUSED)
    hour.next_sample()
    assert hour.last["tokens_per_s"] == 2 / SAMPLE_S
    assert hour.last["refusals_per_s"] == 1 / SAMPLE_S
    assert 0.08 < (hour.last["ttft_p50_s"] or 0) < (hour.last["ttft_p99_s"] or 0) <= 0.1
    assert 0.0025 < (hour.last["itl_p50_s"] or 0) <= 0.005
    hour.next_sample()
    assert (hour.last["tokens_per_s"], hour.last["ttft_p99_s"]) == (0, None)


async def test_an_early_timer_adds_no_row_and_a_late_one_no_wrong_rate(
    mock_clock: trio.testing.MockClock,
) -> None:
    hour = Hour(mock_clock)
    hour.next_sample(0.01)
    assert not hour.history.rows
    hour.metrics.fleet.first_token(FirstTokenArrived(FACTS, 0.09))
    hour.next_sample(3 * SAMPLE_S - 0.01)
    assert hour.last["tokens_per_s"] == pytest.approx(1 / (3 * SAMPLE_S))


async def test_it_keeps_an_hour_and_nothing_of_a_future(mock_clock: trio.testing.MockClock) -> None:
    hour = Hour(mock_clock)
    most = round(CONFIG.history_s / SAMPLE_S)
    for _ in range(most + 5):
        hour.next_sample()
    assert len(hour.history.rows) == most
    hour.at_s -= 11 * SAMPLE_S  # the clock was set back
    hour.next_sample()
    assert max(hour.history.rows) == round(hour.at_s / SAMPLE_S)
    assert len(hour.history.rows) == most - 10


async def test_further_models_and_tenants_count_together(
    mock_clock: trio.testing.MockClock,
) -> None:
    hour = Hour(mock_clock, "b", "c", most_models=1)
    for name in ("b", "c"):
        hour.metrics.fleets[name].first_token(FirstTokenArrived(FACTS, 0.09))
    for tenant, tokens in (("acme", 30), ("umbrella", 10), ("initech", 10)):
        facts = replace(FACTS, tenant=tenant)
        hour.metrics.slos.ended(RequestEnded(facts, "stop", "decode", Usage(0, tokens), 0.1))
    hour.next_sample()
    row = list(hour.history.rows.values())[-1]
    assert list(row["models"]) == ["demo", "other"]
    assert row["models"]["other"][0] == 2 / SAMPLE_S
    assert row["tenants"] == {"acme": [30 / SAMPLE_S], "other": [20 / SAMPLE_S]}


async def test_rows_of_two_servers_give_the_quantiles_of_all_requests(
    mock_clock: trio.testing.MockClock,
) -> None:
    fast, slow = Hour(mock_clock), Hour(mock_clock)
    for _ in range(99):
        fast.metrics.fleet.first_token(FirstTokenArrived(FACTS, 0.015))
    for _ in range(9):
        slow.metrics.fleet.first_token(FirstTokenArrived(FACTS, 6.0))
    fast.at_s += SAMPLE_S
    slow.next_sample()
    fast.history.sample()
    [row], [other] = (list(one.history.rows.values()) for one in (fast, slow))
    add_row(row, other)
    figures = model_figures(row["models"]["demo"])
    assert (figures["ttft_p50_s"] or 9) < 0.02
    assert (figures["ttft_p99_s"] or 0) > 5.0


async def test_the_answer_has_one_list_for_each_figure(mock_clock: trio.testing.MockClock) -> None:
    async with surface() as server:
        services = server.services
        at_s = [1_000.0 * SAMPLE_S]
        history = FleetHistory(services.metrics, CONFIG, dict, lambda: at_s[0])
        object.__setattr__(services, "history", history)
        history.sample()
        services.metrics.fleet.first_token(FirstTokenArrived(FACTS, 0.09))
        for _ in range(2):
            at_s[0] += SAMPLE_S
            mock_clock.jump(SAMPLE_S)
            history.sample()
        answer = (await server.request("GET", "/fleet/history")).json
    assert answer["at_s"] == [1001 * SAMPLE_S, 1002 * SAMPLE_S]
    assert answer["all"]["tokens_per_s"] == [pytest.approx(1 / SAMPLE_S, rel=0.1), 0.0]
    assert answer["all"]["ttft_p50_s"][1] is None
    assert list(answer["models"].values()) == [answer["all"]]


@pytest.mark.parametrize("path", ["/fleet/history", "/fleet/history/own"])
async def test_what_a_proxy_passes_on_is_refused(path: str) -> None:
    answer = await requested("GET", path, headers={"Via": "1.1 proxy"})
    assert answer.status == 403
