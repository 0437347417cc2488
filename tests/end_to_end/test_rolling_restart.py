"""Tests of drain and rolling restart under live streams: no stream is dropped, and tokens do not
change."""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING

import pytest
import trio

from loadtest.campaign.client import ask_all
from loadtest.harness.servers import FleetLog
from loadtest.restart import SERVE_OPTIONS, long_asks, parse, restart_under_load

from . import paced
from .conftest import PATIENT, WATCHED
from .fleet_process import FleetProcess, running_fleet, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.campaign.answers import Ask
    from loadtest.campaign.client import Story

pytestmark = [pytest.mark.slow, pytest.mark.long]

PATIENCE_S = 240.0
STREAMS, STREAMS_WHOLE = 4, 8
TOKENS, TOKENS_WHOLE = 60, 300
LOAD = ("--streams", "4", "--max-tokens", "60", "--lead-s", "0.5")
LOAD_WHOLE = ("--streams", "20", "--max-tokens", "400", "--lead-s", "0.5")
"""Numbers of streams; with more streams, more must move at each step."""


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> Iterator[FleetProcess]:
    """A fleet that restarts workers without waiting for their streams."""
    log = tmp_path_factory.mktemp("restarted") / "fleet.log"
    command = None if whole else paced.COMMAND
    with running_fleet(log, *WATCHED, *PATIENT, *SERVE_OPTIONS, command=command) as fleet:
        yield fleet


@pytest.mark.promise
@pytest.mark.proof
async def test_a_drained_worker_leaves_in_order_and_its_streams_go_on(
    restarted: FleetProcess, whole: bool
) -> None:
    log = FleetLog(restarted.log_path)
    asks = long_asks(
        STREAMS_WHOLE if whole else STREAMS,
        max_tokens=TOKENS_WHOLE if whole else TOKENS,
        seed=7,
    )
    undisturbed = await ask_all(restarted.url, asks, len(asks), lambda _: None)
    (victim,) = restarted.pids("decode")
    stories: list[Story] = []
    has_left = trio.Event()

    async def keep_asking(ask: Ask) -> None:
        while not has_left.is_set():
            stories.extend(await ask_all(restarted.url, [ask], 1, lambda _: None))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for ask in asks:
                nursery.start_soon(keep_asking, ask)
            await trio.to_thread.run_sync(
                wait_until,
                lambda: restarted.kv_blocks("decode")["leased"] > 0,
                PATIENCE_S,
                "streams run",
            )
            code, said = await trio.to_thread.run_sync(
                restarted.run_triolet, "drain", "decode-0", "--deadline", "0"
            )
            has_left.set()

    left = "decode-0 has exited; its supervisor starts a new one"
    assert (code, said[-1]) == (0, left), said
    assert said[0].startswith("decode-0: ")
    # It has sent GOODBYE; its supervisor records its exit later.
    wait_until(
        lambda: bool(log.of("process_left", name="decode-0", how="exited with code 0")),
        PATIENCE_S,
        "it has left",
    )
    ended = log.of("attempt_ended", process="decode-0")
    told = log.of("draining", process="decode-0")
    assert any(entry["reason"] == "drain" for entry in ended), (told, ended[-len(asks) :])
    assert [story.failure for story in (*undisturbed, *stories) if story.failure] == []
    expected = {story.ask.number: story.answer for story in undisturbed}
    assert all(story.answer == expected[story.ask.number] for story in stories)
    wait_until(lambda: restarted.pids("decode") not in ([], [victim]), PATIENCE_S, "a fresh worker")
    causes = {s.labels["cause"] for s in restarted.samples("triolet_attempts_failed_total")}
    assert "drain" in causes
    restarted.wait_at_rest()


@pytest.mark.proof
async def test_every_process_is_restarted_under_live_streams(
    restarted: FleetProcess, whole: bool
) -> None:
    # Five processes start one at a time, which exceeds pytest's timeout.
    faulthandler.cancel_dump_traceback_later()
    options = parse(LOAD_WHOLE if whole else LOAD)
    log = FleetLog(restarted.log_path)
    templates = restarted.pids("template")
    outcome = await restart_under_load(restarted.url, log, options)
    assert outcome.wrongs == []
    # New processes have the currently installed code.
    assert len(templates) == 2
    assert not set(templates) & set(restarted.pids("template"))
    # Each exited cleanly: none was killed or crashed.
    assert {entry["how"] for entry in log.of("process_ended")} == {"exited with code 0"}
    assert not log.of("process_died")
    assert [step.name for step in outcome.steps] == [
        *("prefill-spare", "prefill-0", "prefill-spare"),
        *("decode-spare", "decode-0", "decode-spare"),
        "server",
    ]
    restarted.wait_at_rest()
