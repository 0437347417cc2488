"""Tests of lines of batches where a route splits a model among versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.app import build_app
from server.jobs.records import BatchState
from server.jobs.runner import BatchRunner
from server.jobs.storage import Storage
from tests.server.api.test_many_models import CODE, two_models
from tests.server.support.surface import MODEL
from transport.rollout_protocol import RolloutPhase, RolloutView
from triolet.config import BatchConfig
from triolet.config.routes import Route
from triolet.errors import overloaded

from .test_later import run_until_ended
from .test_runner import NUM_LINES, begin, charged

if TYPE_CHECKING:
    from pathlib import Path

CANARY = Route({MODEL: 0.0, CODE: 1.0}, MODEL, 1)
ROLLED_BACK = Route({MODEL: 1.0, CODE: 0.0}, MODEL, 2)
VIEW = RolloutView("r", MODEL, MODEL, CODE, "", RolloutPhase.CANARY, 1, (1.0,), 0.0, "")


async def test_a_line_that_failed_on_a_version_is_tried_on_the_stable_one_after_a_rollback(
    tmp_path: Path,
) -> None:
    config = BatchConfig(concurrency=1, poll_s=0.01, retry_s=0.01)
    storage, outcomes = Storage(str(tmp_path), config, "one"), list[str]()
    async with two_models() as models:
        table = models.server.services.models
        models.server.services.metrics.rollouts.hear((VIEW,))
        table.change({MODEL: CANARY})
        models.code.refuse_with = overloaded("it fails", 0.01)

        def on_refusal() -> float:
            # Asked before each try: control rolls back after the first one.
            if models.code.refusals:
                table.change({MODEL: ROLLED_BACK})
            return 0.0

        app = build_app(models.server.services)
        await begin(storage)
        runner = BatchRunner(
            storage, config, app, "127.0.0.1", on_refusal, outcomes.append, charged
        )
        batch = await run_until_ended(runner, storage)
        assert batch.status is BatchState.COMPLETED
        assert batch.request_counts.completed == NUM_LINES
        assert (models.code.refusals, models.counts) == (1, (NUM_LINES, 0))
        found = models.server.services.metrics.rollouts.take("server")
        assert found == [], "a refused line returns, and says nothing about its version"
    storage.close()
