"""Tests of the wheel's contents, and of errors when other packages have the same names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Final

import pytest

from tests.house.test_layout import ROOT, imports_of, shown, sources
from triolet.entry import PACKAGES

from .tree import NOT_SHIPPED, SHIPPED, build_wheel, copy_tree, known_files, unpack

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S: Final = 60.0
OTHERS: Final = (*NOT_SHIPPED, "tests")
NAMED: Final = re.compile(r"\b(?:loadtest|tests|tools)\b")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_tree(folder / "source"), folder)


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """A folder with only Triolet installed."""
    return unpack(wheel, tmp_path / "site")


@pytest.mark.slow
def test_the_wheel_holds_the_product_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    top = {name.partition("/")[0] for name in names}
    (about,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {*SHIPPED, about}
    wanted = {name for name in known_files(*SHIPPED) if name.endswith(".py")}
    data = ("server/static", "triolet/demo", "triolet/slo")
    for folder in (*data, "ops/monitoring", "ops/deploy", "ops/kubernetes"):
        wanted |= set(known_files(folder))
    assert wanted <= names, wanted - names
    assert {name for name in names if name.endswith(".py")} <= wanted


def test_the_product_imports_neither_tests_nor_tools() -> None:
    wrong = [
        f"{shown(path)}:{line}"
        for path in sources(*SHIPPED)
        if NAMED.search(path.read_text(encoding="utf-8"))
        for line, module in imports_of(path)
        if module.split(".")[0] in OTHERS
    ]
    assert not wrong


def test_every_package_is_looked_after() -> None:
    assert {"triolet", *PACKAGES} == set(SHIPPED)
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == {*SHIPPED, *OTHERS}


def run_triolet(*path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command with these folders first on Python's path."""
    return subprocess.run(
        # Like the installed script; -P keeps the current folder off the path.
        [
            *(sys.executable, "-P", "-c"),
            "import sys; from triolet.entry import main; sys.exit(main())",
            "--version",
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def complaint(*path: Path, folder: Path) -> str:
    """Return the one error line of a failed start."""
    done = run_triolet(*path, folder=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("triolet: ")
    return line


@pytest.mark.slow
def test_an_installation_by_itself_starts(site: Path, tmp_path: Path) -> None:
    # A folder without __init__.py is ignored if a package comes later on the path.
    (tmp_path / "plain" / "server").mkdir(parents=True)
    done = run_triolet(tmp_path / "plain", site, folder=tmp_path)
    assert done.stdout.startswith("triolet 0."), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["server", "ops"])
def test_a_foreign_package_that_comes_first_is_named_with_both_paths(
    site: Path, tmp_path: Path, name: str
) -> None:
    foreign = tmp_path / "foreign" / name / "__init__.py"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("raise SystemExit('foreign code ran')\n")
    line = complaint(tmp_path / "foreign", site, folder=tmp_path)
    assert f"{foreign} shadows {site / name / '__init__.py'}" in line
    assert f"take {tmp_path / 'foreign'} off Python's path" in line


@pytest.mark.slow
def test_a_distribution_that_brings_the_package_is_named(site: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "acme_tools-1.0.dist-info").mkdir(parents=True)
    about = foreign / "acme_tools-1.0.dist-info"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tools\nVersion: 1.0\n")
    (about / "top_level.txt").write_text("worker\n")
    (foreign / "worker.py").write_text("")
    line = complaint(foreign, site, folder=tmp_path)
    assert f"{foreign / 'worker.py'} shadows" in line
    assert "(distribution acme-tools)" in line


def leave_behind(site: Path, release: str) -> None:
    """Add another release's records beside the installed ones, with its files replaced."""
    (installed,) = site.glob("triolet-0.1*.dist-info")
    left = site / f"triolet-{release}.dist-info"
    shutil.copytree(installed, left)
    record = (left / "RECORD").read_text(encoding="utf-8")
    of_another = re.sub(r"(/__init__\.py,sha256=)[^,]+", r"\g<1>of-another-release", record)
    assert of_another != record
    (left / "RECORD").write_text(of_another, encoding="utf-8")


@pytest.mark.slow
def test_the_records_of_other_releases_are_no_complaint(site: Path, tmp_path: Path) -> None:
    # Folders are listed in no order: one of these comes after the installed release's.
    for release in ("0.0.1", "0.0.2", "0.0.3", "9.0", "9.1", "9.2"):
        leave_behind(site, release)
    done = run_triolet(site, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    own = site / "server" / "__init__.py"
    own.write_text('"""Another server."""\n')
    assert f"{own} is not the file" in complaint(site, folder=tmp_path)


@pytest.mark.slow
def test_a_package_that_was_overwritten_or_removed_is_named(site: Path, tmp_path: Path) -> None:
    own = site / "server" / "__init__.py"
    own.write_text('"""Another server."""\n')
    line = complaint(site, folder=tmp_path)
    assert f"{own} is not the file that Triolet installed" in line
    assert "pip install --force-reinstall" in line
    own.unlink()
    assert f"{own} is missing" in complaint(site, folder=tmp_path)
