"""Tests of adding and removing workers under live streams: no stream is affected."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import pytest
import trio

from loadtest.campaign.client import ask_all
from loadtest.harness.servers import FleetLog
from loadtest.restart import long_asks

from . import paced
from .conftest import PATIENT, WATCHED
from .fleet_process import FleetProcess, running_fleet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from loadtest.campaign.answers import Ask
    from loadtest.campaign.client import Story

pytestmark = [pytest.mark.slow, pytest.mark.long]

PATIENCE_S: Final = 240.0
STREAMS: Final = 3
STREAMS_WHOLE: Final = 6
TOKENS: Final = 24
TOKENS_WHOLE: Final = 40
CHANGES: Final = ("decode=2", "prefill=2", "decode=1", "prefill=1")
"""Concurrent streams, each repeated."""
ROUNDS: Final = 1
ROUNDS_WHOLE: Final = 5


@pytest.fixture
def fleet(tmp_path: Path, whole: bool) -> Iterator[FleetProcess]:
    command = None if whole else paced.COMMAND
    with running_fleet(tmp_path / "fleet.log", *WATCHED, *PATIENT, command=command) as started:
        yield started


@pytest.mark.proof
async def test_workers_join_and_leave_under_live_streams(fleet: FleetProcess, whole: bool) -> None:
    asks = long_asks(
        STREAMS_WHOLE if whole else STREAMS,
        max_tokens=TOKENS_WHOLE if whole else TOKENS,
        seed=3,
    )
    undisturbed = await ask_all(fleet.url, asks, len(asks), lambda _: None)
    expected = {story.ask.number: story.answer for story in undisturbed}
    stories: list[Story] = []
    is_over = trio.Event()

    async def keep_asking(ask: Ask) -> None:
        while not is_over.is_set():
            stories.extend(await ask_all(fleet.url, [ask], 1, lambda _: None))

    used: set[str] = set()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for ask in asks:
                nursery.start_soon(keep_asking, ask)
            for change in itertools.chain.from_iterable(
                itertools.repeat(CHANGES, ROUNDS_WHOLE if whole else ROUNDS)
            ):
                code, said = await trio.to_thread.run_sync(fleet.run_triolet, "scale", change)
                assert code == 0, said
                assert said[-1].endswith(f"done: {change}")
                # The server learns of the new worker a moment later; a stream must reach it.
                before = len(stories)
                while len(stories) < before + 2:  # noqa: ASYNC110
                    await trio.sleep(0.05)
                ready = await trio.to_thread.run_sync(fleet.client.get, "/health/ready")
                used |= set(ready.json()["workers"])
            is_over.set()

    assert [story.failure for story in (*undisturbed, *stories) if story.failure] == []
    assert all(story.answer == expected[story.ask.number] for story in stories)
    assert used == {"prefill-0", "decode-0", "prefill-1", "decode-1"}
    log = FleetLog(fleet.log_path)
    assert not log.of("process_died")
    assert not log.of("crashed")
    fleet.wait_at_rest()
