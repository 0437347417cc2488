"""Workers of one host that share prefill's ring: the same tokens, the same promises."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from transport.frames import End, EndReason
from transport.memory_pipe import Faults
from triolet.config_wire import WireConfig
from triolet.sampling import SamplingParams

from .fake_engine import completion
from .fleet import LINK, Fleet, open_fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio.testing import MockClock

    from prefill.core import PrefillCore
    from transport.memory_pipe import LinkName

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")

SHARING = replace(LINK, wire=WireConfig(share_memory=True))
PROMPT = tuple(range(1, 40))
PARAMS = SamplingParams(max_tokens=6, seed=5)


def watch(fleet: Fleet) -> list[int]:
    """Return what is filled with the number of parts of every message to the kv listener."""
    seen: list[int] = []

    def on_put(link: LinkName, direction: str, parts: Sequence[bytes | memoryview]) -> None:
        if (link[0], direction) == ("memory:kv", "up"):
            seen.append(len(parts))

    fleet.network.conditions.on_put = on_put  # type: ignore[method-assign]
    return seen


async def finish(fleet: Fleet, prompt: tuple[int, ...] = PROMPT) -> None:
    answer = await fleet.client.finish(await fleet.client.start(prompt, PARAMS))
    assert answer.token_ids == completion(prompt, 5, 6)


async def test_no_payload_travels_where_the_ring_is_shared(autojump_clock: MockClock) -> None:
    async with open_fleet(link=SHARING) as fleet:
        parts = watch(fleet)
        for length in (39, 1, 17):
            await finish(fleet, tuple(range(length, 2 * length)))
        assert len(parts) > 6
        assert set(parts) == {1}


async def test_bytes_travel_where_sharing_is_not_wanted(autojump_clock: MockClock) -> None:
    async with open_fleet() as fleet:
        parts = watch(fleet)
        await finish(fleet)
        assert 2 in parts


async def test_a_sender_that_lets_go_while_idle_shares_again(autojump_clock: MockClock) -> None:
    async with open_fleet(link=SHARING) as fleet:
        await finish(fleet)
        await trio.sleep(2 * SHARING.kv_idle_s)
        parts = watch(fleet)
        await finish(fleet, PROMPT[5:])
        assert set(parts) == {1}


@pytest.mark.parametrize("seed", range(6))
async def test_lost_and_doubled_descriptors_and_cancels_change_no_token(
    seed: int, autojump_clock: MockClock
) -> None:
    async with open_fleet(link=SHARING) as fleet:
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
    async with open_fleet(link=SHARING) as fleet:
        await finish(fleet)
        core: PrefillCore = next(iter(fleet.shells.values()))._core  # type: ignore[assignment]
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
