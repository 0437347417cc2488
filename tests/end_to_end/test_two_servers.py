"""Tests of two servers on one port: requests, rolling restart and audits."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import httpx2
import pytest
import trio

from loadtest.campaign.client import ask_all
from loadtest.restart import TOLD_TO_COME_AGAIN, long_asks
from triolet.invariants import check_invariants

from . import paced
from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, running_fleet, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from loadtest.campaign.client import Story

pytestmark = pytest.mark.slow

RESTART_PATIENCE_S = 240.0
NAMES = {"server-0", "server-1"}
WORKERS = ["decode-0", "prefill-0"]
QUESTION = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """A fleet with two servers."""
    log: Path = tmp_path_factory.mktemp("pair") / "fleet.log"
    options = (*WATCHED, *PATIENT, "--servers", "2", "--set", "server.drain_timeout_s=120")
    with running_fleet(log, *options, command=paced.COMMAND) as fleet:
        # A probe reaches one server; the supervisor probes both.
        wait_until(lambda: '"event": "ready"' in fleet.log_text(), PATIENCE_S, "both are ready")
        yield fleet


def received(fleet: FleetProcess) -> dict[str, float]:
    """Return the number of requests of each server."""
    samples = fleet.samples("triolet_requests_received_total")
    return {sample.labels["server"]: sample.value for sample in samples}


def workers_shown(fleet: FleetProcess) -> list[str]:
    """Return the workers of one server, by name."""
    return sorted(sample.labels["worker"] for sample in fleet.samples("triolet_worker_up"))


def ask_until_both_have_answered(fleet: FleetProcess) -> int:
    """Send requests on separate connections, which the kernel distributes; return the count."""
    before = received(fleet)
    count = 0
    while any(received(fleet).get(name, 0) <= before.get(name, 0) for name in NAMES):
        count += 1
        assert count < 200, "the kernel gives all connections to one server"
        httpx2.post(f"{fleet.url}/v1/completions", json=QUESTION, timeout=PATIENCE_S)
    return count


def test_both_serve_and_metrics_load_and_audit_are_of_both(pair: FleetProcess) -> None:
    before = sum(received(pair).values())
    count = ask_until_both_have_answered(pair)
    assert sum(received(pair).values()) == before + count
    assert {
        s.labels["server"]: s.value for s in pair.samples("triolet_server_up")
    } == dict.fromkeys(NAMES, 1.0)
    # A server is ready with decode alone, and names a worker by its address until the handshake.
    wait_until(lambda: workers_shown(pair) == WORKERS, PATIENCE_S, "both workers are greeted")
    assert pair.client.get("/load").json() == {"server_load": 0, "queued": 0, "running": 0}
    audit = pair.audit()
    assert {audit.server.name, *(each.server.name for each in audit.siblings)} == NAMES
    assert audit.server.received + sum(a.server.received for a in audit.siblings) == before + count
    assert check_invariants(audit) == []
    pair.wait_at_rest()


@pytest.mark.promise
def test_a_retry_joins_its_answer_whichever_server_gets_it(pair: FleetProcess) -> None:
    def count(what: str) -> float:
        samples = pair.samples("triolet_resumptions_total")
        return sum(sample.value for sample in samples if sample.labels["what"] == what)

    bodies, num_asked = set(), 0
    asked = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 1}
    while num_asked < 2 or not count("passed_on"):
        assert num_asked < 200, "the kernel gives all connections to one server"
        num_asked += 1
        answer = httpx2.post(
            f"{pair.url}/v1/completions",
            json=asked,
            headers={"idempotency-key": "one-of-two"},
            timeout=PATIENCE_S,
        )
        assert answer.status_code == 200
        bodies.add(answer.content)
    assert len(bodies) == 1
    assert count("begun") == 1
    pair.wait_at_rest()


def test_one_dies_and_the_other_goes_on(pair: FleetProcess) -> None:
    victim = pair.pids("server")[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: victim not in pair.pids("server"), PATIENCE_S, "it is gone")
    # Connections in the backlog of the killed server wait for its successor.
    for _ in range(8):
        answer = httpx2.post(
            f"{pair.url}/v1/completions", json=QUESTION, timeout=RESTART_PATIENCE_S
        )
        assert answer.status_code == 200
    wait_until(lambda: len(pair.pids("server")) == 2, PATIENCE_S, "it is back")
    wait_until(lambda: set(received(pair)) == NAMES, PATIENCE_S, "both count")
    ask_until_both_have_answered(pair)
    pair.wait_at_rest()


async def test_each_is_replaced_in_turn_under_live_streams(pair: FleetProcess) -> None:
    asks = long_asks(4, max_tokens=40, seed=3)
    calm = await ask_all(pair.url, asks, len(asks), lambda _: None)
    before, templates = set(pair.pids("server")), set(pair.pids("template"))
    stories: list[Story] = []
    is_done = trio.Event()

    async def keep_asking() -> None:
        while not is_done.is_set():
            stories.extend(await ask_all(pair.url, asks, len(asks), lambda _: None))

    with trio.fail_after(RESTART_PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_asking)
            code, said = await trio.to_thread.run_sync(
                pair.run_triolet, "restart", "--role", "server"
            )
            is_done.set()
    assert code == 0, said
    assert not before & set(pair.pids("server"))
    # The servers' template is renewed; the workers' template keeps the code of the running workers.
    assert len(templates & set(pair.pids("template"))) == 1
    failed = [story for story in (*calm, *stories) if story.failure]
    # A server that exits refuses requests that it has not started.
    wrong = [s for s in failed if s.arrivals or TOLD_TO_COME_AGAIN not in (s.failure or "")]
    assert wrong == []
    expected = {story.ask.number: story.answer for story in calm}
    whole = [story for story in stories if not story.failure]
    assert whole
    assert all(story.answer == expected[story.ask.number] for story in whole)
    pair.wait_at_rest()
