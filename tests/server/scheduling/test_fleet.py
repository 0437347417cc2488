"""Tests of the whole fleet over an in-memory network in virtual time: links, heartbeats, deaths and
restarts."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from server.contract.generation import CancelReason, Delta, Failed, Finished
from server.scheduling.links import Links
from tests.server.tiny_text import tiny_text
from transport.control_protocol import ModelNews, ModelState
from transport.digest import KV_KEY_BYTES
from transport.frames import EndReason, Prefill, RefuseReason, Reserve
from transport.memory_network import MemoryConnection, MemoryNetwork
from triolet.config import LinkConfig
from triolet.errors import RequestError
from triolet.invariants import check_at_rest, check_invariants

from .fake_processes import FakeProcess
from .fakes import FakeDecode, FakePrefill, completion_ids, make_request, server_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from server.contract.output_stream import OutputStream


REST_S = 5.0
"""Longer than a lease lasts after its server has forgotten it."""


class Cluster:
    """A fleet, its workers, and a nursery to start more."""

    def __init__(
        self, nursery: trio.Nursery, network: MemoryNetwork | None = None, **config: object
    ) -> None:
        self.nursery = nursery
        self.network = network or MemoryNetwork()
        self.decode = FakeDecode()
        self.prefill = FakePrefill()
        self.decodes = [self.decode]
        self.decode_process = FakeProcess(self.network, self.decode)
        self.prefill_process = FakeProcess(self.network, self.prefill, self.decodes)
        self.fleet = Links(server_config(**config), tiny_text(), self.network)

    async def restart_decode(self, *, kill: bool = True) -> None:
        """Restart the decode worker."""
        if kill:
            self.decode_process.kill()
            await trio.testing.wait_all_tasks_blocked()
        self.decode = FakeDecode(epoch=self.decode.epoch + 1)
        self.decodes[:] = [self.decode]
        self.decode_process = FakeProcess(self.network, self.decode)
        await self.nursery.start(self.decode_process.run)

    async def check_at_rest(self) -> None:
        """Assert that nothing is wrong now, and that nothing is left once leases have expired."""
        assert check_invariants(await self.fleet.audit()) == []
        await trio.sleep(REST_S)
        audit = await self.fleet.audit()
        killed = {view.name for view in audit.workers if view.state == "dead"}
        assert [found for found in check_at_rest(audit) if found.where not in killed] == []

    def check_idle(self) -> None:
        self.fleet.check_accounting()
        status = self.fleet.status()
        assert (status.queued, status.running) == (0, 0)
        assert all(worker.attempts == 0 for worker in status.workers)
        assert self.decode.rows == {}
        assert self.prefill.waiting == {}


@asynccontextmanager
async def running(**config: object) -> AsyncIterator[Cluster]:
    """Run one server, one prefill and one decode worker."""
    async with trio.open_nursery() as nursery:
        cluster = Cluster(nursery, **config)
        await nursery.start(cluster.decode_process.run)
        await nursery.start(cluster.prefill_process.run)
        await nursery.start(cluster.fleet.run)
        await cluster.fleet.wait_ready()
        yield cluster
        await cluster.check_at_rest()
        nursery.cancel_scope.cancel()


async def read_all(stream: OutputStream) -> tuple[list[int], Finished | Failed]:
    """Read a stream to its end."""
    token_ids: list[int] = []
    ends: list[Finished | Failed] = []
    async for events in stream:
        for _, event in events:
            if isinstance(event, Delta):
                token_ids += event.token_ids
            else:
                ends.append(event)
    [end] = ends
    return token_ids, end


async def read_some(stream: OutputStream, num_tokens: int) -> list[int]:
    """Read at least `num_tokens` tokens."""
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        for _, event in await anext(stream):
            assert isinstance(event, Delta)
            token_ids += event.token_ids
    return token_ids


def names(cluster: Cluster) -> dict[str, str]:
    """Return the state of each worker by name."""
    return {worker.name: worker.state for worker in cluster.fleet.status().workers}


@asynccontextmanager
async def unbroken(
    cluster: Cluster, max_tokens: int = 150, num_read: int = 20
) -> AsyncIterator[None]:
    """Read part of a stream, cause an event, and check that the stream is complete."""
    stream = cluster.fleet.submit(make_request(max_tokens=max_tokens))
    before = await read_some(stream, num_read)
    yield
    after, end = await read_all(stream)
    assert before + after == completion_ids(0, max_tokens)
    assert isinstance(end, Finished)


async def test_twenty_streams_at_once_are_all_exact(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        results: dict[int, list[int]] = {}

        async def client(number: int) -> None:
            generation = cluster.fleet.submit(make_request(number, max_tokens=150, seed=number))
            results[number], _ = await read_all(generation)

        async with trio.open_nursery() as clients:
            for number in range(1, 21):
                clients.start_soon(client, number)
            await trio.testing.wait_all_tasks_blocked()
            of_tenants = [cluster.fleet.in_flight(tenant) for tenant in (None, "", "alice")]
            assert of_tenants == [20, 20, 0]
        assert results == {n: completion_ids(n, 150) for n in range(1, 21)}
        cluster.check_idle()


async def test_a_killed_decode_worker_that_restarts_continues_every_stream(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        async with unbroken(cluster):
            began = trio.current_time()
            await cluster.restart_decode()
        assert trio.current_time() - began < 3.5
        cluster.check_idle()


@pytest.mark.parametrize("away_s", [0.0, 0.11, 0.37, 0.62, 4.0])
async def test_a_worker_that_is_back_is_greeted_without_waiting_for_a_heartbeat(
    autojump_clock: MockClock, away_s: float
) -> None:
    link = LinkConfig()
    async with running() as cluster:
        await trio.sleep(0.3)  # between two heartbeats
        killed_at = trio.current_time()
        cluster.decode_process.kill()
        await trio.testing.wait_all_tasks_blocked()
        assert not cluster.fleet.status().is_ready
        await trio.sleep(away_s)
        await cluster.restart_decode(kill=False)
        await cluster.fleet.wait_ready()
        took_s = trio.current_time() - killed_at - away_s
        assert took_s <= link.local_reconnect_s


async def test_a_frozen_worker_is_given_up_and_its_late_words_do_not_count(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        async with unbroken(cluster):
            cluster.decode_process.freeze()
            await trio.sleep(2.0)
            assert names(cluster) == {"prefill-0": "alive", "decode-0": "dead"}
            assert not cluster.fleet.status().is_ready
            cluster.decode_process.thaw()
        await trio.sleep(1.0)
        cluster.check_idle()


async def test_a_partition_heals_into_a_new_attempt(autojump_clock: MockClock) -> None:
    async with running() as cluster, unbroken(cluster):
        [server] = cluster.decode_process.servers
        cluster.network.cut("mem://decode-0", server)
        await trio.sleep(3.0)
        cluster.network.heal("mem://decode-0", server)


async def test_each_attempt_has_a_kv_key_of_its_own(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        for number in (1, 2):
            await read_all(cluster.fleet.submit(make_request(number, max_tokens=5)))
        reserved = [f.kv_key for f in cluster.decode.received if isinstance(f, Reserve)]
        asked = [f.kv_key for f in cluster.prefill.received if isinstance(f, Prefill)]
        assert reserved[-2:] == asked[-2:]
        assert {len(key) for key in reserved} == {KV_KEY_BYTES}
        assert reserved[-1] != reserved[-2]


async def test_a_hello_without_an_answer_is_said_again_over_a_new_connection(
    autojump_clock: MockClock,
) -> None:
    """The worker is alive; the connection leads nowhere and does not break."""
    dialled: list[float] = []

    class OneDeadEnd(MemoryNetwork):
        def connect(
            self, address: str, identity: bytes, *, hwm: int, max_frame_bytes: int
        ) -> MemoryConnection:
            if address != "mem://decode-0":
                return super().connect(address, identity, hwm=hwm, max_frame_bytes=max_frame_bytes)
            dialled.append(trio.current_time())
            name = identity if len(dialled) > DEAD_ENDS else b"dead end %d" % len(dialled)
            if len(dialled) <= DEAD_ENDS:
                self.cut(address, name)
            return super().connect(address, name, hwm=hwm, max_frame_bytes=max_frame_bytes)

    async with trio.open_nursery() as nursery:
        cluster = Cluster(nursery, network=OneDeadEnd())
        await nursery.start(cluster.decode_process.run)
        await nursery.start(cluster.prefill_process.run)
        await nursery.start(cluster.fleet.run)
        with trio.fail_after(60.0):
            await cluster.fleet.wait_ready()
        waits = [later - earlier for earlier, later in pairwise(dialled)]
        link = LinkConfig()
        patience = [link.redial_s, 2 * link.redial_s, link.max_redial_s, link.max_redial_s]
        assert waits == pytest.approx(patience, abs=2 * link.heartbeat_interval_s)
        generation = cluster.fleet.submit(make_request(max_tokens=20))
        assert (await read_all(generation))[0] == completion_ids(0, 20)
        nursery.cancel_scope.cancel()


DEAD_ENDS = 4


async def test_no_worker_for_too_long_fails_the_request(autojump_clock: MockClock) -> None:
    async with running(worker_wait_s=5.0) as cluster:
        generation = cluster.fleet.submit(make_request(max_tokens=150))
        await read_some(generation, 20)
        cluster.decode_process.kill()
        _, end = await read_all(generation)
        assert isinstance(end, Failed)
        assert end.error.code == "no_worker"
        with pytest.raises(RequestError) as refusal:
            cluster.fleet.submit(make_request(2))
        assert refusal.value.status == 503
        cluster.fleet.check_accounting()


async def test_workers_that_ended_on_purpose_are_not_missed(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        told = partial(ModelNews, "tiny", "", predicted_ready_s=1.0, bytes=0)
        presence = cluster.fleet.admission.presence
        presence.note(told(state=ModelState.SLEEPING), trio.current_time())
        assert len(cluster.fleet.status().workers) == 2, "they are still there"
        cluster.decode_process.kill()
        cluster.prefill_process.kill()
        await trio.sleep(REST_S)
        assert cluster.fleet.status().workers == ()
        presence.note(told(state=ModelState.LOADING), trio.current_time())
        states = [worker.state for worker in cluster.fleet.status().workers]
        assert states == ["dead", "dead"], "they are on their way"


async def test_a_client_that_stops_reading_is_ended_and_its_blocks_are_freed(
    autojump_clock: MockClock,
) -> None:
    async with running(token_window=8) as cluster:
        stalled = cluster.fleet.submit(make_request(1, max_tokens=1000))
        steady = cluster.fleet.submit(make_request(2, max_tokens=1000))
        await read_some(stalled, 8)
        token_ids, end = await read_all(steady)
        assert token_ids == completion_ids(0, 1000)
        assert isinstance(end, Finished)
        await trio.sleep(0.5)
        assert cluster.decode.rows == {}
        token_ids, end = await read_all(stalled)
        assert len(token_ids) <= 8
        assert isinstance(end, Failed)
        assert end.error.code == "request_timeout"
        cluster.check_idle()


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
async def test_cancel_frees_the_workers_within_a_tenth_of_a_second(
    autojump_clock: MockClock, num_tokens: int
) -> None:
    async with running() as cluster:
        generation = cluster.fleet.submit(make_request(max_tokens=1000))
        await read_some(generation, num_tokens)
        generation.cancel(CancelReason.CLIENT_GONE)
        generation.cancel(CancelReason.STOPPED)
        await trio.sleep(0.1)
        cluster.check_idle()
        _, end = await read_all(generation)
        assert isinstance(end, Failed)
        assert end.error.code == "cancelled"


async def test_a_reader_that_waits_gets_the_end_of_a_cancelled_stream(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        cluster.decode_process.is_held = cluster.prefill_process.is_held = True
        generation = cluster.fleet.submit(make_request())
        ends: list[Finished | Failed] = []

        async def read() -> None:
            ends.append((await read_all(generation))[1])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            generation.cancel(CancelReason.STOPPED)
        assert isinstance(ends[0], Failed)


async def test_cancelling_a_reader_loses_no_event(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        generation = cluster.fleet.submit(make_request(max_tokens=150))
        token_ids: list[int] = []
        while not generation.is_over:
            with trio.move_on_after(0.007):
                for _, event in await anext(generation):
                    if isinstance(event, Delta):
                        token_ids += event.token_ids
        assert token_ids == completion_ids(0, 150)


async def test_nothing_comes_behind_the_end_and_reading_from_two_tasks_is_an_error(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        generation = cluster.fleet.submit(make_request(1))
        await read_all(generation)
        assert [events async for events in generation] == []
        waiting = cluster.fleet.submit(make_request(2))
        cluster.decode_process.is_held = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, waiting)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await anext(waiting)
            cluster.decode_process.is_held = False


async def test_leases_are_renewed_for_as_long_as_a_stream_is_paused(
    autojump_clock: MockClock,
) -> None:
    async with running(token_window=4, stall_timeout_s=60.0) as cluster:
        generation = cluster.fleet.submit(make_request(max_tokens=100))
        await trio.sleep(30.0)
        assert len(cluster.decode.rows) == 1
        token_ids, _ = await read_all(generation)
        assert token_ids == completion_ids(0, 100)


async def test_a_refused_request_is_tried_again_when_there_is_room(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        cluster.decode.refusal = RefuseReason.NO_BLOCKS
        generation = cluster.fleet.submit(make_request())
        await trio.sleep(5.0)
        assert cluster.fleet.status().queued in (0, 1)
        cluster.decode.refusal = None
        token_ids, _ = await read_all(generation)
        assert token_ids == completion_ids(0, 16)


async def test_rows_beyond_the_credit_wait_in_the_server(autojump_clock: MockClock) -> None:
    async with running(token_window=4, stall_timeout_s=60.0) as cluster:
        cluster.decode.row_credit = 2
        await trio.sleep(1.0)
        generations = [
            cluster.fleet.submit(make_request(number, max_tokens=20)) for number in range(1, 6)
        ]
        await trio.sleep(1.0)
        status = cluster.fleet.status()
        assert (status.queued, status.running) == (3, 2)
        assert len(cluster.decode.rows) == 2
        for generation in generations:
            token_ids, _ = await read_all(generation)
            assert token_ids == completion_ids(0, 20)
        cluster.check_idle()


async def test_draining_lets_running_streams_finish(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        generation = cluster.fleet.submit(make_request(max_tokens=150))
        await read_some(generation, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.fleet.drain)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RequestError) as refusal:
                cluster.fleet.submit(make_request(2))
            assert refusal.value.code == "draining"
            assert not cluster.fleet.status().is_ready
            _, end = await read_all(generation)
        assert isinstance(end, Finished)
        cluster.check_idle()


async def test_draining_ends_at_its_timeout_whatever_clients_do(autojump_clock: MockClock) -> None:
    async with running(token_window=4, drain_timeout_s=3.0) as cluster:
        generation = cluster.fleet.submit(make_request(max_tokens=150))
        began = trio.current_time()
        await cluster.fleet.drain()
        assert 2.9 < trio.current_time() - began < 3.2
        _, end = await read_all(generation)
        assert isinstance(end, Failed)
        assert end.error.code == "draining"
        await trio.sleep(0.1)
        cluster.check_idle()


async def test_workers_are_told_to_free_what_a_stop_string_ended(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        generation = cluster.fleet.submit(make_request(max_tokens=500, stop=("Brücke",)))
        _, end = await read_all(generation)
        assert isinstance(end, Finished)
        assert end.stop_string == "Brücke"
        await trio.sleep(0.05)
        cluster.check_idle()


async def test_a_server_that_ends_leaves_no_lease_behind(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        cluster = Cluster(nursery)
        await nursery.start(cluster.decode_process.run)
        await nursery.start(cluster.prefill_process.run)
        scope = trio.CancelScope()

        async def serve() -> None:
            with scope:
                await cluster.fleet.run()

        nursery.start_soon(serve)
        await cluster.fleet.wait_ready()
        cluster.fleet.submit(make_request(max_tokens=1000))
        await trio.sleep(0.2)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        # The link is gone; the worker's leases expire by themselves.
        assert len(cluster.decode.rows) == 1
        [key] = cluster.decode.rows
        assert cluster.decode.end(key, EndReason.LEASE_EXPIRED).freed_blocks > 0
        nursery.cancel_scope.cancel()


async def test_a_worker_of_the_wrong_role_is_not_used(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        cluster = Cluster(nursery)
        impostor = FakePrefill(name="decode-0")
        await nursery.start(FakeProcess(cluster.network, impostor, []).run)
        await nursery.start(cluster.prefill_process.run)
        await nursery.start(cluster.fleet.run)
        await trio.sleep(2.0)
        states = [(w.role.value, w.state) for w in cluster.fleet.status().workers]
        assert states == [("prefill", "alive"), ("decode", "connecting")]
        assert not cluster.fleet.status().is_ready
        nursery.cancel_scope.cancel()
