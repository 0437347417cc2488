"""Tests of the batch runner: tenants and batches take turns, a tenant at its limit delays no other,
and a batch that ends while paused keeps its results."""

from __future__ import annotations

import json
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.api.request_scope import scope_of
from server.jobs.records import OPEN, BatchRecord, BatchState
from server.jobs.runner import BatchRunner
from server.jobs.storage import Storage, time_of_day
from triolet.config import BatchConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

CONFIG = BatchConfig(concurrency=2, poll_s=0.01, retry_s=0.01)
URL = "/v1/completions"
NUM_LINES = 6
LONG = "long " * 20_000
"""An answer for which a full database has no room."""
PATIENCE_S = 60.0


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answer any request with a long text."""
    assert scope["path"] == URL
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps({"text": LONG}).encode()})


async def charged() -> None:
    """Return at once: these lines are not charged."""
    await trio.lowlevel.checkpoint()


def set_full(storage: Storage, *, is_full: bool) -> None:
    """Let the database have no more pages than now, or any number."""
    connection = storage._connection
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {num_pages if is_full else 1_000_000}")


async def begin(storage: Storage, owner: str = "", name: str = "1") -> None:
    """Store lines and a batch of them."""
    fields = {"method": "POST", "url": URL, "body": {"prompt": "x"}}
    lines = [json.dumps(fields | {"custom_id": f"c{n}"}).encode() for n in range(NUM_LINES)]
    now = int(time_of_day())
    await storage.run(
        storage.files.add, owner, f"file-{name}", "in", "batch", b"\n".join(lines), now
    )
    batch = BatchRecord(
        f"batch_{name}", BatchState.VALIDATING, URL, f"file-{name}", "24h", now, now + 3600
    )
    await storage.run(storage.batches.add, owner, batch)
    await storage.run(storage.batches.take_lease, time_of_day())
    await storage.run(storage.batches.advance, now)


async def found(storage: Storage, batch_id: str = "batch_1") -> BatchRecord:
    """Return a batch's current record."""
    batch = await storage.run(storage.batches.get, batch_id)
    assert batch is not None
    return batch


async def content(storage: Storage, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a small result file."""
    assert file_id is not None
    part = await storage.run(storage.files.content, file_id, 0)
    assert part is not None
    return [json.loads(line) for line in part.splitlines()]


async def ended(storage: Storage, batch_id: str = "batch_1") -> BatchRecord:
    """Return a batch once it has ended."""
    while (batch := await found(storage, batch_id)).status in OPEN:  # noqa: ASYNC110
        await trio.sleep(CONFIG.poll_s)
    return batch


@asynccontextmanager
async def running(runner: BatchRunner) -> AsyncIterator[None]:
    """Run batches while the context is active."""
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runner.run)
            yield
            nursery.cancel_scope.cancel()


class LimitedApp:
    """Refuses one tenant until it is allowed."""

    def __init__(self) -> None:
        self.is_limited = True
        self.num_refused = 0

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Answer."""
        await receive()
        is_refused = self.is_limited and scope_of(scope).owner == "busy"
        self.num_refused += is_refused
        headers = [(b"retry-after-ms", b"20")] if is_refused else []
        status = 429 if is_refused else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.slow
async def test_lines_of_a_tenant_at_its_limit_wait_and_hold_up_nobody(tmp_path: Path) -> None:
    storage, outcomes, limited = Storage(str(tmp_path), CONFIG, "one"), list[str](), LimitedApp()
    await begin(storage, "busy", "1")
    await begin(storage, "other", "2")

    async with running(
        BatchRunner(storage, CONFIG, limited, "localhost", lambda: 0.0, outcomes.append, charged)
    ):
        other = await ended(storage, "batch_2")
        while limited.num_refused <= 2 * CONFIG.max_line_attempts:  # noqa: ASYNC110
            await trio.sleep(CONFIG.poll_s)
        limited.is_limited = False
        busy = await ended(storage)
    for batch in (busy, other):
        assert (batch.request_counts.completed, batch.request_counts.failed) == (NUM_LINES, 0)
    assert outcomes.count("limited") == limited.num_refused
    storage.close()


@pytest.mark.slow
async def test_lines_have_their_turns_although_somebody_always_waits(tmp_path: Path) -> None:
    storage, outcomes = Storage(str(tmp_path), CONFIG, "one"), list[str]()
    await begin(storage)
    async with running(
        BatchRunner(storage, CONFIG, app, "localhost", lambda: 0.05, outcomes.append, charged)
    ):
        while len(outcomes) < NUM_LINES:  # noqa: ASYNC110
            await trio.sleep(CONFIG.poll_s)
    assert outcomes == ["completed"] * NUM_LINES
    storage.close()


async def test_who_came_first_leaves_places_to_others(tmp_path: Path) -> None:
    storage, owners, are_two = Storage(str(tmp_path), CONFIG, "one"), list[str](), trio.Event()
    await begin(storage, "first", "1")
    await begin(storage, "second", "2")

    async def holding_app(
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        await receive()
        owners.append(scope_of(scope).owner or "")
        if len(owners) == CONFIG.concurrency:
            are_two.set()
        await trio.sleep_forever()

    runner = BatchRunner(
        storage, CONFIG, holding_app, "localhost", lambda: False, lambda _: None, charged
    )
    async with running(runner):
        await are_two.wait()
    assert sorted(owners) == ["first", "second"]
    storage.close()


async def test_a_line_is_stored_when_its_charge_is(tmp_path: Path) -> None:
    """If a server dies before the charge, another one computes the line again."""
    storage, is_waiting, is_charged = Storage(str(tmp_path), CONFIG, "one"), False, trio.Event()

    async def wait_charged() -> None:
        nonlocal is_waiting
        is_waiting = True
        await is_charged.wait()

    await begin(storage)
    runner = BatchRunner(
        storage, CONFIG, app, "localhost", lambda: 0.0, lambda _: None, wait_charged
    )
    async with running(runner):
        while not is_waiting:  # noqa: ASYNC110
            await trio.sleep(CONFIG.poll_s)
        await trio.testing.wait_all_tasks_blocked()
        assert (await found(storage)).request_counts.completed == 0
        is_charged.set()
        batch = await ended(storage)
    assert batch.request_counts.completed == NUM_LINES
    storage.close()


@pytest.mark.slow
async def test_a_batch_that_is_paused_until_its_window_ends_has_what_was_done(
    tmp_path: Path,
) -> None:
    config = BatchConfig(concurrency=1, poll_s=0.01)
    storage, num_asked, is_paused = Storage(str(tmp_path), config, "one"), 0, trio.Event()

    async def pausing_app(
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        nonlocal num_asked
        await receive()
        num_asked += 1
        if num_asked == NUM_LINES // 2:
            is_paused.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def hold_s() -> float:
        return math.inf if is_paused.is_set() else 0.0

    def end_window(storage: Storage) -> None:
        storage._connection.execute("UPDATE batches SET expires_at = ?", (int(time_of_day()),))

    await begin(storage)
    runner = BatchRunner(storage, config, pausing_app, "localhost", hold_s, lambda _: None, charged)
    async with running(runner):
        await is_paused.wait()
        while (await found(storage)).request_counts.completed < num_asked:  # noqa: ASYNC110
            await trio.sleep(config.poll_s)
        await storage.run(end_window, storage)
        batch = await ended(storage)
        while runner._running:  # noqa: ASYNC110
            await trio.sleep(config.poll_s)
    assert batch.status is BatchState.EXPIRED
    assert num_asked == NUM_LINES // 2
    counts = batch.request_counts
    assert (counts.completed, counts.failed) == (num_asked, NUM_LINES - num_asked)
    done, missed = [await content(storage, i) for i in (batch.output_file_id, batch.error_file_id)]
    assert [told["custom_id"] for told in done] == ["c0", "c1", "c2"]
    assert {told["error"]["code"] for told in missed} == {"batch_expired"}
    storage.close()
