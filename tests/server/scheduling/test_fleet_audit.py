"""Tests of audits over an in-memory network: deadlines, silent workers, concurrent audits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from triolet.errors import RequestError
from triolet.invariants import check_invariants

from .fakes import make_request, server_config
from .test_fleet import read_all, read_some, running

if TYPE_CHECKING:
    from trio.testing import MockClock

AUDIT_TIMEOUT_S = server_config().audit_timeout_s


async def test_every_worker_answers_while_streams_run(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        generation = cluster.fleet.submit(make_request(max_tokens=150))
        await read_some(generation, 20)
        began_at = trio.current_time()
        audit = await cluster.fleet.audit(connections=3)
        assert trio.current_time() - began_at < AUDIT_TIMEOUT_S
        assert check_invariants(audit) == []
        assert (audit.server.running, audit.server.connections) == (1, 3)
        assert audit.server.process.tasks is not None
        assert [worker.num_leases for worker in audit.answered] == [0, 1]
        token_ids, _ = await read_all(generation)
        assert len(token_ids) <= 130


async def test_a_frozen_worker_is_listed_as_silent_in_time(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        cluster.decode_process.freeze()
        began_at = trio.current_time()
        audit = await cluster.fleet.audit()
        assert trio.current_time() - began_at == pytest.approx(AUDIT_TIMEOUT_S)
        prefill, decode = audit.workers
        assert (prefill.silence, decode.silence) == ("", "no answer within 1 s")
        assert decode.audit is None
        cluster.decode_process.thaw()


async def test_a_worker_that_dies_meanwhile_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        cluster.decode_process.freeze()
        await trio.sleep(1.4)
        began_at = trio.current_time()
        audit = await cluster.fleet.audit()
        assert trio.current_time() - began_at < AUDIT_TIMEOUT_S
        assert audit.workers[1].silence == "it is dead"
        cluster.decode_process.thaw()


async def test_an_audit_that_is_cancelled_leaves_its_place(autojump_clock: MockClock) -> None:
    async with running(max_audits=1) as cluster:
        cluster.decode_process.freeze()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.fleet.audit)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RequestError, match="too many audits"):
                await cluster.fleet.audit()
            nursery.cancel_scope.cancel()
        cluster.decode_process.thaw()
        audit = await cluster.fleet.audit()
        assert len(audit.answered) == 2
