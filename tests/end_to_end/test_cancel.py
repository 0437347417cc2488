"""Tests that closed connections, in every phase and API, free all blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from loadtest import cancels
from loadtest.campaign.misbehaving import Cut, cut_many
from loadtest.cancels import (
    FINISHED_FIRST,
    release_table,
    release_times,
    stray_tokens,
)
from loadtest.harness.metrics import blocks_of
from loadtest.harness.servers import FleetLog
from loadtest.harness.statistics import percentile

from .conftest import PATIENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

COUNT, COUNT_WHOLE = 120, 300
"""Number of cancels, at least a hundred, so that each phase that holds blocks is hit."""
CLIENTS = 24


@pytest.mark.long
@pytest.mark.proof
def test_requests_cut_at_random_moments_leave_every_block_free(
    start_fleet: Callable[..., FleetProcess], whole: bool
) -> None:
    count = COUNT_WHOLE if whole else COUNT
    fleet = start_fleet(*PATIENT, *cancels.SERVE_OPTIONS)
    cuts = trio.run(cut_many, [fleet.url], range(count), CLIENTS, 7)
    assert len(cuts) == count
    assert {cut.kind for cut in cuts} == {"sse", "ws", "plain"}
    blocks = cancels.wait_until_free(fleet.url)
    assert blocks.is_all_free, str(blocks)
    assert cancels.still_answers(fleet.url)
    # Check that cancels hit the phases that hold blocks.
    times = release_times(cuts, fleet.log_text().splitlines())
    assert {"prefilling", "decoding"} <= times.keys()
    audit = cancels.audit(fleet.url)
    assert audit["violations"] == []
    audits = [worker["audit"] for worker in audit["workers"]]
    stray = stray_tokens(FleetLog(fleet.log_path).entries(), audits)
    assert stray.wrongs == []
    assert stray.cut > 0


def test_the_report_reads_logs_and_metrics() -> None:
    cuts = [Cut(name, "sse", closed_at=1000.0) for name in ("a", "b", "c")]
    lines = [
        "not json",
        '{"event": "request_ended", "client_request_id": "a", "request_id": "0a", "phase": '
        '"decoding", "outcome": "client_gone", "timestamp": "1970-01-01T00:16:40.010000Z"}',
        '{"event": "attempt_ended", "attempt": "0a/0", "timestamp": "1970-01-01T00:16:40.020000Z"}',
        '{"event": "request_ended", "client_request_id": "b", "request_id": "0b", "phase": '
        '"finishing", "outcome": "stop", "timestamp": "1970-01-01T00:16:39Z"}',
    ]
    times = release_times(cuts, lines)
    assert times["decoding"] == [pytest.approx(0.020)]
    assert times[FINISHED_FIRST] == [0.0]
    assert times["never begun"] == [0.0]
    assert release_table(times, "").row_count == 4
    metrics = (
        'triolet_kv_blocks{pool="decode",state="free",worker="d"} 7.0\n'
        'triolet_kv_blocks{pool="decode",state="leased",worker="d"} 1.0\n'
    )
    assert not blocks_of(metrics).is_all_free
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
