"""Tests of batch lines that are refused for lack of capacity: they are retried later and delay no
other line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.api.request_scope import scope_of
from server.contract.generation import CancelReason
from server.jobs.records import BatchState
from server.jobs.runner import BatchRunner
from server.jobs.storage import Storage
from triolet.config import BatchConfig

from .test_runner import CONFIG, NUM_LINES, begin, charged, ended, running

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from server.jobs.records import BatchRecord


class CrowdedApp:
    """Answers with 503 as long as it is told to.

    Args:
      is_refused: called for each request with its owner and the number of earlier refusals.
      retry_after_ms: sent with the refusal.
      is_crowded_out: whether admission refused it, not a fault.
    """

    def __init__(
        self,
        is_refused: Callable[[str, int], bool],
        retry_after_ms: int = 1,
        *,
        is_crowded_out: bool = True,
    ) -> None:
        self.num_refused = 0
        self._is_refused = is_refused
        self._headers = [(b"retry-after-ms", str(retry_after_ms).encode())]
        self._is_crowded_out = is_crowded_out

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Answer."""
        live = scope_of(scope)
        await receive()
        is_refused = self._is_refused(live.owner or "", self.num_refused)
        self.num_refused += is_refused
        live.is_crowded_out = is_refused and self._is_crowded_out
        status, headers = (503, self._headers) if is_refused else (200, [])
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


async def run_until_ended(
    runner: BatchRunner, storage: Storage, batch_id: str = "batch_1"
) -> BatchRecord:
    """Run until a batch has ended."""
    async with running(runner):
        return await ended(storage, batch_id)


@pytest.mark.slow
async def test_a_line_that_is_crowded_out_comes_again_until_it_is_taken(tmp_path: Path) -> None:
    storage, outcomes = Storage(str(tmp_path), CONFIG, "one"), list[str]()
    app = CrowdedApp(lambda _, before: before <= 2 * CONFIG.max_line_attempts)
    await begin(storage)
    runner = BatchRunner(storage, CONFIG, app, "localhost", lambda: 0.0, outcomes.append, charged)
    batch = await run_until_ended(runner, storage)
    assert batch.status is BatchState.COMPLETED
    assert (batch.request_counts.completed, batch.request_counts.failed) == (NUM_LINES, 0)
    assert outcomes.count("refused") == app.num_refused > CONFIG.max_line_attempts
    storage.close()


@pytest.mark.slow
async def test_a_fault_is_not_waited_out_although_it_says_later(tmp_path: Path) -> None:
    config = BatchConfig(concurrency=2, poll_s=0.01, retry_s=0.01, max_line_attempts=2)
    storage, outcomes = Storage(str(tmp_path), config, "one"), list[str]()
    app = CrowdedApp(lambda *_: True, is_crowded_out=False)
    await begin(storage)
    runner = BatchRunner(storage, config, app, "localhost", lambda: 0.0, outcomes.append, charged)
    batch = await run_until_ended(runner, storage)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (0, NUM_LINES)
    assert outcomes == ["failed"] * NUM_LINES
    assert app.num_refused == config.max_line_attempts * NUM_LINES
    storage.close()


@pytest.mark.slow
async def test_lines_that_are_crowded_out_leave_their_places_to_others(tmp_path: Path) -> None:
    storage, outcomes = Storage(str(tmp_path), CONFIG, "one"), list[str]()
    app = CrowdedApp(lambda owner, _: owner == "busy", retry_after_ms=3_600_000)
    await begin(storage, "busy", "1")
    await begin(storage, "other", "2")
    runner = BatchRunner(storage, CONFIG, app, "localhost", lambda: 0.0, outcomes.append, charged)
    other = await run_until_ended(runner, storage, "batch_2")
    assert (other.request_counts.completed, other.request_counts.failed) == (NUM_LINES, 0)
    assert 0 < app.num_refused <= 2 * CONFIG.concurrency, "each at most once, and not all of them"
    assert outcomes.count("refused") == app.num_refused
    storage.close()


class HeldThing:
    """Work that a line started."""

    def __init__(self, *, has_begun: bool) -> None:
        self.has_begun = has_begun
        self.is_cancelled = False

    def cancel(self, reason: CancelReason) -> None:
        """Record the cancel."""
        assert reason is CancelReason.CLIENT_GONE
        self.is_cancelled = True


@pytest.mark.slow
async def test_what_has_not_begun_is_taken_back_while_batches_are_paused(tmp_path: Path) -> None:
    config = BatchConfig(concurrency=2, poll_s=0.01, paused_s=0.05)
    storage, outcomes = Storage(str(tmp_path), config, "one"), list[str]()
    is_paused, may_end, is_taken_back = False, trio.Event(), trio.Event()
    things: list[HeldThing] = []

    async def waiting_app(
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        nonlocal is_paused
        await receive()
        with scope_of(scope) as live:
            # One of the first two is being computed when the pause comes; the other one waits.
            thing = HeldThing(has_begun=len(things) != 1)
            things.append(thing)
            live.hold(thing)
            if len(things) == 2:
                is_paused = True
            await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def note(outcome: str) -> None:
        outcomes.append(outcome)
        if outcome == "taken_back":
            is_taken_back.set()

    def hold_s() -> float:
        return math.inf if is_paused else 0.0

    await begin(storage)
    runner = BatchRunner(storage, config, waiting_app, "localhost", hold_s, note, charged)
    async with running(runner):
        await is_taken_back.wait()
        assert [thing.is_cancelled for thing in things] == [False, True]
        await trio.sleep(3 * config.paused_s)
        assert outcomes == ["taken_back"], "work that a worker computes continues"
        assert len(things) == 2, "nothing is requested while batches are paused"
        is_paused = False
        may_end.set()
        batch = await ended(storage)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (NUM_LINES, 0)
    assert outcomes == ["taken_back"] + ["completed"] * NUM_LINES
    storage.close()
