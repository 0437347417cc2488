"""Tests of control's accounts: worker-seconds, the journal of operations, and memory
measurement."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest

from ops.control import journal as journals
from ops.control import memory
from ops.control.journal import FILE_NAME, KEPT_OPERATIONS, opened_journal
from ops.control.memory import budget_bytes, expected_bytes, forget_pages, held_bytes
from ops.control.models import Model
from ops.control.operations import Operation, OperationStatus, WantedState
from ops.control.worker_seconds import OTHERS, VERSIONS_TOLD, SecondsAccount, Version
from transport.control_protocol import MAX_MESSAGE_BYTES, ModelNews, Models, ModelState, encoded
from triolet.config import ControlConfig, ControlledModelConfig
from triolet.errors import ConfigError
from triolet.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

CHAT_1, CHAT_2, CODE = Version("chat", "sha256:1"), Version("chat", "sha256:2"), Version("code", "")

FILE_BYTES, OWN_BYTES = 24 * MIB, 16 * MIB
FORKING = """
import mmap, os, signal, sys, time
path, file_bytes, own_bytes = sys.argv[1], *map(int, sys.argv[2:])
inherited = b"x" * (64 << 20)
pids = []
for _ in range(3):
    read, write = os.pipe()
    pids.append(os.fork())
    if not pids[-1]:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), file_bytes, prot=mmap.PROT_READ)
        own = b"y" * own_bytes
        mapped.find(b"z")  # touches every page
        os.write(write, b"r")
        time.sleep(60)
        os._exit(0)
    os.read(read, 1)
print(*pids, flush=True)
sys.stdin.read()
for pid in pids:
    os.kill(pid, signal.SIGKILL)
"""
"""Prints the pids of three processes like workers: each has inherited pages, a shared mapped file
and private pages."""
SPAWNED = """\
7f0000000000-7f0000100000 r--p 00000000 fe:01 11 /lib/libtorch_cpu.so
Private_Clean:       400 kB
7f0000100000-7f0000200000 r-xp 00100000 fe:01 11 /lib/libtorch_cpu.so
Private_Clean:      1000 kB
7f0000200000-7f0000300000 rw-p 00200000 fe:01 11 /lib/libtorch_cpu.so
Private_Dirty:        20 kB
7f0000300000-7f0000400000 r--s 00000000 fe:01 12 /models/a\fPrivate_Dirty: b/model.safetensors
Private_Clean:       300 kB
7f0000400000-7f0000500000 rwxp 00000000 00:00 0
Private_Clean:         1 kB
Private_Dirty:         4 kB
VmFlags: rd wr ex mr mw me ac
"""
"""smaps of a spawned worker. No other process maps its libraries."""


def test_workers_that_went_on_with_another_version_are_counted_once() -> None:
    account = SecondsAccount()
    for told in ({CHAT_1: 100.0}, {CHAT_2: 110.0}, {CHAT_1: 130.0}, {CHAT_1: 130.0}):
        account.note("run", told)
    assert account.seconds() == {CHAT_1: 120.0, CHAT_2: 10.0}
    account.note("next", {CHAT_1: 5.0})
    assert account.seconds() == {CHAT_1: 125.0, CHAT_2: 10.0}


def test_seconds_of_a_version_are_added_over_fleets() -> None:
    account = SecondsAccount()
    account.note("first", {CHAT_1: 3.0, CODE: 1.0})
    account.note("first", {CHAT_1: 5.0, CODE: 1.5})
    account = SecondsAccount(account.known)  # another process of control, the same supervisor
    account.note("first", {CHAT_1: 6.0, CODE: 2.0})
    assert account.seconds() == {CHAT_1: 6.0, CODE: 2.0}
    account.note("second", {CHAT_2: 0.5, CODE: 1.0})
    account.note("third", {CHAT_2: 0.25, CODE: 0.0})
    assert account.seconds() == {CHAT_1: 6.0, CHAT_2: 0.75, CODE: 3.0}
    assert {run for run, _ in account.known} == {"", "third"}, "it does not grow with fleets"


def test_seconds_of_a_model_that_was_dropped_are_kept_when_it_is_added_again() -> None:
    account = SecondsAccount()
    account.note("run", {CHAT_1: 3.0, CODE: 5.0})
    for _ in range(2):
        account.note_dropped(lambda name: name != "code")
    account.note("run", {CHAT_1: 4.0})
    account.note("run", {CHAT_1: 4.0, CODE: 1.0})
    account.note("run", {CHAT_1: 4.0, CODE: 2.0})
    assert account.seconds() == {CHAT_1: 4.0, CODE: 7.0}


def test_servers_are_told_of_the_last_versions_in_a_line_that_they_take() -> None:
    models, versions = 1000, VERSIONS_TOLD + 3
    account = SecondsAccount()
    for run in range(versions):
        told = {Version(f"m{n}", f"sha256:{run:064x}"): 1e6 / 3 for n in range(models)}
        account.note(str(run), told)
    again = Version("m0", f"sha256:{0:064x}")
    account.note("again", {again: 1.0})
    seconds = account.by_model()
    assert {len(one) for one in seconds.values()} == {VERSIONS_TOLD + 1}
    sums: dict[str, float] = {}
    for version, its_s in account.seconds().items():
        sums[version.model] = sums.get(version.model, 0.0) + its_s
    for name, of_model in seconds.items():
        assert sum(of_model.values()) == pytest.approx(sums[name]), "none is left out of the sum"
    assert seconds["m1"].pop(OTHERS) == pytest.approx(3 * 1e6 / 3), "three versions"
    assert seconds["m0"][again.digest] == pytest.approx(1e6 / 3 + 1.0), "it runs now"
    assert list(seconds["m1"]) == [f"sha256:{run:064x}" for run in range(versions)][-VERSIONS_TOLD:]
    news = [
        ModelNews(f"m{n}".ljust(200, "x"), "x" * 71, ModelState.SERVING, 0.0, 1, seconds[f"m{n}"])
        for n in range(models)
    ]
    assert len(encoded(Models(tuple(news)))) <= MAX_MESSAGE_BYTES


def test_the_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    config = ControlledModelConfig("chat", "/models/chat", "sha256:1")
    model = Model(config, ModelState.SLEEPING, 77, 0.0, 0.0, 0.0, is_guess=False)
    guess = Model(replace(config, name="code"), ModelState.STAGED, 88, 0.0, 0.0, 0.0)
    done = Operation(
        "1", "chat", WantedState.LOAD, "user:me", 5.0, OperationStatus.DONE, "chat is ready"
    )
    live = Operation(
        "2", "chat", WantedState.SLEEP, "memory", 6.0, OperationStatus.RUNNING, "draining"
    )
    account = SecondsAccount()
    account.note("run", {CHAT_1: 4.0})
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
        assert past.sizes == {"chat": 77}, "guesses are made again"
        assert past.load_times == {("chat", ModelState.STAGED): 1.5}
        assert journal.operation("1") == done
        assert journal.operation("3") is None
        assert journal.account().known == account.known
        assert journal.past({"chat": "sha256:2"}).sizes == {}


def test_the_journal_keeps_the_last_operations_and_every_unfinished_one(tmp_path: Path) -> None:
    with opened_journal(tmp_path) as journal:
        live = Operation("live", "chat", WantedState.LOAD, "request", 0.0)
        journal.write([live], [], {})
        for number in range(KEPT_OPERATIONS + 2):
            one = Operation(
                str(number), "chat", WantedState.LOAD, "request", 0.0, OperationStatus.FAILED
            )
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
        pytest.raises(ConfigError, match=r"has version 9.*set another control.state_dir"),
        opened_journal(tmp_path),
    ):
        pass
    (tmp_path / FILE_NAME).write_text("no database at all, but some words " * 100)
    with pytest.raises(ConfigError, match="cannot be used"), opened_journal(tmp_path):
        pass
    assert (tmp_path / FILE_NAME).read_text().startswith("no database")


def test_one_fleet_at_a_time_has_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "BUSY_S", 0.01)
    with (
        opened_journal(tmp_path),
        pytest.raises(ConfigError, match=r"is locked; .*stop the fleet that has it open"),
        opened_journal(tmp_path),
    ):
        pass
    with opened_journal(tmp_path) as journal:
        journal.write([Operation("one", "chat", WantedState.LOAD, "request", 0.0)], [], {})
        assert journal.operation("one") is not None


def test_a_model_holds_its_own_pages_and_its_files_once(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(FILE_BYTES))
    command = [sys.executable, "-c", FORKING, str(weights), str(FILE_BYTES), str(OWN_BYTES)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as template:
        assert template.stdin is not None
        assert template.stdout is not None
        pids = [int(pid) for pid in template.stdout.readline().split()]
        alone, both = held_bytes(pids[:1]), held_bytes(pids[:2])
        three = held_bytes([*pids, 2**22 + 1])
        template.stdin.close()
    # Some pages of the interpreter are copied at the first write.
    little = 4 * MIB
    assert FILE_BYTES + OWN_BYTES <= alone < FILE_BYTES + OWN_BYTES + little
    assert FILE_BYTES + 2 * OWN_BYTES <= both < FILE_BYTES + 2 * (OWN_BYTES + little)
    assert FILE_BYTES + 3 * OWN_BYTES <= three < FILE_BYTES + 3 * (OWN_BYTES + little)


def test_libraries_that_only_one_process_maps_are_no_memory_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps").write_text(SPAWNED)
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert held_bytes([7]) == (20 + 300 + 1 + 4) * KIB


def test_a_budget_has_the_weights_that_are_mapped_once_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File pages count as available memory."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps").write_text(SPAWNED)
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1000 * KIB)
    config = ControlConfig(memory_share=1.0)
    assert budget_bytes(config, []) == 1000 * KIB
    assert budget_bytes(config, [7]) == (1000 + 20 + 1 + 4) * KIB


def test_what_a_model_will_hold_is_guessed_from_its_files(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(5000))
    (tmp_path / "config.json").write_text("{}")
    small = ControlledModelConfig("chat", str(tmp_path), num_workers=2, pool_bytes=7)
    none = ControlledModelConfig("chat", str(tmp_path / "none"), num_workers=2, pool_bytes=7)
    assert expected_bytes(small) - expected_bytes(none) == 5000
    assert expected_bytes(replace(small, adapter_bytes=90)) - expected_bytes(small) == 90
    forget_pages(small)
    assert weights.read_bytes() == bytes(5000)
