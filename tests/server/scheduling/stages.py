"""Test helpers that bring a request into a phase, with no frame in transit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from server.scheduling.request import Phase
from transport.frames import (
    Ended,
    EndReason,
)

from .fakes import make_request

if TYPE_CHECKING:
    from .fakes import FakeDecode
    from .world import Reader, World


def text_of(token_ids: list[int]) -> str:
    return bytes(i for i in token_ids if i < 256).decode(errors="replace")


def brought_to(world: World, phase: Phase, *, max_tokens: int = 200) -> Reader:
    """Submit a request and bring it into a phase, with no frame in transit."""
    decode, prefill = world.worker(world.decode), world.worker(world.prefill)
    if phase is Phase.QUEUED:
        world.announce(world.decode, row_credit=0)
    reader = world.submit(make_request(max_tokens=max_tokens))
    if phase in (Phase.QUEUED, Phase.RESERVING):
        world.up[decode].clear()
    else:
        world.deliver()
    if phase in (Phase.DECODING, Phase.FINISHING):
        world.compute(prefill)
        for _ in range(5):
            world.compute(decode)
        world.deliver()
    if phase is Phase.FINISHING:
        [key] = world.decode.rows
        world.decode.rows.clear()
        world.down[decode].append(Ended(*key, EndReason.STOP, num_tokens=9, freed_blocks=2))
        world.deliver()
    assert reader.request.phase is phase
    return reader


def fail_step(world: World, fake: FakeDecode) -> None:
    """Make a worker's device step raise, with everything it computes."""
    worker = world.worker(fake)
    keys = list(fake.rows)
    fake.steps += 1
    for key in keys:
        ended = fake.end(key, EndReason.ERROR)
        world.hear(worker, replace(ended, failed_step=fake.steps, failed_rows=len(keys)))


UNFINISHED = [phase for phase in Phase if phase is not Phase.FINISHED]
