"""Tests of shared memory for KV: decode workers on the same host read KV in the prefill worker's
send ring, with the same tokens and guarantees as over sockets."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

import prefill.worker
from transport.frames import End, EndReason
from transport.memory_network import MemoryNetwork
from transport.memory_pipe import Faults
from transport.shared_ring import NotSharedError
from triolet.config import MemorySharing, WireConfig
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.sampling import SamplingParams

from .fleet import LINK, SERVE, FakeDevice, Fleet, open_fleet, worker_config
from .scripts import completion, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio.testing import MockClock

    from prefill.core import PrefillCore
    from transport.frames import Load, SharedRing
    from transport.memory_pipe import LinkName
    from transport.shared_ring import FoundRing, RingMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")

BY_BYTES = replace(LINK, wire=WireConfig(MemorySharing.OFF))
INSISTING = replace(LINK, wire=WireConfig(MemorySharing.ON))
PROMPT = tuple(range(1, 40))
PARAMS = SamplingParams(max_tokens=6, seed=5)


def watch(fleet: Fleet) -> list[int]:
    """Return a list that collects the number of parts of every message to the kv listener."""
    seen: list[int] = []

    def on_put(link: LinkName, direction: str, parts: Sequence[bytes | memoryview]) -> None:
        if (link[0], direction) == ("memory:kv", "up"):
            seen.append(len(parts))

    fleet.network.conditions.on_put = on_put  # type: ignore[method-assign]
    return seen


def loads(fleet: Fleet) -> dict[Role, Load]:
    """Return each worker's present load."""
    return {role: loop._core.load() for role, loop in fleet.loops.items()}  # type: ignore[attr-defined]


async def finish(fleet: Fleet, prompt: tuple[int, ...] = PROMPT) -> None:
    answer = await fleet.client.finish(await fleet.client.start(prompt, PARAMS))
    assert answer.token_ids == completion(prompt, 5, 6)


async def test_no_payload_travels_where_the_ring_is_shared(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        parts = watch(fleet)
        for length in (39, 1, 17):
            await finish(fleet, tuple(range(length, 2 * length)))
        assert len(parts) > 6
        assert set(parts) == {1}
        for role, load in loads(fleet).items():
            assert load.kv_bytes == load.kv_shared_bytes > 0, role


@pytest.mark.parametrize("unwilling", [Role.PREFILL, Role.DECODE])
async def test_bytes_travel_where_either_side_does_not_want_to_share(
    unwilling: Role, autojump_clock: MockClock
) -> None:
    async with open_fleet(links={unwilling: BY_BYTES}) as fleet:
        parts = watch(fleet)
        await finish(fleet)
        assert 2 in parts
        for role, load in loads(fleet).items():
            assert load.kv_bytes > load.kv_shared_bytes == 0, role


async def test_bytes_travel_between_workers_that_do_not_see_the_same_memory(
    autojump_clock: MockClock,
) -> None:
    def find(offer: SharedRing) -> FoundRing:
        raise NotSharedError("this is another host")

    async with open_fleet(serve={Role.DECODE: {"find_ring": find}}) as fleet:
        parts = watch(fleet)
        await finish(fleet)
        assert 2 in parts
        assert loads(fleet)[Role.DECODE].kv_shared_bytes == 0


@pytest.mark.parametrize("reason", [OSError("forbidden here"), AttributeError("not Linux")])
async def test_bytes_travel_where_the_system_has_no_such_memory(
    reason: Exception, autojump_clock: MockClock
) -> None:
    def make(num_bytes: int) -> RingMemory:
        raise reason

    async with open_fleet(serve={Role.PREFILL: {"make_ring": make}}) as fleet:
        parts = watch(fleet)
        await finish(fleet)
        assert 2 in parts
    config = worker_config(Role.PREFILL, INSISTING)
    network = MemoryNetwork()
    with pytest.raises(ConfigError, match="share_kv_memory is on"):
        await prefill.worker.serve(
            config, scripted_engine(), FakeDevice(), network, network, make_ring=make
        )


@pytest.mark.parametrize("insisting", [Role.PREFILL, Role.DECODE])
async def test_who_insists_on_sharing_ships_nothing_any_other_way(
    insisting: Role, autojump_clock: MockClock
) -> None:
    links = {role: INSISTING if role is insisting else BY_BYTES for role in SERVE}
    async with open_fleet(links=links) as fleet:
        parts = watch(fleet)
        answer = await fleet.client.start(PROMPT, PARAMS)
        await fleet.client.wait_until(lambda: answer.ended[Role.PREFILL])
        assert answer.ended[Role.PREFILL][0].reason is EndReason.PEER_LOST
        assert "share_kv_memory" in answer.ended[Role.PREFILL][0].message
        assert 2 not in parts


async def test_who_insists_on_sharing_shares(autojump_clock: MockClock) -> None:
    async with open_fleet(link=INSISTING) as fleet:
        await finish(fleet)
        assert loads(fleet)[Role.DECODE].kv_shared_bytes > 0


async def test_a_sender_that_lets_go_while_idle_shares_again(autojump_clock: MockClock) -> None:
    async with open_fleet(link=LINK) as fleet:
        await finish(fleet)
        await trio.sleep(2 * LINK.kv_idle_s)
        parts = watch(fleet)
        await finish(fleet, PROMPT[5:])
        assert set(parts) == {1}


@pytest.mark.parametrize("seed", range(6))
async def test_lost_and_doubled_descriptors_and_cancels_change_no_token(
    seed: int, autojump_clock: MockClock
) -> None:
    async with open_fleet(link=LINK) as fleet:
        fleet.network.conditions.seed = seed
        await finish(fleet)
        fleet.network.conditions.faults = Faults(0.001, 0.02, duplication=0.3)
        cancelled = await fleet.client.start(PROMPT[2:], PARAMS)
        for role in fleet.client.links:
            fleet.client.send(role, End(*cancelled.key, EndReason.CANCEL))
        await finish(fleet, PROMPT[3:])
        fleet.network.conditions.faults = Faults()


async def test_a_slot_that_is_overwritten_too_early_is_found_out(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet(link=LINK) as fleet:
        await finish(fleet)
        core: PrefillCore = next(iter(fleet.loops.values()))._core  # type: ignore[assignment]
        damaged: list[int] = []

        def spoil(link: LinkName, direction: str, parts: Sequence[bytes | memoryview]) -> None:
            is_chunk = len(parts[0]) > 50 and link[0] == "memory:kv" and direction == "up"
            if is_chunk and not damaged:
                damaged.append(1)
                memory = core.shipper._ring._memory
                memory[0] ^= 0xFF

        fleet.network.conditions.on_put = spoil  # type: ignore[method-assign]
        answer = await fleet.client.start(PROMPT[4:], PARAMS)
        await fleet.client.finish(answer)
        assert damaged
        reasons = {ended.reason for role in answer.ended.values() for ended in role}
        assert EndReason.ERROR in reasons
