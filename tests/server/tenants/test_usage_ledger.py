"""Tests of the usage ledger: every ended request is recorded or counted as dropped; none waits."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from ops.cli.commands import main
from server.contract.generation import RequestCost, Usage
from server.contract.request_events import RequestEnded, RequestEvents
from server.tenants.usage_ledger import UsageLedger, opened_ledger
from tests.end_to_end.fleet_process import PATIENCE_S, wait_until
from tests.server.scheduling.fakes import make_request
from tests.server.scheduling.world import World
from tests.server.support.request_lives import FACTS, facts_of
from triolet.config import DAY_S, UsageConfig
from triolet.usage_database import (
    FILE_NAME,
    UsageRecord,
    open_usage_database,
    usage_by,
    write_records,
)

if TYPE_CHECKING:
    from pathlib import Path

ENDED = RequestEnded(FACTS, "stop", "decoding", Usage(100, 7, 64, reasoning_tokens=3), 0.5)
SOON = UsageConfig(interval_s=0.001, busy_s=0.001)


def opened(folder: Path) -> sqlite3.Connection:
    return open_usage_database(str(folder), SOON.busy_s, time.sleep)


def record_until_full(connection: sqlite3.Connection) -> None:
    smallest = UsageRecord(0.0, "", "", "", "", "", "", 0, 0, 0, None, None)
    while True:
        write_records(connection, [smallest], -1.0)


def num_recorded(folder: Path) -> int:
    return sum(row[1] for row in usage_by(str(folder), ["tenant"], since=0.0))


def has_recorded(folder: Path, count: int) -> bool:
    return num_recorded(folder) == count


def test_records_are_written_while_the_server_runs_and_the_last_ones_at_its_end(
    tmp_path: Path,
) -> None:
    for config, is_read_before_the_end in ((SOON, True), (UsageConfig(interval_s=1e6), False)):
        folder, events = tmp_path / str(is_read_before_the_end), RequestEvents()
        with opened_ledger(replace(config, directory=str(folder), batch_records=2)) as ledger:
            assert ledger is not None
            ledger.subscribe_to(events)
            for _ in range(5):
                events.publish(ENDED)
            if is_read_before_the_end:
                wait_until(
                    lambda folder=folder: num_recorded(folder) == 5, PATIENCE_S, "they are written"
                )
        assert num_recorded(folder) == 5
        assert ledger.dropped == 0


def test_a_full_disk_stops_no_request_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    connection = opened(tmp_path)
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {num_pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        record_until_full(connection)
    num_before, world = num_recorded(tmp_path), World()
    with capture_logs() as logs:
        ledger = UsageLedger(connection, replace(SOON, max_queued=40, batch_records=100))
        ledger.subscribe_to(world.events)
        for number in range(400):
            reader = world.submit(make_request(number, max_tokens=1))
            world.settle()
            assert reader.finished
        ledger.close()
    assert (ledger.dropped, num_recorded(tmp_path)) == (400, num_before)
    failures = [line for line in logs if line["event"] == "usage_ledger_failed"]
    assert [line["trouble"] for line in failures] == ["database or disk is full"]


def test_records_wait_for_a_database_that_is_locked(tmp_path: Path) -> None:
    ledger = UsageLedger(opened(tmp_path), SOON)
    events = RequestEvents()
    ledger.subscribe_to(events)
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        events.publish(ENDED)
        wait_until(lambda: ledger._trouble == "database is locked", PATIENCE_S, "it was tried")
        other.execute("ROLLBACK")
    wait_until(partial(has_recorded, tmp_path, 1), PATIENCE_S, "it is written")
    ledger.close()
    assert ledger.dropped == 0


def test_old_records_are_deleted_as_new_ones_are_written(tmp_path: Path) -> None:
    for days, expected in ((0, 4), (39, 8), (41, 8)):
        config = replace(SOON, retention_days=40)
        connection = opened(tmp_path)
        ledger, events = (
            UsageLedger(connection, config, lambda at=days: at * DAY_S),
            RequestEvents(),
        )
        ledger.subscribe_to(events)
        for _ in range(4):
            events.publish(ENDED)
        ledger.close()
        assert num_recorded(tmp_path) == expected


def test_the_command_sums_by_any_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events, named = RequestEvents(), ["usage", "--usage-dir", str(tmp_path)]
    with opened_ledger(replace(SOON, directory=str(tmp_path))) as ledger:
        assert ledger is not None
        ledger.subscribe_to(events)
        for tenant, nanos in (("alice", 5), ("alice", 1_500_000_000), ("bob", None)):
            cost = None if nanos is None else RequestCost(nanos)
            events.publish(replace(ENDED, facts=replace(FACTS, tenant=tenant), cost=cost))
        second = replace(facts_of(b"2"), prompt_id=b"1", tenant="bob")
        events.publish(replace(ENDED, facts=second, outcome="client_gone"))
    assert main([*named, "--by", "tenant,outcome", "--since", "1d", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tenant,outcome,requests,prompt,cached,completion,reasoning,price",
        "alice,stop,2,200,128,14,6,1.500000005",
        "bob,client_gone,1,0,0,7,3,0",
        "bob,stop,1,100,64,7,3,0",
    ]
    assert main([*named, "--by", "class,day"]) == 0
    assert "default" in capsys.readouterr().out
    for arguments, remedy in (
        ([*named, "--by", "colour"], "--by is 'colour'; allowed: tenant, model, version"),
        ([*named, "--since", "soon"], "--since is 'soon'; allowed: a number of s, m, h or d"),
        (["usage", "--usage-dir", str(tmp_path / "none")], "has no usage ledger: give"),
        (["usage"], "no usage ledger is named; give the --usage-dir"),
    ):
        assert main(arguments) == 2
        assert remedy in capsys.readouterr().err
