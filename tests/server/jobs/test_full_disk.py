"""Tests of batches on a full disk: batches pause, and each line is still computed and charged only
once."""

from __future__ import annotations

import json
import resource
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from structlog.testing import capture_logs

from server.app import build_app
from server.jobs.database import FILE_NAME
from server.jobs.records import BatchRecord, BatchState, WaitingLine
from server.jobs.runner import BatchRunner, InnerAnswer
from server.jobs.storage import CONTENT_ROWS, Storage, time_of_day
from server.tenants.accounts import limits_of
from server.tenants.opening import quotas_in_memory
from server.tenants.tenancy import Tenancy
from tests.server.support.fakes import FakeFleet, FakeGeneration
from tests.server.support.request_lives import ChargedEvents
from tests.server.support.surface import surface
from tests.server.support.tenants import tenant, tenants_of
from triolet.config import BatchConfig
from triolet.tenants.plans import Plan

from .test_runner import charged, content, ended, running, set_full

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from server.contract.generation import GenerationRequest
    from server.tenants.quotas import Quotas
    from tests.server.support.surface import Surface

pytestmark = pytest.mark.slow

CONFIG = BatchConfig(concurrency=4, poll_s=0.01, retry_s=0.01, max_held_retry_s=0.02)
PLAN = Plan("p", tokens_per_minute=1e9)
OWNER = "alice"
NUM_LINES = 200
FULL_AT = 40
"""Number of answers started when the disk becomes full."""
WRITE = "UPDATE lines"
LOOK = "PRAGMA freelist_count"
LONG = "long " * 2_000
"""An answer for which a full database has no room."""
PATIENCE_S = 60.0


class ChargingFleet(FakeFleet):
    """Generates long answers, charges for them, and counts them.

    Attributes:
      begun: number of requests by prompt.
      used_tokens: tokens charged in total.
    """

    def __init__(self, quotas: Quotas) -> None:
        super().__init__()
        self.begun: Counter[tuple[int, ...]] = Counter()
        self.used_tokens = 0
        self.charged = ChargedEvents(quotas)

    def begin(self, request: GenerationRequest) -> FakeGeneration:
        self.script = self._answer
        generation = super().begin(request)
        self.charged.accept(request.request_id)
        self.charged.end(request.request_id, generation.usage)
        self.used_tokens += generation.usage.prompt_tokens + generation.usage.completion_tokens
        self.begun[tuple(request.prompt_ids)] += 1
        return generation

    def _answer(self, generation: FakeGeneration) -> None:
        generation.say(LONG)
        generation.finish()


@asynccontextmanager
async def few_pages(storage: Storage) -> AsyncIterator[None]:
    """Let the database have no more pages than now.

    Runs in the writer's turn: SQLite waits for its lock while holding the interpreter lock, which
    the thread with the lock needs to trace its statement.
    """
    await storage.run(set_full, storage, is_full=True)
    yield
    await storage.run(set_full, storage, is_full=False)


@asynccontextmanager
async def short_files(storage: Storage) -> AsyncIterator[None]:
    """Let no file grow beyond the current size of the database's journal before its restart."""
    wal = Path(storage._directory) / f"{FILE_NAME}-wal"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size + 5_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class World:
    """A server that runs a batch of many lines on a disk that can be filled."""

    def __init__(self, server: Surface, fleet: ChargingFleet, storage: Storage) -> None:
        self.server = server
        self.fleet = fleet
        self.storage = storage
        self.outcomes: Counter[str] = Counter()
        self.is_refused = trio.Event()
        self.tried: Counter[str] = Counter()
        storage._connection.set_trace_callback(self._trace)

    def _trace(self, statement: str) -> None:
        self.tried.update(kind for kind in (WRITE, LOOK) if statement.startswith(kind))

    async def has_tried(self, times: int, kind: str) -> None:
        """Wait until the database has been called this many more times."""
        wanted = self.tried[kind] + times
        while self.tried[kind] < wanted:  # noqa: ASYNC110
            await trio.sleep(CONFIG.poll_s)

    def note(self, outcome: str) -> None:
        """Record how a line ended."""
        self.outcomes[outcome] += 1
        if outcome in ("held", "dropped"):
            self.is_refused.set()

    async def begin(self, num_lines: int = NUM_LINES) -> None:
        """Store the lines and their batch."""
        fields = {"method": "POST", "url": "/v1/completions"}
        lines = [
            json.dumps(fields | {"custom_id": f"c{n}", "body": {"prompt": [1, n]}}).encode()
            for n in range(num_lines)
        ]
        now, storage = int(time_of_day()), self.storage
        await storage.run(storage.files.add, OWNER, "file-1", "in", "batch", b"\n".join(lines), now)
        batch = BatchRecord(
            *("batch_1", BatchState.VALIDATING, "/v1/completions", "file-1", "24h"),
            *(now, now + 3600),
        )
        await storage.run(storage.batches.add, OWNER, batch)

    @asynccontextmanager
    async def running(self, config: BatchConfig = CONFIG) -> AsyncIterator[None]:
        """Run batches while the context is active."""
        app = build_app(self.server.services)
        runner = BatchRunner(
            self.storage, config, app, "localhost", lambda: 0.0, self.note, charged
        )
        async with running(runner):
            yield

    async def has_begun(self, count: int) -> None:
        """Wait until this many lines have been requested."""
        while self.fleet.begun.total() < count:  # noqa: ASYNC110
            await trio.sleep(CONFIG.poll_s)

    async def shown(self) -> dict[str, Any]:
        """Return the batch as its owner sees it."""
        headers = {"authorization": "Bearer key"}
        answer = await self.server.request("GET", "/v1/batches/batch_1", headers=headers)
        assert answer.status == 200
        shown: dict[str, Any] = answer.json
        return shown


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    quotas = quotas_in_memory()
    fleet = ChargingFleet(quotas)
    tenancy = Tenancy(tenants_of(tenant(OWNER, "key", plan=PLAN)))
    storage = Storage(str(tmp_path / "jobs"), CONFIG, "one")
    async with surface(fleet, tenancy=tenancy, quotas=quotas, storage=storage) as server:
        yield World(server, fleet, storage)
    storage.close()


@pytest.mark.parametrize(
    ("filled", "full_at"),
    [(few_pages, (FULL_AT, 90, 150)), (short_files, (FULL_AT,))],
    ids=["pages", "files"],
)
async def test_no_line_is_computed_or_charged_again_for_a_full_disk(
    world: World,
    filled: Callable[[Storage], AbstractAsyncContextManager[None]],
    full_at: Sequence[int],
) -> None:
    await world.begin()
    async with world.running():
        for count in full_at:
            await world.has_begun(count)
            async with filled(world.storage):
                world.is_refused = trio.Event()
                await world.is_refused.wait()
                await world.has_tried(2 * CONFIG.concurrency, WRITE)
        batch = await ended(world.storage)
    assert set(world.fleet.begun.values()) == {1}, "each line once"
    assert len(world.fleet.begun) == NUM_LINES
    account = world.server.services.quotas.store.last_seen(OWNER, limits_of(PLAN))
    assert account is not None
    assert account.used_tokens == world.fleet.used_tokens
    assert batch.request_counts.completed == NUM_LINES
    assert world.outcomes["completed"] == NUM_LINES
    assert 0 < world.outcomes["held"] <= len(full_at) * CONFIG.concurrency
    assert world.outcomes["dropped"] == 0
    first = await content(world.storage, batch.output_file_id)
    assert [line["custom_id"] for line in first] == [f"c{n}" for n in range(CONTENT_ROWS)]


async def test_a_paused_batch_says_why_until_it_goes_on(world: World) -> None:
    await world.begin(FULL_AT + 20)
    with capture_logs() as logs:
        async with world.running():
            await world.has_begun(FULL_AT)
            async with few_pages(world.storage):
                await world.is_refused.wait()
                await world.has_tried(2 * CONFIG.concurrency, WRITE)
                paused = await world.shown()
            await ended(world.storage)
            done = await world.shown()
    assert paused["status"] == "in_progress"
    (error,) = paused["errors"]["data"]
    assert error["code"] == "batches_paused"
    assert error["message"].startswith("paused: files and batches cannot be stored just now")
    assert error["message"].endswith("the disk is full")
    assert (done["status"], done["errors"]) == ("completed", None)
    told = [entry["event"] for entry in logs if entry["event"].startswith(("batches", "database"))]
    assert told[0] == "batches_paused"
    assert told[-1] == "batches_resumed"
    assert "database_failed" not in told, "one log line is enough"
    assert told.count("batches_paused") == told.count("batches_resumed")


async def test_what_cannot_be_stored_on_a_full_disk_is_refused_as_such(world: World) -> None:
    await world.begin(1)
    fields = {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {str(number): LONG[:512] for number in range(16)},
    }
    headers = {"authorization": "Bearer key"}
    async with few_pages(world.storage):
        body = json.dumps(fields).encode()
        answer = await world.server.request("POST", "/v1/batches", body=body, headers=headers)
    assert (answer.status, answer.error["code"]) == (507, "disk_full")
    assert "the disk is full" in answer.error["message"]
    assert int(answer.headers["retry-after"]) >= 1


async def test_no_line_begins_on_a_disk_that_is_nearly_full(world: World) -> None:
    await world.begin(8)
    nearly_full = BatchConfig(poll_s=0.01, min_free_bytes=2**62)
    async with world.running(nearly_full):
        await world.has_tried(5, LOOK)
        paused = await world.shown()
    assert not world.fleet.begun
    assert paused["errors"]["data"][0]["message"] == "paused: the disk has too little free space"
    async with world.running():
        batch = await ended(world.storage)
    assert batch.request_counts.completed == 8
    assert world.storage.paused is None


async def test_an_answer_is_held_until_its_batchs_window_ends(world: World) -> None:
    await world.begin(1)
    await world.storage.run(world.storage.batches.take_lease, time_of_day())
    await world.storage.run(world.storage.batches.advance, int(time_of_day()))
    app = build_app(world.server.services)
    runner = BatchRunner(world.storage, CONFIG, app, "localhost", lambda: 0.0, world.note, charged)
    line = WaitingLine("batch_1", 0, "c0", "/v1/completions", b"{}", OWNER, expires_at=0)
    answer = InnerAnswer(200, "id", json.dumps(LONG * 20).encode(), None, False)
    async with few_pages(world.storage):
        await runner._keep(line, answer)
    assert world.outcomes == {"held": 1, "dropped": 1}
