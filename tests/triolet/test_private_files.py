"""Tests of private files: new ones are readable by their owner only, and existing ones with wider
permissions are tightened or refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import pytest

from server.jobs.database import FILE_NAME, open_database
from server.tenants.memory_store import Spend, SpendFile
from triolet.errors import ConfigError
from triolet.private_files import keep_private

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

MONTH, NOW = "2026-01", 1_767_312_000.0
KEEP_S = 3600.0


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Set the umask for a while."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def assert_private(top: Path) -> None:
    """Assert that a folder and its contents give no rights to others."""
    found = [top, *top.rglob("*")]
    assert len(found) > 1
    assert [(path, oct(mode_of(path))) for path in found if mode_of(path) & 0o077] == []


def use(connection: sqlite3.Connection) -> None:
    """Make SQLite create its journal files."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS used (n INTEGER)")
    connection.execute("INSERT INTO used VALUES (1)")


@pytest.mark.parametrize("mask", [0o022, 0o000], ids=oct)
def test_databases_and_what_lies_beside_them_are_private(mask: int, tmp_path: Path) -> None:
    top = tmp_path / "top"
    with umask(mask):
        with closing(open_database(str(top / "jobs"))) as jobs:
            use(jobs)
            assert (top / "jobs" / f"{FILE_NAME}-wal").exists()
            assert_private(top)
        spent = SpendFile(str(top / "accounts" / "spend.sqlite3"), KEEP_S)
        with closing(spent):
            use(spent._connection)
            assert (top / "accounts" / "spend.sqlite3-journal").exists()
            assert_private(top)


@pytest.mark.parametrize("mask", [0o022, 0o000], ids=oct)
def test_whatever_a_process_makes_after_its_start_is_private(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        keep_private()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").touch()
        assert_private(tmp_path / "folder")


@pytest.mark.slow
def test_a_role_started_by_itself_makes_private_files(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from ops.role_process import run_role\n"
        "from triolet.config import ProcessConfig\n"
        "os.umask(0)\n"
        "run_role('server', 'server', ProcessConfig('error'), lambda: Path(sys.argv[1]).touch())"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "file")], check=True)
    assert_private(tmp_path)


def test_wide_files_of_an_earlier_release_are_tightened_with_their_content(tmp_path: Path) -> None:
    folder = tmp_path / "accounts"
    with umask(0o022):
        folder.mkdir()
        path = folder / "spend.sqlite3"
        with closing(SpendFile(str(path), KEEP_S)) as spent:
            spent.add({(MONTH, "alice"): {"": Spend(5, 1)}}, NOW)
        path.chmod(0o644)
        journal = folder / "spend.sqlite3-journal"
        journal.touch()
        journal.chmod(0o664)
        with closing(SpendFile(str(path), KEEP_S)) as spent:
            assert spent.add({}, NOW)[1] == {(MONTH, "alice"): Spend(5, 1)}
        assert mode_of(path) == 0o600
        assert not journal.exists() or mode_of(journal) == 0o600
        assert mode_of(folder) == 0o755, "the operator's"


def test_a_wide_folder_of_the_database_alone_is_tightened_and_another_is_refused(
    tmp_path: Path,
) -> None:
    alone = tmp_path / "alone"
    open_database(str(alone)).close()
    alone.chmod(0o755)
    open_database(str(alone)).close()
    assert mode_of(alone) == 0o700

    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "of another user").touch()
    with pytest.raises(ConfigError, match="mode 1777 and holds other files too: `chmod 700"):
        open_database(str(shared))
    assert mode_of(shared) == 0o1777
    assert not (shared / FILE_NAME).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_a_wide_file_of_another_user_is_refused() -> None:
    with NamedTemporaryFile(dir="/tmp", suffix=".sqlite3") as made:  # where others can enter
        path = Path(made.name)
        path.chmod(0o666)
        os.seteuid(65534)
        try:
            with pytest.raises(ConfigError, match="mode 0666 and is another user's"):
                SpendFile(str(path), KEEP_S)
        finally:
            os.seteuid(0)
        assert path.stat().st_size == 0, "nothing was written there"
