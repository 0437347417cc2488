"""Tests of waits in the fault matrix: an expired wait names its object, and a phase is held for all
questions or none."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import trio

from server.scheduling.routing import Need, is_within_pace
from server.scheduling.workers import Worker
from tests.faults.fleet import SERVER_OPTIONS, WORKERS, Fleet, full
from tests.faults.matches import hold_prefills
from tests.faults.matrix import cells
from tests.faults.phases import _ask_together, _let_in, _reach
from tests.faults.processes import FaultNotInjectedError, OverdueError
from tests.faults.proxy import Lane
from tests.faults.report import json_of, lines_of
from tests.faults.rules import Fate, Link, Sighting, Way
from tests.faults.run_cell import CellResult
from tests.faults.state import lines_of as state_lines_of
from tests.faults.worker import StepGate
from transport.frames import (
    PROTOCOL_VERSION,
    AttemptRow,
    Capacity,
    End,
    EndReason,
    KvTarget,
    Load,
    Prefill,
    ServerHeartbeat,
    Welcome,
    WorkerHeartbeat,
)
from transport.parts import Peer
from triolet.audit import AttemptAudit, FleetAudit, LeaseAudit, PoolAudit, ServerAudit, WorkerAudit
from triolet.audit import WorkerView as View
from triolet.config import LinkConfig, RecoveryConfig, RoutingConfig
from triolet.ids import Role
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.faults.client import Client
    from transport.frames import AnyFrame

LINK = Link("server", "p0", "control")
LONG_PROMPT_TOKENS = 460


def request_id(number: int) -> bytes:
    return bytes([number]) * 16


def prefill(number: int, attempt: int = 0) -> Prefill:
    target = KvTarget(Peer(Role.DECODE, "d0", 1), "ipc://d0")
    return Prefill(request_id(number), attempt, b"", target, SamplingParams(), 0, 1.0)


def sighting(frame: AnyFrame) -> Sighting:
    return Sighting(0.0, LINK, Way.TO_WORKER, frame, Fate.PASS)


@asynccontextmanager
async def idle_fleet(directory: Path) -> AsyncIterator[Fleet]:
    """A fleet without running processes."""
    async with trio.open_nursery() as nursery:
        fleet = Fleet(directory, directory, nursery)
        yield fleet
        await fleet.stop()


def clients(count: int) -> list[Client]:
    return cast("list[Client]", [None] * count)


async def test_a_wait_that_expires_names_its_object_and_tells_the_state_before_it_is_undone(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    async with idle_fleet(tmp_path) as fleet:
        rule, _ = hold_prefills()
        with pytest.RaisesGroup(OverdueError, flatten_subgroups=True) as caught:
            async with fleet.within(60.0, "PREFILL of 2 questions"):
                with fleet.proxy.rule(rule):
                    await trio.sleep_forever()
        error = cast("OverdueError", caught.value.exceptions[0])
    assert str(error) == "waited 60 s for PREFILL of 2 questions"
    assert "process p0: never started" in error.state
    assert "rule hold hold_prefills: 0 hits" in error.state
    assert "the server does not report its state" in error.state


def test_a_state_tells_queue_workers_attempts_and_leases() -> None:
    lease = LeaseAudit("a/0", "server@1", "running", 3, 2.0, 0.25, 500.0)
    account = WorkerAudit(
        Role.PREFILL, "p0", "e0", 2.0, False, PoolAudit(4, 1, 3, 0, 3), (lease,), 1, 1, {}
    )
    attempt = AttemptAudit("a/0", is_asked=True, is_granted=False, is_wanted=True)
    p0 = View(Role.PREFILL, "ipc://p0", "p0", "alive", "e0", "", account, after=(attempt,))
    d0 = View(Role.DECODE, "ipc://d0", "d0", "dead", "e1", "it is dead", None)
    audit = FleetAudit(2.0, ServerAudit("server", "e9", 2, 2, {}, {}, 2, 1, 1), (p0, d0))
    status = {"workers": [{"name": "p0", "breaker": "open", "sequences": {"waiting": 1}}]}
    text = "\n".join(state_lines_of(status, audit))
    assert "server@e9: 2 in flight, 1 in the queue, 1 with an attempt" in text
    assert "p0@e0: alive, breaker open" in text
    assert "sequences {'waiting': 1}" in text
    assert "attempt a/0: asked, wanted" in text
    assert "lease a/0: running, 3 blocks, 2.0 s old, named 0.2 s ago" in text
    assert "no audit: it is dead" in text


def test_the_state_is_in_the_report_of_a_failed_cell() -> None:
    result = CellResult(next(cells()), ["waited 60 s for something"], state="process p0: T")
    report = json_of(lines_of([result]), [], 0.0)
    assert [cell["states"] for cell in report["cells"]] == [["process p0: T"]]


async def test_a_phase_is_reached_when_every_question_is_there_not_one_twice(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    async with idle_fleet(tmp_path) as fleet:
        for frame in (prefill(1), prefill(1)):
            fleet.proxy.sightings.add(sighting(frame))
        with pytest.RaisesGroup(OverdueError, flatten_subgroups=True):
            await _reach(fleet, clients(2), "PREFILL", lambda s: isinstance(s.frame, Prefill))
        fleet.proxy.sightings.add(sighting(prefill(2)))
        await _reach(fleet, clients(2), "PREFILL", lambda s: isinstance(s.frame, Prefill))


async def test_a_question_that_the_product_took_away_is_not_waited_for(tmp_path: Path) -> None:
    async with idle_fleet(tmp_path) as fleet:
        given_up = End(request_id(1), 0, EndReason.SUPERSEDED)
        for frame in (prefill(1), given_up):
            fleet.proxy.sightings.add(sighting(frame))
        with pytest.RaisesGroup(FaultNotInjectedError, flatten_subgroups=True):
            await _reach(fleet, clients(2), "PREFILL", lambda s: isinstance(s.frame, Prefill))


def test_no_heartbeat_names_a_prompt_that_is_kept_back_or_prefill_would_not_know_it() -> None:
    hold, silence = hold_prefills()
    rows = tuple(AttemptRow(request_id(number), 0) for number in (1, 2))
    beat = ServerHeartbeat(7, rows)
    assert not silence.takes(LINK, Way.TO_WORKER, beat)
    assert hold.takes(LINK, Way.TO_WORKER, prefill(1))
    assert silence.takes(LINK, Way.TO_WORKER, beat)
    assert silence.rewrite is not None
    assert silence.rewrite(beat) == ServerHeartbeat(7, rows[1:])
    to_decode = Link("server", "d0", "control")
    assert not silence.takes(to_decode, Way.TO_WORKER, beat)


async def test_no_prompt_goes_to_prefill_before_the_last_question_is_there(tmp_path: Path) -> None:
    done: list[str] = []

    class Sink:
        async def send_all(self, raw: bytes) -> None:
            done.append("sent")

    class Asker:
        def __init__(self, fleet: Fleet, number: int) -> None:
            self.name = f"asker {number}"
            self._fleet = fleet
            self._number = number

        async def ask(self) -> None:
            done.append("asked")
            lane = Lane(Way.TO_WORKER, cast("trio.SocketStream", Sink()))
            await self._fleet.proxy._pass_frame(LINK, lane, prefill(self._number), None, b"")

        async def read(self) -> None:
            pass

    async with idle_fleet(tmp_path) as fleet, trio.open_nursery() as readers:
        askers = cast("list[Client]", [Asker(fleet, number) for number in (1, 2)])
        await _ask_together(fleet, askers, readers)
    assert done == ["asked", "asked", "sent", "sent"]


async def test_what_waited_in_the_queue_is_offered_to_the_two_workers_of_the_cell_first(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock

    class Sink:
        async def send_all(self, raw: bytes) -> None:
            pass

    beat = WorkerHeartbeat(1, 0, False, False, Load(), token_credit=7, row_credit=7)
    lane = Lane(Way.FROM_WORKER, cast("trio.SocketStream", Sink()))
    asker = cast("Client", SimpleNamespace(is_over=trio.Event()))
    async with idle_fleet(tmp_path) as fleet:
        proxy = fleet.proxy
        with proxy.rule(full(WORKERS)) as rule:
            for worker in WORKERS:
                link = Link("server", worker, "control")
                await proxy._pass_frame(link, lane, beat, None, b"")
            await _let_in(fleet, [asker], rule)
    credits = [(s.link.worker, frame.row_credit) for s, frame in proxy.seen(WorkerHeartbeat)]
    all_full = [(worker, 0) for worker in WORKERS]
    the_two = [(worker, 7 if worker in ("p0", "d0") else 0) for worker in WORKERS]
    assert credits == all_full + the_two + [(worker, 7) for worker in WORKERS]


def test_a_slow_prefill_worker_is_given_the_second_prompt_while_the_first_one_is_held() -> None:
    worker = Worker(Role.PREFILL, "ipc://p0", LinkConfig(), RecoveryConfig(), 0.0)
    peer = Peer(Role.PREFILL, "p0", 1)
    capacity = Capacity(681, 16, 1, 4, 1024, max_waiting_tokens=32768)
    worker.welcomed(Welcome(peer, PROTOCOL_VERSION, "model", capacity), 0.0)
    load = Load(prompt_tokens_per_s=200.0)
    worker.heartbeat(WorkerHeartbeat(1, 0, False, False, load, token_credit=32768), 0.0)
    worker.reserve(prefill(1).key, num_tokens=LONG_PROMPT_TOKENS)
    options = dict(option.split("=") for option in SERVER_OPTIONS if "=" in option)
    usual = RoutingConfig()
    backlog_s = float(options.get("server.routing.backlog_s", usual.backlog_s))
    need = Need(
        LONG_PROMPT_TOKENS,
        LONG_PROMPT_TOKENS,
        backlog_s=backlog_s,
        overtaken_s=usual.overtaken_s,
    )
    assert is_within_pace(worker, LONG_PROMPT_TOKENS, need)


def test_a_gate_says_when_it_has_an_order(capfd: pytest.CaptureFixture[str]) -> None:
    StepGate().obey("hold 1")
    assert capfd.readouterr().err == '{"event": "order_taken", "order": "hold 1"}\n'
