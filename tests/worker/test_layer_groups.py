"""KV that leaves layer by layer while its step runs: the same tokens, whatever the wire does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from transport.codec import decode
from transport.frames import End, EndReason, KvChunk
from transport.memory_pipe import Faults
from triolet.config import WireConfig
from triolet.errors import ConfigError
from triolet.sampling import SamplingParams

from .fake_engine import completion
from .fleet import LINK, Fleet, open_fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio.testing import MockClock

    from transport.memory_pipe import LinkName

GROUPED = replace(LINK, wire=WireConfig(layer_groups=2, layer_group_min_tokens=4))
PROMPT = tuple(range(1, 40))
PARAMS = SamplingParams(max_tokens=6, seed=5)


def watch(fleet: Fleet) -> list[KvChunk]:
    """Return what is filled with every chunk that is sent."""
    seen: list[KvChunk] = []

    def on_put(link: LinkName, direction: str, parts: Sequence[bytes | memoryview]) -> None:
        frame = decode(parts[0], 10_000)
        if isinstance(frame, KvChunk):
            seen.append(frame)

    fleet.network.conditions.on_put = on_put  # type: ignore[method-assign]
    return seen


async def finish(fleet: Fleet, prompt: tuple[int, ...]) -> None:
    answer = await fleet.client.finish(await fleet.client.start(prompt, PARAMS))
    assert answer.token_ids == completion(prompt, 5, 6)


@pytest.mark.parametrize("num_layers", [2, 4])
async def test_layers_travel_apart_and_come_together(
    num_layers: int, autojump_clock: MockClock
) -> None:
    async with open_fleet(link=GROUPED, num_layers=num_layers) as fleet:
        chunks = watch(fleet)
        for length in (39, 1, 17, 8):
            await finish(fleet, tuple(range(length, 2 * length)))
    parts = {(chunk.first_layer, chunk.num_layers) for chunk in chunks}
    half = num_layers // 2
    assert {(0, half), (half, half)} <= parts


async def test_short_chunks_travel_whole(autojump_clock: MockClock) -> None:
    async with open_fleet(link=GROUPED, num_layers=2) as fleet:
        chunks = watch(fleet)
        await finish(fleet, (5, 6, 7))
    assert {(chunk.first_layer, chunk.num_layers) for chunk in chunks} == {(0, 0)}


@pytest.mark.parametrize("seed", range(8))
async def test_misfortune_and_cancels_change_no_token(seed: int, autojump_clock: MockClock) -> None:
    async with open_fleet(link=GROUPED, num_layers=4) as fleet:
        fleet.network.conditions.seed = seed
        await finish(fleet, PROMPT)
        # No damage: a chunk that is doubled is damaged twice at once, and thrice is an error.
        fleet.network.conditions.faults = Faults(0.001, 0.02, duplication=0.3)
        cancelled = await fleet.client.start(PROMPT[2:], PARAMS)
        for role in fleet.client.links:
            fleet.client.send(role, End(*cancelled.key, EndReason.CANCEL))
        await finish(fleet, PROMPT[3:])
        fleet.network.conditions.faults = Faults()


async def test_a_ring_that_is_too_small_for_a_step_only_slows_it(
    autojump_clock: MockClock,
) -> None:
    tight = replace(GROUPED, kv_chunk_bytes=16, kv_window_bytes=16, kv_ring_bytes=16)
    async with open_fleet(link=tight, num_layers=4) as fleet:
        await finish(fleet, PROMPT)


def test_no_groups_and_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer_groups is 0"):
        WireConfig(layer_groups=0)
    with pytest.raises(ConfigError, match="layer_group_min_tokens is 0"):
        WireConfig(layer_group_min_tokens=0)
