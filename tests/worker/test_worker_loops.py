"""Tests of whole workers in virtual time: streams, cancels, silent servers, drains and hung
devices."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import decode.worker
from loadtest.harness.metrics import blocks_of
from server.contract.generation import CancelReason
from server.metrics.metrics import Metrics
from server.scheduling.links import Links as Server
from tests.server.scheduling.fakes import make_request, server_config
from tests.server.tiny_text import tiny_text
from transport.frames import Drain, End, EndReason
from transport.handshake import goodbye
from transport.memory_network import MemoryConnection, MemoryNetwork
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.sampling import SamplingParams
from worker.server_sessions import SHUT_DOWN
from worker.worker_loop import EXIT_DEVICE_LOST, EXIT_WEDGED

from .fleet import (
    LINK,
    SERVE,
    STEP_S,
    CountingNetwork,
    FakeDevice,
    Fleet,
    open_fleet,
    worker_config,
)
from .scripts import completion, scripted_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

PROMPT = tuple(range(1, 40))


def params(num_tokens: int = 8, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, seed=seed)


class Left(Exception):
    """Raised instead of exiting the process."""


@asynccontextmanager
async def fleet_that_ends(role: Role, codes: list[int]) -> AsyncIterator[Fleet]:
    """Run a fleet until one worker's process ends; record its exit code."""

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    with pytest.RaisesGroup(Left, flatten_subgroups=True):
        async with open_fleet() as fleet:
            fleet.loops[role].exit_process = leave
            yield fleet


async def test_many_streams_get_the_tokens_of_their_prompts(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        for seed in range(8):
            answers = [await fleet.client.start(PROMPT[:n], params(seed=seed)) for n in (1, 8, 30)]
            for answer, length in zip(answers, (1, 8, 30), strict=True):
                await fleet.client.finish(answer)
                assert answer.token_ids == completion(PROMPT[:length], seed, 8)
                assert answer.first is not None
        fleet.check_empty()


async def test_cores_are_left_to_others_while_there_is_no_step_to_compute(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet() as fleet:
        await wait_all_tasks_blocked()
        prefill, decode = (fleet.engines[role] for role in (Role.PREFILL, Role.DECODE))
        assert prefill.num_rests
        assert decode.num_rests
        prefill.speedup = decode.speedup = 2.0
        answer = await fleet.client.start(PROMPT, params(100))
        await fleet.client.wait_until(lambda: len(answer.tokens) >= 3)
        before = prefill.num_rests, decode.num_rests
        await fleet.client.wait_until(lambda: len(answer.tokens) >= 50)
        assert decode.num_rests == before[1], "a stream has a row in every step"
        await fleet.client.finish(answer)
        await trio.sleep(1.2)
        assert decode.num_rests > before[1]
        loads = [link.beats[-1].load for link in fleet.client.links.values()]
        assert all(load.borrowed_steps == load.steps > 0 for load in loads)


async def test_busy_seconds_are_those_of_steps_and_count_no_idle_time(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet() as fleet:
        answers = [await fleet.client.start(PROMPT[:8], params(20, seed)) for seed in (1, 2)]
        for answer in answers:
            await fleet.client.finish(answer)
        await trio.sleep(100)
        prefill, decode = (link.beats[-1].load for link in fleet.client.links.values())
    for load in (prefill, decode):
        assert load.busy_s == pytest.approx(load.steps * STEP_S)
        assert load.busy_s <= load.busy_row_s
    assert decode.busy_row_s == pytest.approx(decode.computed_tokens * STEP_S)


async def test_a_cancel_frees_both_workers_within_a_step(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, params(100))
        await fleet.client.wait_until(lambda: len(answer.tokens) >= 3)
        ended_at = trio.current_time()
        for role in fleet.client.links:
            fleet.client.send(role, End(*answer.key, EndReason.CANCEL))
        await fleet.client.finish(answer)
        assert trio.current_time() - ended_at <= 0.1
        fleet.check_empty()


async def test_a_server_s_metric_shows_the_blocks_of_a_cancelled_request_free_within_100_ms(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet() as fleet:
        config = server_config(
            prefill_addresses=(fleet.configs[Role.PREFILL].control_address,),
            decode_addresses=(fleet.configs[Role.DECODE].control_address,),
        )
        server = Server(config, tiny_text(), fleet.network)
        metrics = Metrics("tiny", "none")
        metrics.watch(server.status, lambda: 0)

        def leased() -> int:
            return blocks_of(metrics.exposition().decode()).leased

        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            await server.wait_ready()
            for moment in range(20):
                stream = server.submit(make_request(moment, prompt="x" * 40, max_tokens=200))
                # The cancels fall on moments all over the time between two heartbeats.
                await trio.sleep(0.55 + 0.027 * moment)
                assert leased(), "heartbeats have shown the stream"
                stream.cancel(CancelReason.CLIENT_GONE)
                await trio.sleep(0.1)
                assert not leased()
            nursery.cancel_scope.cancel()


async def test_ends_at_once_share_a_load_report_and_reports_keep_their_distance(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet() as fleet:
        link = fleet.client.links[Role.DECODE]
        answers = [await fleet.client.start(PROMPT[:4], params(500)) for _ in range(4)]
        await fleet.client.wait_until(lambda: all(answer.tokens for answer in answers))
        await fleet.client.wait_until(lambda: link.beats[-1].load.running == 4)
        await trio.sleep(2 * LINK.load_report_interval_s)
        before = len(link.beats)
        for answer in answers:
            fleet.client.send(Role.DECODE, End(*answer.key, EndReason.CANCEL))
        await trio.sleep(2 * LINK.load_report_interval_s)
        reports = [beat.load.leased_blocks for beat in link.beats[before:]]
        assert len(reports) <= 2, "at once, and after the step that some were in"
        assert reports[-1:] == [0]
        before, began_at = len(link.beats), trio.current_time()
        while trio.current_time() < began_at + 1.0:
            await fleet.client.finish(await fleet.client.start(PROMPT[:4], params(1)))
        most = (trio.current_time() - began_at) / LINK.load_report_interval_s + 1
        assert len(link.beats) - before <= most
        await trio.sleep(2 * LINK.load_report_interval_s)
        assert link.beats[-1].load.leased_blocks == 0


async def test_heartbeats_tell_load_and_progress(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, params(3), allowed=2)
        await trio.sleep(1.2)
        beats = {role: link.beats[-1] for role, link in fleet.client.links.items()}
        assert beats[Role.DECODE].load.paused == 1
        assert beats[Role.DECODE].load.leased_blocks == 10
        assert beats[Role.DECODE].load.kv_bytes == 10 * fleet.engines[Role.DECODE].bytes_per_block
        assert beats[Role.PREFILL].load.computed_tokens == len(PROMPT)
        prefill = beats[Role.PREFILL].load
        assert prefill.free_blocks + prefill.cached_blocks == 64
        fleet.client.allow(answer, 10)
        await fleet.client.finish(answer)
        fleet.check_empty()


async def test_a_server_that_falls_silent_loses_its_leases(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, params(500), allowed=3)
        await fleet.client.wait_until(lambda: len(answer.tokens) == 3)
        fleet.client.live.clear()
        await trio.sleep(LINK.lease_ttl_s + LINK.sweep_interval_s + 0.6)
        fleet.check_empty()
        assert answer.ended[Role.DECODE][0].reason is EndReason.LEASE_EXPIRED


async def test_a_server_whose_link_breaks_frees_its_blocks_at_the_next_token(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, params(200))
        await fleet.client.wait_until(lambda: len(answer.tokens) == 3)
        fleet.client.vanish()
        await trio.sleep(5 * STEP_S)
        fleet.check_empty()


async def test_a_worker_that_stood_still_sends_no_token_of_its_old_life(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, params(200))
        await fleet.client.wait_until(lambda: len(answer.tokens) == 3)
        autojump_clock.jump(LINK.lease_ttl_s + 0.5)
        await fleet.client.wait_until(lambda: fleet.client.links[Role.DECODE].goodbyes)
        assert "HELLO" in fleet.client.links[Role.DECODE].goodbyes[0]
        assert len(answer.tokens) == 3
        fleet.check_empty()
        await _greet_again(fleet)
        again = await fleet.client.start(PROMPT, params(5))
        await fleet.client.finish(again)
        assert again.token_ids == completion(PROMPT, 5, 5)


async def test_a_worker_that_stood_still_beats_no_more_for_its_old_life(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet() as fleet:
        links = fleet.client.links.values()
        for _ in range(6):  # which task comes first after the gap is chance
            await trio.sleep(1.0)
            await wait_all_tasks_blocked()
            old = {link.beats[-1].epoch for link in links}
            known = [len(link.beats) for link in links]
            autojump_clock.jump(LINK.lease_ttl_s + 0.5)
            await fleet.client.wait_until(lambda: all(link.goodbyes for link in links))
            for link, count in zip(links, known, strict=True):
                assert not old & {beat.epoch for beat in link.beats[count:]}
                link.goodbyes.clear()
            await _greet_again(fleet)


async def test_a_failed_step_ends_its_batch_and_the_worker_lives_on(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, params(50))
        await fleet.client.wait_until(lambda: len(answer.tokens) == 3)
        fleet.engines[Role.DECODE].fail_steps = 1
        await fleet.client.finish(answer)
        assert answer.ended[Role.DECODE][0].reason is EndReason.ERROR
        assert "step_failed" in answer.ended[Role.DECODE][0].message
        again = await fleet.client.start(PROMPT, params(5))
        await fleet.client.finish(again)
        assert again.token_ids == completion(PROMPT, 5, 5)
        fleet.check_empty()


async def test_workers_with_other_models_exchange_no_kv(autojump_clock: MockClock) -> None:
    async with open_fleet(fingerprints=("one", "another")) as fleet:
        answer = await fleet.client.start(PROMPT, params())
        await fleet.client.wait_until(lambda: answer.ended[Role.PREFILL])
        assert answer.ended[Role.PREFILL][0].reason is EndReason.PEER_LOST
        assert "same model directory" in answer.ended[Role.PREFILL][0].message
        assert fleet.client.links[Role.DECODE].beats[-1].load.kv_bytes == 0
        fleet.client.send(Role.DECODE, End(*answer.key, EndReason.PEER_LOST))
        await fleet.client.finish(answer)
        fleet.check_empty()


async def test_a_decode_worker_that_is_not_there_is_given_up(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        welcome = fleet.client.links[Role.DECODE].welcome
        assert welcome is not None
        began_at = trio.current_time()
        fleet.client.links[Role.DECODE].welcome = type(welcome)(
            welcome.peer, 1, welcome.fingerprint, welcome.capacity, "memory:nowhere"
        )
        answer = await fleet.client.start(PROMPT, params())
        await fleet.client.wait_until(lambda: answer.ended[Role.PREFILL])
        assert answer.ended[Role.PREFILL][0].reason is EndReason.PEER_LOST
        assert trio.current_time() - began_at < LINK.kv_stall_s + 0.2


async def test_idle_kv_links_are_hung_up_and_dialled_again(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        for pause_s in (LINK.kv_idle_s / 2, LINK.kv_idle_s * 1.1, 0.0):
            answer = await fleet.client.start(PROMPT, params())
            await fleet.client.finish(answer)
            assert answer.token_ids == completion(PROMPT, 5, 8)
            await trio.sleep(pause_s)
        assert fleet.network.dials["memory:kv"] == 2
        fleet.check_empty()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_drained_worker_finishes_its_streams_and_leaves(
    role: Role, autojump_clock: MockClock
) -> None:
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, params(30))
        fleet.client.send(role, Drain(20.0))
        await fleet.client.finish(answer)
        assert answer.token_ids == completion(PROMPT, 5, 30)
        await fleet.client.wait_until(lambda: fleet.client.links[role].goodbyes)
        assert "shut down" in fleet.client.links[role].goodbyes[0]
        fleet.check_empty()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_worker_that_leaves_waits_until_it_was_heard(
    role: Role, autojump_clock: MockClock
) -> None:
    async with open_fleet() as fleet:
        link = fleet.client.links[role]
        fleet.loops[role].drain(20.0)
        await fleet.client.wait_until(lambda: link.goodbyes)
        await trio.sleep(LINK.farewell_s / 2)
        fleet.client.greet(role)
        await fleet.client.wait_until(lambda: len(link.goodbyes) >= 2)
        # Whatever is said to it now, it says the same.
        assert set(link.goodbyes) == {SHUT_DOWN}
        fleet.client.send(role, goodbye("heard"))
        await trio.sleep(2 * LINK.sweep_interval_s)
        # Its address is free, although the time that it would have waited has not passed.
        address = fleet.configs[role].control_address
        fleet.network.listen(address, hwm=1, max_frame_bytes=1000).close()


async def test_a_drain_is_told_to_servers_at_once(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, params(30), allowed=2)
        await fleet.client.wait_until(lambda: len(answer.tokens) == 2)
        await trio.sleep(0.1)
        fleet.loops[Role.DECODE].drain(1.0)
        await trio.testing.wait_all_tasks_blocked()
        assert fleet.client.links[Role.DECODE].beats[-1].is_draining
        await fleet.client.finish(answer)


async def test_a_drain_ends_what_does_not_finish_in_time(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        answer = await fleet.client.start(PROMPT, params(30), allowed=2)
        await fleet.client.wait_until(lambda: len(answer.tokens) == 2)
        began_at = trio.current_time()
        fleet.loops[Role.DECODE].drain(3.0)
        await fleet.client.wait_until(lambda: answer.ended[Role.DECODE])
        assert answer.ended[Role.DECODE][0].reason is EndReason.DRAIN
        assert 3.0 <= trio.current_time() - began_at < 3.2


async def test_a_device_that_never_returns_ends_the_process(autojump_clock: MockClock) -> None:
    codes: list[int] = []
    async with fleet_that_ends(Role.PREFILL, codes) as fleet:
        fleet.devices[Role.PREFILL].is_hanging = True
        await fleet.client.start(PROMPT, params())
        await trio.sleep(fleet.configs[Role.PREFILL].step_timeout_s - 0.1)
        assert codes == []
        await trio.sleep(0.2)
    assert codes == [EXIT_WEDGED]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_failed_step_that_loses_the_device_ends_the_process(
    role: Role, autojump_clock: MockClock
) -> None:
    codes: list[int] = []
    async with fleet_that_ends(role, codes) as fleet:
        fleet.engines[role].fail_steps = 1
        fleet.engines[role].is_device_lost = True
        await fleet.client.start(PROMPT, params())
        await trio.sleep(1.0)
    assert codes == [EXIT_DEVICE_LOST]


async def test_decode_without_a_kv_address_is_a_config_error(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    config = worker_config(Role.PREFILL)
    with pytest.raises(ConfigError, match="kv_address"):
        await decode.worker.serve(config, scripted_engine(), FakeDevice(), network, network)


async def test_a_decode_worker_announces_where_others_see_it(autojump_clock: MockClock) -> None:
    """The network between them forwards one address to the other."""

    class Translating(CountingNetwork):
        def connect(
            self, address: str, identity: bytes, *, hwm: int, max_frame_bytes: int
        ) -> MemoryConnection:
            inside = "memory:kv" if address == "memory:outside" else address
            self.dials[address] += inside != address
            return super().connect(inside, identity, hwm=hwm, max_frame_bytes=max_frame_bytes)

    network = Translating()
    async with open_fleet(network=network, advertised_kv_address="memory:outside") as fleet:
        answer = await fleet.client.finish(await fleet.client.start(PROMPT, params()))
        assert answer.token_ids == completion(PROMPT, 5, 8)
    assert network.dials["memory:outside"] == 1


async def test_a_restarted_decode_worker_is_another_one(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        first = await fleet.client.start(PROMPT, params())
        await fleet.client.finish(first)
        fleet.loops[Role.DECODE].drain(0.0)
        await fleet.client.wait_until(lambda: fleet.client.links[Role.DECODE].goodbyes)
        # This client says nothing to a farewell, so the worker stays for as long as it waits.
        await trio.sleep(fleet.configs[Role.DECODE].link.farewell_s + 0.1)
        serve = partial(SERVE[Role.DECODE], fleet.configs[Role.DECODE])
        old = fleet.client.links[Role.DECODE].welcome
        await fleet.nursery.start(
            serve, scripted_engine(), FakeDevice(), fleet.network, fleet.network
        )
        await _greet_again(fleet)
        new = fleet.client.links[Role.DECODE].welcome
        assert old is not None
        assert new is not None
        assert old.peer.epoch != new.peer.epoch
        second = await fleet.client.start(PROMPT, params())
        await fleet.client.finish(second)
        assert second.token_ids == completion(PROMPT, 5, 8)


async def _greet_again(fleet: Fleet) -> None:
    for role, link in fleet.client.links.items():
        link.welcome = None
        fleet.client.greet(role)
    await fleet.client.wait_until(lambda: all(x.welcome for x in fleet.client.links.values()))
