"""Workers join and leave a fleet of real processes under live streams: no stream notices."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import trio

from loadtest.campaign.client import ask_all
from loadtest.harness.servers import FleetLog
from loadtest.restart import long_asks

from .conftest import PATIENT, WATCHED
from .fleet_process import FleetProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.campaign.answers import Ask
    from loadtest.campaign.client import Story

pytestmark = [pytest.mark.slow, pytest.mark.long]

TRIOLET: Final = str(Path(sys.executable).with_name("triolet"))
PATIENCE_S: Final = 240.0
STREAMS: Final = 6
CHANGES: Final = ("decode=2", "prefill=2", "decode=1", "prefill=1")
"""One after the other, again and again."""
ROUNDS: Final = 1
ROUNDS_WHOLE: Final = 5


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetProcess]:
    started = FleetProcess(tmp_path / "fleet.log", *WATCHED, *PATIENT)
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


@pytest.mark.proof
async def test_workers_join_and_leave_under_live_streams(fleet: FleetProcess, whole: bool) -> None:
    asks = long_asks(STREAMS, max_tokens=40, seed=3)
    undisturbed = await ask_all(fleet.url, asks, STREAMS, lambda _: None)
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
                scaled = await trio.run_process(
                    [TRIOLET, "scale", change, "--port", str(fleet.port)],
                    check=False,
                    capture_stdout=True,
                    stderr=subprocess.STDOUT,
                )
                said = scaled.stdout.decode().splitlines()
                assert scaled.returncode == 0, said
                assert said[-1].endswith(f"done: {change}")
                # The server knows the new worker a moment later; some stream is to meet it.
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
