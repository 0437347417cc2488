"""Tests of the order of queued requests with real processes: by class, and by weight within a
class, whichever came first.

The fleet has one decode worker with one row, which one request holds until all others wait. The
order in which requests end is then the scheduling order, however fast the machine is.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest
import trio

from loadtest.harness.streams import COMPLETIONS, Clients, post
from loadtest.overload.lab_process import QUEUE_ALONE
from loadtest.overload.real import RealShape, real_fleet
from simulation.modelled import StepCost
from tests import forked
from triolet.audit import FleetAudit
from triolet.invariants import check_at_rest

from .conftest import PATIENT
from .fleet_process import METRIC, PATIENCE_S, POLL_S
from .tenants import OPERATOR, headers_of, write_tenants

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from loadtest.harness.streams import Stream

pytestmark = pytest.mark.slow

PLANS: Final = {
    "holder": "",
    "flood": "",
    "equal": "",
    "heavy": "weight = 2",
    "lines": 'classes = ["batch"]',
    "cheap": 'classes = ["sheddable"]',
    "urgent": 'classes = ["critical"]',
}
COME: Final = {"flood": 6, "lines": 2, "cheap": 2, "equal": 2, "heavy": 4, "urgent": 2}
"""Requests of each tenant in order of arrival, which is the reverse of the expected order; few
enough that no class gets a turn by aging."""
COST: Final = StepCost(step_s=0.06, row_s=0.0, token_s=0.0)
HELD_TOKENS: Final = 1000
"""Length of the holder's answer: a minute, cancelled when all others have arrived."""
TOKENS: Final = 2


def request_of(tenant: str, number: int, max_tokens: int) -> bytes:
    """Return a request that differs from the others only by its tenant."""
    fields: dict[str, object] = {
        "prompt": "Once upon a time",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    headers = headers_of(tenant) | {"x-request-id": f"{tenant}-{number}"}
    return post(COMPLETIONS, fields, headers)


async def wait_for(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until it holds."""
    with trio.fail_after(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110
            await trio.sleep(POLL_S)


async def order_of_turns(folder: Path) -> list[str]:
    """Send all requests while the only row is taken; return the tenants in order of the ends."""
    tenants = write_tenants(folder / "tenants.toml", PLANS)
    options = (*PATIENT, "--set", "server.routing.local_prefill=always", "--tenants", str(tenants))
    shape = RealShape(
        prefills=0, max_num_seqs=1, cost=COST, mechanisms=QUEUE_ALONE, server_options=options
    )
    answers: list[Stream] = []
    with real_fleet(shape, folder, forked.Popen) as fleet:
        url, headers = f"http://127.0.0.1:{fleet.port}", headers_of(OPERATOR)
        clients = Clients(url)

        async def ask(tenant: str, number: int, max_tokens: int = TOKENS) -> None:
            answers.append(await clients.ask(request_of(tenant, number, max_tokens)))

        async def hold(scope: trio.CancelScope) -> None:
            with scope:
                await ask("holder", 0, HELD_TOKENS)

        async with (
            clients.reading(),
            httpx2.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as operator,
        ):

            async def are(running: int, waiting: int) -> bool:
                text = (await operator.get("/metrics")).raise_for_status().text
                found = {m["name"]: float(m["value"]) for m in METRIC.finditer(text)}
                names = ("triolet_requests_running", "triolet_requests_queued")
                return [found[name] for name in names] == [running, waiting]

            async def is_at_rest() -> bool:
                answer = (await operator.get("/fleet/audit")).raise_for_status()
                return not check_at_rest(FleetAudit.from_json(answer.content))

            async with trio.open_nursery() as nursery:
                holding = trio.CancelScope()
                nursery.start_soon(hold, holding)
                await wait_for(partial(are, 1, 0))
                num_waiting = 0
                for tenant, count in COME.items():
                    for number in range(count):
                        nursery.start_soon(ask, tenant, number)
                    num_waiting += count
                    await wait_for(partial(are, 1, num_waiting))
                assert not answers, "the holder's row was free too early"
                holding.cancel()
            await wait_for(is_at_rest)
    assert [answer.status for answer in answers] == [200] * sum(COME.values())
    assert {answer.code for answer in answers} == {""}
    return [end["client_request_id"].partition("-")[0] for end in ends(folder / "fleet.log")]


def ends(log: Path) -> list[dict[str, Any]]:
    """Return a server's log lines of request ends."""
    lines = [line for line in log.read_text().splitlines() if '"request_ended"' in line]
    return [json.loads(line) for line in lines]


@pytest.mark.promise
async def test_whoever_waits_goes_by_class_and_by_weight_and_not_by_who_came_first(
    tmp_path: Path,
) -> None:
    holder, *turns = await order_of_turns(tmp_path)
    assert holder == "holder"
    assert turns[:2] == ["urgent"] * 2
    assert turns[-4:] == ["cheap"] * 2 + ["lines"] * 2
    usual = turns[2:-4]
    # Two rounds by weight, then the tenant with most requests left.
    for first in (0, 4):
        assert Counter(usual[first : first + 4]) == {"flood": 1, "equal": 1, "heavy": 2}
    assert usual[8:] == ["flood"] * 4
