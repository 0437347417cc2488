"""Tests of the admission benchmark: it times the server's own steps and leaves no request
behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadtest.bench.admission import (
    FLOOD,
    LIMITED,
    MOST_US,
    OFF,
    OK,
    ON,
    OVERLOADED,
    PLANS,
    REFUSED,
    TENANTS,
    Course,
    Found,
    ask_too_much,
    measure,
    report_of,
)
from loadtest.bench.admission_server import SETTLED, STEPS, SUBMIT, SWEPT, TAKEN, Form, Lap
from loadtest.harness.tenants import tenants_file
from server import app
from server.api import auto, generate
from server.api.openai import chat as completions
from server.scheduling.attempt import Attempts
from server.scheduling.request import RequestTable
from server.scheduling.requests import Requests
from server.tenants.opening import quotas_in_memory
from server.tenants.tenancy import Tenancy
from tests.server.support.fakes import FakeAdmission, FakeFleet, FakeText, answer_hello
from tests.server.support.request_lives import ChargedEvents
from tests.server.support.surface import surface
from triolet.errors import overloaded
from triolet.tenants.form import read_tenants

if TYPE_CHECKING:
    from server.contract.generation import GenerationRequest
    from server.scheduling.admission import AdmissionAsk
    from server.tenants.quotas import Quotas
    from tests.server.support.fakes import FakeGeneration

OTHERS, REQUESTS = 150, 24


def steps_of_the_product() -> list[object]:
    steps = {
        app: ("check_request",),
        completions: ("read_fields", "own_requests"),
        auto: ("check_fields", "refuse_early"),
        generate: ("reserved", "submit_all"),
        Attempts: ("dispatch",),
        RequestTable: ("finish", "fail"),
        Requests: ("sweep",),
    }
    return [getattr(place, name) for place, names in steps.items() for name in names]


@pytest.mark.long
@pytest.mark.slow
def test_everybody_gets_a_place_or_a_refusal_and_every_step_is_timed() -> None:
    before, found = steps_of_the_product(), {}
    for name in (OFF, ON):
        into = found[0, name] = Found()
        measure(Course(Form(is_on=name == ON), OTHERS, REQUESTS), into)
        assert len(into.accepted) + len(into.refused) == REQUESTS
        assert all(set(STEPS) <= set(lap.steps) for lap in into.accepted)
        for lap in into.accepted:
            assert 0 < sum(lap.steps[step] for step in STEPS) <= lap.whole_ns
        assert set(into.statuses) <= {OK, REFUSED}
        assert into.statuses.count(REFUSED) == len(into.refused)
        assert all(into.taken_ns[what] for what in (TAKEN, SETTLED, SWEPT))
    # The queue takes longer than the SLO of the sheddable class (2 s), so its requests are refused
    # when admission is on. When it is off, none is.
    assert found[0, ON].refused
    assert not any(SUBMIT in lap.steps for lap in found[0, ON].refused)
    assert not found[0, OFF].refused
    assert steps_of_the_product() == before
    report = report_of({}, found, {OVERLOADED: [1e6, 2e6]}, {})
    assert {row["what"] for row in report.rows} == {"a place", "a refusal", "more"}


def test_a_way_that_takes_too_long_is_said() -> None:
    def found(us: float) -> Found:
        return Found(accepted=[Lap(0, round(1000 * us), {"parse": 0})] * 3)

    for us, is_met in ((MOST_US - 1, True), (MOST_US + 1, False)):
        report = report_of({}, {(0, OFF): found(5), (0, ON): found(us)}, {OVERLOADED: [49e6]}, {})
        whole, refusal = report.ratios.values()
        assert (whole.is_met, refusal.is_met) == (is_met, True)
    (late,) = report_of({}, {}, {LIMITED: [51e6]}, {}).ratios.values()
    assert not late.is_met


class Choosy(FakeFleet):
    """Refuses requests of one tenant, never answers those of the flood, and charges all others."""

    def __init__(self, quotas: Quotas) -> None:
        super().__init__(self.answer)
        self.charged = ChargedEvents(quotas)
        self.admission = ChoosyAdmission()

    def begin(self, request: GenerationRequest) -> FakeGeneration:
        self.charged.accept(request.request_id)
        return super().begin(request)

    def answer(self, generation: FakeGeneration) -> None:
        if generation.request.scheduling.tenant != FLOOD:
            answer_hello(generation)


class LargeText(FakeText):
    vocab_size = 1000


class ChoosyAdmission(FakeAdmission):
    def admit(self, ask: AdmissionAsk, now: float) -> None:
        if ask.scheduling.tenant == TENANTS[OVERLOADED]:
            raise overloaded("too much", 1.0)


@pytest.mark.slow
async def test_only_refusals_of_the_kind_that_was_asked_for_are_timed() -> None:
    tenancy = Tenancy(read_tenants(tenants_file(PLANS).encode(), "tenants.toml"))
    quotas = quotas_in_memory()
    fleet, text = Choosy(quotas), LargeText()
    async with surface(fleet, tenancy=tenancy, quotas=quotas, text=text) as server:
        taken_ns = await ask_too_much(server.url, 5, warm_s=0.0)
    # The limit of one request per minute admits the first one.
    assert {status: len(taken) for status, taken in taken_ns.items()} == {
        OVERLOADED: 5,
        LIMITED: 4,
    }
    assert all(taken > 0 for taken in (*taken_ns[OVERLOADED], *taken_ns[LIMITED]))
