"""Tests of burn rates and budgets: the tables in docs/SLO.md and slo_rules.md, computed by the
server's code; and GET /admin/slo, which sums over all servers on the port."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from server.contract.generation import Usage
from server.contract.request_events import RequestEnded, RequestRefused
from server.metrics.metrics import Metrics
from server.slo.event_windows import EventCounts
from server.slo.meter import SloMeter
from server.slo.report import BUDGET, burn_rate, fires, rows_of, slo_report
from tests.house.test_layout import ROOT
from tests.server.support.request_lives import FACTS
from tests.server.support.surface import surface
from tests.server.test_peers import two_servers
from triolet.config import ObjectivesConfig
from triolet.service_class import ServiceClass
from triolet.slo.burn_alerts import DEPLOYMENT, PAIRS, SPANS_S, BurnAlert
from triolet.slo.objectives import read_objectives
from triolet.units import parse_span

from .ledger import FAILED, OF_CLIENTS, SERVED

if TYPE_CHECKING:
    from pathlib import Path

    from triolet.slo.objectives import ServiceObjective

OBJECTIVES = read_objectives(ObjectivesConfig())
AVAILABILITY = OBJECTIVES[0]
PAGES = ("SLO.md", "operations/slo_rules.md")
TEXT = "\n\n".join((ROOT / "docs" / page).read_text("utf-8") for page in PAGES)


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table with this heading in the documents."""
    _, _, rest = TEXT.partition(f"| {heading}")
    rows = re.findall(r"^\|(.+)\|$", rest.partition("\n\n")[0], re.MULTILINE)[1:]
    assert rows
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def objective(target: str, window: str = "30d") -> ServiceObjective:
    return replace(AVAILABILITY, target=float(target), window_s=parse_span(window) or 0)


def counts(bad_share: float, total: int = 1_000_000) -> EventCounts:
    return EventCounts(total - round(total * bad_share), total)


@pytest.mark.parametrize(
    ("target", "window", "events", "bad", "rate"), table("target | window | events")
)
def test_examples_of_burn_rates(target: str, window: str, events: str, bad: str, rate: str) -> None:
    total, num_bad = int(events), int(bad)
    row = ("availability", "", "", window, total - num_bad, total)
    [shown] = slo_report([objective(target)], [row], 60.0)["objectives"]
    wanted = None if rate == "none" else pytest.approx(float(rate))
    assert shown["burn_rates"] == {window: wanted}


@pytest.mark.parametrize(
    ("target", "window", "minutes", "observed", "share", "remaining", "frozen"),
    table("target | window | budget"),
)
def test_examples_of_budgets(
    target: str,
    window: str,
    minutes: str,
    observed: str,
    share: str,
    remaining: str,
    frozen: str,
) -> None:
    row = ("availability", "", "", BUDGET, *counts(float(share)))
    report = slo_report([objective(target, window)], [row], float(parse_span(observed) or 0))
    budget = report["objectives"][0]["budget"]
    assert (budget["minutes"], budget["remaining_minutes"]) == (float(minutes), float(remaining))
    assert report["is_frozen"] == (frozen == "yes")
    assert report["reason"] == report["is_frozen"] * "the error budget of availability is spent"
    lenient = replace(objective(target, window), freezes=False)
    assert not slo_report([lenient], [row], 1e9)["is_frozen"]


def test_the_documents_table_of_outcomes_is_the_one_that_is_used() -> None:
    told = {kind: set(re.findall(r"`(\w+)`", names)) for names, kind in table("outcome in")}
    assert told == {
        "good": SERVED,
        "bad": FAILED,
        "not counted": OF_CLIENTS | {"quarantined"},
    }


def test_the_documents_table_of_alerts_is_the_one_that_is_used() -> None:
    wanted = [
        [one.severity, f"{one.rate:g}", one.long, one.short, str(one.min_bad)]
        for one in (*PAIRS, DEPLOYMENT)
    ]
    assert table("alert | burn rate") == wanted


@pytest.mark.parametrize(
    ("target", "deployment", "page", "ticket"), table("target | deployment | page")
)
def test_the_documents_delays_are_those_of_the_pairs(
    target: str, deployment: str, page: str, ticket: str
) -> None:
    told = {"deployment": deployment, "page": page, "ticket": ticket}
    for severity, delay in told.items():
        # In an outage all events are bad, so a window exceeds a share after that share of its
        # length.
        delays_s = [
            pair.rate * objective(target).budget * max(SPANS_S[pair.long], SPANS_S[pair.short])
            for pair in (*PAIRS, DEPLOYMENT)
            if pair.severity == severity
        ]
        assert float(delay.removesuffix(" s")) == pytest.approx(min(delays_s))


@pytest.mark.parametrize("pair", [*PAIRS, DEPLOYMENT], ids=lambda one: f"{one.severity} {one.long}")
@pytest.mark.parametrize("days", [30, 7])
def test_a_pair_fires_while_both_windows_burn(pair: BurnAlert, days: int) -> None:
    of = replace(AVAILABILITY, window_s=days * 86_400, target=0.999)
    limit = pair.rate * days / 30 * of.budget
    above, below = counts(limit + 0.0001), counts(limit - 0.0001)
    assert fires(pair, of, {pair.long: above, pair.short: above})
    assert not fires(pair, of, {pair.long: below, pair.short: above})
    assert not fires(pair, of, {pair.long: above, pair.short: below})
    assert not fires(pair, of, {pair.long: above})


def test_a_deployment_needs_five_bad_events() -> None:
    of = {bad: {"5m": EventCounts(0, bad), "30s": EventCounts(0, bad)} for bad in (4, 5)}
    assert not fires(DEPLOYMENT, AVAILABILITY, of[4])
    assert fires(DEPLOYMENT, AVAILABILITY, of[5])
    assert burn_rate(AVAILABILITY, EventCounts()) is None


class Clock:
    """A clock that a test sets."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def ended(status: int, digest: str = "sha256:1") -> RequestEnded:
    facts = replace(FACTS, model="chat", model_digest=digest, is_streamed=True)
    return RequestEnded(facts, "", "", Usage(0, 0), 1.0, status=status)


def test_a_new_version_is_seen_beside_one_with_many_requests() -> None:
    clock = Clock()
    meter = SloMeter(OBJECTIVES, clock=clock)
    for _ in range(1000):
        meter.ended(ended(200))
    for _ in range(5):
        meter.ended(ended(500, "sha256:2"))
    clock.now += 20
    report = slo_report(OBJECTIVES, rows_of(meter.counters, clock.now), 20.0)
    available = report["objectives"][0]
    assert available["alerts"] == []
    assert {one["version"]: one["is_burning"] for one in available["versions"]} == {
        "sha256:1": False,
        "sha256:2": True,
    }
    clock.now += 31
    report = slo_report(OBJECTIVES, rows_of(meter.counters, clock.now), 51.0)
    assert not any(one["is_burning"] for one in report["objectives"][0]["versions"])


async def test_the_route_tells_all_objectives() -> None:
    async with surface() as server:
        server.services.metrics.slos = meter = SloMeter(OBJECTIVES, clock=(clock := Clock()))
        for status in (*4 * [200], 500, 499):
            meter.ended(ended(status))
        clock.now += 3600
        report = (await server.request("GET", "/admin/slo")).json
    assert [one["name"] for one in report["objectives"]] == [one.name for one in OBJECTIVES]
    assert (report["observed_s"], report["servers"], report["is_frozen"]) == (3600, 1, False)
    available, completed, *others = report["objectives"]
    assert available["events"]["2h"] == {"good": 4, "total": 5}
    assert completed["events"]["2h"] == {"good": 5, "total": 6}
    assert available["burn_rates"]["2h"] == pytest.approx(20)
    assert available["burn_rates"]["5m"] is None
    assert available["budget"] == {
        "minutes": 432.0,
        "remaining_minutes": 420.0,
        "is_spent": False,
    }
    assert {one["events"]["3d"]["total"] for one in others} == {0}


async def test_whichever_server_is_asked_the_counts_of_all_are_added_up(tmp_path: Path) -> None:
    refused = RequestRefused("overloaded", "", ServiceClass.DEFAULT, 503, "chat", "")
    metrics = []
    for num_bad in (1, 2):
        meter = SloMeter(OBJECTIVES[:1])
        for event in [ended(200), *num_bad * [refused]]:
            meter.refused(event) if event is refused else meter.ended(event)
        metrics.append(Metrics("demo", "none", slos=meter))
    async with two_servers(tmp_path, metrics=metrics) as servers:
        for one in servers:
            [body] = (await one.ask("/admin/slo")).values()
            report = json.loads(body or b"")
            assert report["servers"] == 2
            assert report["objectives"][0]["events"]["1h"] == {"good": 2, "total": 5}
            versions = {
                one["version"]: one["events"] for one in report["objectives"][0]["versions"]
            }
            assert versions["sha256:1"]["5m"] == {"good": 2, "total": 2}
            assert versions[""]["5m"] == {"good": 0, "total": 3}
