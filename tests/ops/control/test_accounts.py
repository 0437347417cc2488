"""Worker-seconds, and what the journal keeps."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.control.journal import FILE_NAME, KEPT_OPERATIONS, opened_journal
from ops.control.memory import expected_bytes, forget_pages, held_bytes, start_of
from ops.control.models import Model
from ops.control.operations import Operation, Status, Wanted
from ops.control.process import uptime_s
from ops.control.worker_seconds import Account, Running
from triolet.config import ControlledModelConfig
from triolet.control_protocol import ModelState
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = (("chat", "sha256:1"), ("chat", "sha256:2"), ("code", ""))
LOOK_S = 0.5
AROUND = (-LOOK_S, 0.0, LOOK_S)
"""Looks around an event; those between events change nothing but the last sight."""
LIVES = st.lists(
    st.tuples(
        st.sampled_from(VERSIONS),
        st.floats(0.0, 5_000.0),
        st.floats(600.0, 5_000.0),
    ),
    min_size=1,
    max_size=12,
)


@given(LIVES, st.integers(1, 19_000))
def test_the_seconds_of_versions_are_those_of_their_processes(
    recorded: list[tuple[tuple[str, str], float, float]], restart: int
) -> None:
    """Processes as recorded: version, start, length. Looks are half a second apart, and the journal
    hands the account to another process of control in between."""
    account = Account()
    events = {at for _, began, length in recorded for at in (began, began + length)}
    looks = sorted({at // LOOK_S * LOOK_S + after for at in events for after in AROUND})
    for number, now in enumerate(looks):
        running = [
            Running(pid, began, *version)
            for pid, (version, began, length) in enumerate(recorded)
            if began <= now < began + length
        ]
        account.see(running, now)
        if number == restart % len(looks):
            account = Account(account.ended, account.lives)
    whole = sum(length for _, _, length in recorded)
    assert sum(account.seconds().values()) == pytest.approx(whole, rel=0.001)
    for version in VERSIONS:
        own = sum(length for one, _, length in recorded if one == version)
        assert account.seconds().get(version, 0.0) == pytest.approx(own, rel=0.001)


def test_the_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    config = ControlledModelConfig("chat", "/models/chat", "sha256:1")
    model = Model(config, ModelState.SLEEPING, 77, 0.0, 0.0, 0.0, is_guess=False)
    guess = Model(replace(config, name="code"), ModelState.STAGED, 88, 0.0, 0.0, 0.0)
    done = Operation("1", "chat", Wanted.LOAD, "user:me", 5.0, Status.DONE, "chat is ready")
    live = Operation("2", "chat", Wanted.SLEEP, "memory", 6.0, Status.RUNNING, "draining")
    account = Account()
    account.see([Running(7, 1.0, "chat", "sha256:1"), Running(8, 2.0, "chat", "sha256:1")], 3.0)
    account.see([Running(8, 2.0, "chat", "sha256:1")], 4.0)
    with opened_journal(tmp_path) as journal:
        live.progress = "accepted"
        journal.write([done, live], [model], {("chat", ModelState.STAGED): 1.5})
        live.progress = "draining"
        journal.write([live], [model, guess], {})
        journal.write_account(account)
    with opened_journal(tmp_path) as journal:
        past = journal.past({"chat": "sha256:1", "code": "sha256:1"})
        assert past.unfinished == [live]
        assert past.states == {"chat": ModelState.SLEEPING, "code": ModelState.STAGED}
        assert past.sizes == {"chat": 77}, "guesses are made anew"
        assert past.load_times == {("chat", ModelState.STAGED): 1.5}
        assert journal.operation("1") == done
        assert journal.operation("3") is None
        assert journal.account().seconds() == account.seconds() == {("chat", "sha256:1"): 4.0}
        assert journal.past({"chat": "sha256:2"}).sizes == {}


def test_the_journal_keeps_the_last_operations_and_every_unfinished_one(tmp_path: Path) -> None:
    with opened_journal(tmp_path) as journal:
        live = Operation("live", "chat", Wanted.LOAD, "request", 0.0)
        journal.write([live], [], {})
        for number in range(KEPT_OPERATIONS + 2):
            one = Operation(str(number), "chat", Wanted.LOAD, "request", 0.0, Status.FAILED)
            journal.write([one], [], {})
        kept = [journal.operation(name) is not None for name in ("live", "0", "1", "2", "1001")]
    assert kept == [True, False, False, True, True]


def test_a_journal_of_another_kind_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with opened_journal(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute("PRAGMA user_version = 9")
    with (
        pytest.raises(ConfigError, match=r"is of version 9.*give another control.state_dir"),
        opened_journal(tmp_path),
    ):
        pass
    (tmp_path / FILE_NAME).write_text("no database at all, but some words " * 100)
    with pytest.raises(ConfigError, match="cannot be used"), opened_journal(tmp_path):
        pass
    assert (tmp_path / FILE_NAME).read_text().startswith("no database")


def test_memory_and_start_of_a_process_are_as_the_kernel_says(tmp_path: Path) -> None:
    now = uptime_s()
    began = start_of(os.getpid(), now)
    assert began is not None
    assert 0.0 < began <= now
    assert start_of(2**22 + 1, now) is None
    assert 1 << 20 < held_bytes([os.getpid(), 2**22 + 1]) < 1 << 40
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(5000))
    (tmp_path / "config.json").write_text("{}")
    small = ControlledModelConfig("chat", str(tmp_path), num_workers=2, pool_bytes=7)
    none = ControlledModelConfig("chat", str(tmp_path / "none"), num_workers=2, pool_bytes=7)
    assert expected_bytes(small) - expected_bytes(none) == 5000
    forget_pages(small)
    assert weights.read_bytes() == bytes(5000)
