"""Tests of the request that a batch line becomes, through the whole application."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
import trio

from server.app import build_app
from server.contract.generation import CancelReason
from server.jobs.records import answer_line
from server.jobs.runner import InnerRequest
from server.tenants.accounts import limits_of
from server.tenants.memory_store import QuotaObserver
from server.tenants.opening import opened_quotas
from server.tenants.tenancy import Tenancy
from tests.server.support.fakes import FakeFleet, by_hand
from tests.server.support.surface import PATIENCE_S, surface
from tests.server.support.tenants import tenant, tenants_of
from triolet.config import QuotaConfig
from triolet.errors import crowded_out, overloaded
from triolet.tenants.plans import Prices

from .test_full_disk import OWNER, PLAN, ChargingFleet

if TYPE_CHECKING:
    from pathlib import Path

    from triolet.errors import RequestError

PATH: Final = "/v1/completions"
BODY: Final = json.dumps({"prompt": "hi"}).encode()


def request(name: str = "line", owner: str = "") -> InnerRequest:
    return InnerRequest("127.0.0.1", PATH, BODY, name, owner, 3600.0)


@pytest.mark.parametrize(
    ("error", "is_crowded_out"),
    [(crowded_out("full", 2.0), True), (overloaded("dead", 2.0), False)],
)
async def test_who_is_crowded_out_is_told_from_who_met_a_fault(
    error: RequestError, is_crowded_out: bool
) -> None:
    async with surface() as server:
        server.fleet.refuse_with = error
        answer = await request().ask(build_app(server.services))
    assert (answer.status, answer.is_crowded_out) == (503, is_crowded_out)
    assert answer.retry_after_s is not None
    assert json.loads(answer.body)["error"]["code"] == "overloaded"


async def test_its_line_names_the_version_that_answered() -> None:
    digest = "sha256:" + "ab" * 32
    for model_digest, shown in ((digest, {"model_version": digest}), ("", {})):
        async with surface(model_digest=model_digest) as server:
            answer = await request().ask(build_app(server.services))
        line = answer_line("r", "c", answer.status, "rid", answer.body, answer.version)
        response = json.loads(line)["response"]
        assert {key: response[key] for key in response if key == "model_version"} == shown


async def test_it_knows_whether_it_has_begun_and_ends_what_it_holds_when_it_is_taken_back() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        line = request()
        assert not line.has_begun
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(line.ask, build_app(server.services))
                generation = await server.fleet.nth(0)
                await trio.testing.wait_all_tasks_blocked()
                assert not line.has_begun
                generation.say("Hello")
                assert line.has_begun
                nursery.cancel_scope.cancel()
        assert generation.cancelled == [CancelReason.CLIENT_GONE]


async def test_a_line_that_is_computed_again_is_charged_once(tmp_path: Path) -> None:
    config = QuotaConfig(spend_file=str(tmp_path / "spend"))
    tenancy = Tenancy(tenants_of(tenant(OWNER, "key", plan=PLAN)))
    with opened_quotas(config, QuotaObserver(), lambda _: Prices()) as quotas:
        fleet, used = ChargingFleet(quotas), list[int]()
        async with surface(fleet, tenancy=tenancy, quotas=quotas) as server:
            for name in ("one", "one", "other"):
                await request(name, OWNER).ask(build_app(server.services))
                await quotas.store.wait_saved()
                account = await quotas.store.account(OWNER, limits_of(PLAN))
                used.append(account.used_tokens)
        assert fleet.used_tokens == 3 * used[0] > 0
    assert used == [used[0], used[0], 2 * used[0]]
