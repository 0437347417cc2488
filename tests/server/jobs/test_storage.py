"""Tests of the database of files and batches: each line gets one result, even if processes die or
compete."""

from __future__ import annotations

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest

from server.jobs.batches import Batches
from server.jobs.database import FILE_NAME, open_database
from server.jobs.records import (
    OPEN,
    TRANSITIONS,
    BatchRecord,
    BatchState,
    BatchStep,
    after,
    answer_line,
    check_file,
)
from server.jobs.storage import CONTENT_ROWS, Files
from triolet.config import BatchConfig
from triolet.errors import ConfigError, LocalProtocolError, RequestError
from triolet.sqlite import Journal, transaction

if TYPE_CHECKING:
    from pathlib import Path

    from server.jobs.records import WaitingLine

CONFIG = BatchConfig(max_lines=1000, max_files=20, max_total_bytes=1_000_000, lease_s=10.0)
URL = "/v1/completions"
NOW = 1_000
OK = b'{"ok": true}'


class Store:
    """One process's view of a directory."""

    def __init__(self, folder: Path, holder: str = "one", config: BatchConfig = CONFIG) -> None:
        self.connection = open_database(str(folder))
        self.files = Files(self.connection, config)
        self.batches = Batches(self.connection, config, holder)

    def begin(self, num_lines: int, batch_id: str = "batch_1", expires_at: int = 9_000) -> None:
        """Upload lines, create a batch and start it."""
        content = b"".join(line(n) for n in range(num_lines))
        self.files.add("", f"file-of-{batch_id}", "in.jsonl", "batch", content, NOW)
        self.batches.add("", record(batch_id, expires_at))
        assert self.batches.take_lease(NOW)
        self.batches.advance(NOW)

    def batch(self) -> BatchRecord:
        """Return the batch that was started."""
        batch = self.batches.get("batch_1")
        assert batch is not None
        return batch

    def answer(self, one: WaitingLine, *, is_good: bool = True) -> bool:
        result = answer_line(f"r{one.number}", one.custom_id, 200, "rid", OK)
        return self.batches.finish_line(one, result, NOW, is_good=is_good)

    def content(self, file_id: str | None) -> list[dict[str, object]]:
        assert file_id is not None
        parts, number = [], 0
        while part := self.files.content(file_id, number):
            parts.append(part)
            number += 1
        return [json.loads(text) for text in b"".join(parts).splitlines()]


def line(number: int, **changes: object) -> bytes:
    fields = {"custom_id": f"c{number}", "method": "POST", "url": URL, "body": {"prompt": "x"}}
    return json.dumps({**fields, **changes}).encode() + b"\n"


def record(batch_id: str, expires_at: int = 9_000) -> BatchRecord:
    file_id = f"file-of-{batch_id}"
    return BatchRecord(batch_id, BatchState.VALIDATING, URL, file_id, "24h", NOW, expires_at)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_each_line_is_answered_once_and_the_last_one_ends_the_batch(store: Store) -> None:
    count = 2 * CONTENT_ROWS + 5
    store.begin(count)
    lines = store.batches.waiting(count)
    assert [one.number for one in lines] == list(range(count))
    for one in reversed(lines):
        assert store.answer(one, is_good=one.number != 3)
        assert not store.answer(one)
    batch = store.batch()
    assert batch.status is BatchState.COMPLETED
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (count, count - 1, 1)
    good = store.content(batch.output_file_id)
    assert [told["custom_id"] for told in good] == [f"c{n}" for n in range(count) if n != 3]
    assert [told["custom_id"] for told in store.content(batch.error_file_id)] == ["c3"]


def test_another_process_goes_on_where_one_died(tmp_path: Path) -> None:
    first, second = Store(tmp_path, "one"), Store(tmp_path, "two")
    first.begin(4)
    mine = first.batches.waiting(4)
    assert first.answer(mine[0])
    assert not second.batches.take_lease(NOW + 5)
    assert second.batches.take_lease(NOW + 11)
    assert [one.number for one in second.batches.waiting(4)] == [1, 2, 3]
    assert not first.answer(mine[1]), "it lost the lease without noticing"
    assert not first.batches.take_lease(NOW + 12)
    assert all(second.answer(one) for one in second.batches.waiting(4))
    batch = first.batch()
    assert batch.status is BatchState.COMPLETED


def test_a_lease_that_is_given_back_is_anybodys(tmp_path: Path) -> None:
    first, second = Store(tmp_path, "one"), Store(tmp_path, "two")
    assert first.batches.take_lease(NOW)
    first.batches.give_lease_back()
    assert second.batches.take_lease(NOW)
    first.batches.give_lease_back()
    assert not first.batches.take_lease(NOW)


def test_a_clock_that_was_set_back_does_not_keep_a_dead_holders_lease(tmp_path: Path) -> None:
    first, second = Store(tmp_path, "one"), Store(tmp_path, "two")
    assert first.batches.take_lease(NOW + 100_000)
    assert second.batches.take_lease(NOW)


@pytest.mark.parametrize(
    ("now", "cancels", "status", "code"),
    [(9_001, False, "expired", "batch_expired"), (NOW, True, "cancelled", "batch_cancelled")],
)
def test_what_is_not_done_in_the_end_is_an_error(
    store: Store, now: int, cancels: bool, status: str, code: str
) -> None:
    store.begin(3)
    lines = store.batches.waiting(3)
    assert store.answer(lines[1])
    if cancels:
        cancelled = store.batches.cancel("", "batch_1", now)
        assert cancelled is not None
        assert cancelled.status is BatchState.CANCELLING
        assert not store.batches.is_wanted("batch_1")
    store.batches.advance(now)
    assert not store.answer(lines[0]), "too late"
    batch = store.batch()
    assert batch.status.value == status
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
    assert [told["custom_id"] for told in store.content(batch.output_file_id)] == ["c1"]
    told = store.content(batch.error_file_id)
    assert {one["error"]["code"] for one in told} == {code}  # type: ignore[index]
    with pytest.raises(RequestError, match=r"the batch batch_1 is "):
        store.batches.cancel("", "batch_1", now)


def test_lines_of_older_batches_go_first(store: Store) -> None:
    store.begin(2, "batch_b")
    store.begin(2, "batch_a")
    found = [(one.batch_id, one.number) for one in store.batches.waiting(3)]
    assert found == [("batch_b", 0), ("batch_b", 1), ("batch_a", 0)]
    assert [one.id for one in store.batches.page("", None, 1).items] == ["batch_a"]
    page = store.batches.page("", "batch_a", 5)
    assert ([one.id for one in page.items], page.has_more) == (["batch_b"], False)


def test_lines_whose_window_ends_first_go_first(store: Store) -> None:
    store.begin(1, "batch_long", expires_at=9_000)
    store.begin(1, "batch_short", expires_at=5_000)
    found = [(one.batch_id, one.expires_at) for one in store.batches.waiting(3)]
    assert found == [("batch_short", 5_000), ("batch_long", 9_000)]


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"", ["empty_file"]),
        (b"\n \n", ["empty_file"]),
        (b"{]\n", ["invalid_json_line"]),
        (line(1) + line(2) + line(1), ["duplicate_custom_id"]),
        (line(1, url="/v1/embeddings"), ["invalid_url"]),
        (line(1, method="GET") + line(2, body=[]), ["invalid_method", "invalid_body"]),
        (line(1, custom_id=""), ["invalid_custom_id"]),
        (line(1, body={"stream": True}), ["invalid_body"]),
        (b"[" * 100_000, ["invalid_json_line"]),
        (b"".join(map(line, range(12))), ["too_many_lines"]),
        (b"{}\n" * 500, ["invalid_custom_id"] * 100),
    ],
)
def test_a_file_that_cannot_be_run_says_why(content: bytes, codes: list[str]) -> None:
    assert [error.code for error in check_file(content, URL, max_lines=10).errors] == codes


def test_a_bad_file_fails_its_batch(store: Store) -> None:
    store.files.add("", "file-of-batch_1", "in.jsonl", "batch", b"{]\n", NOW)
    store.batches.add("", record("batch_1"))
    store.batches.advance(NOW)
    batch = store.batch()
    assert batch.status is BatchState.FAILED
    assert batch.errors is not None
    assert [error["line"] for error in batch.errors] == [1]
    assert batch.output_file_id is None


def test_a_file_in_use_is_kept_and_a_result_can_be_forgotten(store: Store) -> None:
    store.begin(1)
    with pytest.raises(RequestError, match=r"runs the file .*file-of-batch_1"):
        store.files.delete("", "file-of-batch_1")
    [one] = store.batches.waiting(1)
    assert store.answer(one)
    batch = store.batch()
    assert batch.output_file_id is not None
    assert store.files.delete("", "file-of-batch_1")
    assert store.files.delete("", batch.output_file_id)
    assert not store.files.delete("", batch.output_file_id)
    assert store.files.content(batch.output_file_id, 0) is None
    assert store.connection.execute("SELECT result FROM lines").fetchone()[0] is None


def test_another_tenants_things_are_not_there(store: Store) -> None:
    store.begin(1)
    [one] = store.batches.waiting(1)
    assert one.owner == ""
    assert store.answer(one)
    batch = store.batches.get("batch_1", "")
    assert batch is not None
    assert batch.output_file_id is not None
    for file_id in (batch.input_file_id, batch.output_file_id):
        assert store.files.get("", file_id) is not None
        assert store.files.get("other", file_id) is None
        assert not store.files.delete("other", file_id)
    assert store.files.page("other", None, 9, None).items == []
    assert store.batches.get("batch_1", "other") is None
    assert store.batches.cancel("other", "batch_1", NOW) is None
    assert store.batches.page("other", None, 9).items == []
    with pytest.raises(RequestError, match=r"there is no file .*file-of-batch_"):
        store.batches.add("other", record("batch_1"))


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    config = BatchConfig(max_files=3, max_total_bytes=100, max_open_batches=1)
    store = Store(tmp_path, config=config)
    store.files.add("", "file-of-batch_1", "a", "batch", b"x" * 60, NOW)
    with pytest.raises(RequestError, match="delete some"):
        store.files.add("", "file-of-batch_2", "a", "batch", b"x" * 60, NOW)
    store.files.add("", "file-of-batch_2", "a", "batch", b"x", NOW)
    store.batches.add("", record("batch_1"))
    with pytest.raises(RequestError, match="not ended"):
        store.batches.add("", record("batch_2"))
    with pytest.raises(RequestError, match=r"there is no file .*file-of-batch_"):
        store.batches.add("", record("batch_3"))


def test_every_step_is_in_the_table_or_an_error() -> None:
    for state in BatchState:
        for step in BatchStep:
            if step in TRANSITIONS[state]:
                assert after(state, step) is TRANSITIONS[state][step]
            else:
                with pytest.raises(LocalProtocolError):
                    after(state, step)
    assert set(OPEN) == {BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.CANCELLING}


def test_a_database_of_another_release_or_no_database_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with transaction(store.connection):
        store.connection.execute("PRAGMA user_version = 99")
    store.connection.close()
    with pytest.raises(ConfigError, match="version 99"):
        open_database(str(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE_NAME).write_bytes(b"no database at all, but long enough" * 100)
    with pytest.raises(ConfigError, match="cannot be used"):
        open_database(str(tmp_path / "other"))


def test_a_new_database_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_database, str(tmp_path))
        wait([opening], timeout=0.1)  # long enough to fail at once, if it does
        other.execute("COMMIT")
        opening.result().close()
    other.close()


def test_a_database_for_several_hosts_has_no_shared_memory(tmp_path: Path) -> None:
    open_database(str(tmp_path)).close()
    databases = [open_database(str(tmp_path), Journal.ROLLBACK) for _ in range(2)]
    for database in databases:
        assert database.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
        with transaction(database):
            database.execute("DELETE FROM lease")
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    for database in databases:
        database.close()


def test_no_tenant_takes_all_there_is(tmp_path: Path) -> None:
    config = BatchConfig(max_files=8, max_total_bytes=400, max_open_batches=4)
    store = Store(tmp_path, config=config)
    store.files.add("a", "file-of-batch_1", "a", "batch", b"x" * 50, NOW)
    with pytest.raises(RequestError, match="of yours"):
        store.files.add("a", "file-of-batch_2", "a", "batch", b"x" * 60, NOW)
    store.files.add("a", "file-of-batch_2", "a", "batch", b"x", NOW)
    with pytest.raises(RequestError, match="of yours"):
        store.files.add("a", "file-of-batch_3", "a", "batch", b"x", NOW)
    store.files.add("b", "file-of-batch_3", "b", "batch", b"x" * 90, NOW)
    store.batches.add("a", record("batch_1"))
    with pytest.raises(RequestError, match="1 of them yours"):
        store.batches.add("a", record("batch_2"))
    store.batches.add("b", record("batch_3"))
