"""Test helper for the distribution's files: lists what git tracks, and copies it to a folder to
build in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Final

from tests.house.test_layout import ROOMS, ROOT

if TYPE_CHECKING:
    from pathlib import Path

NOT_SHIPPED: Final = ("loadtest", "tools")
"""Top-level packages that run from a checkout."""
SHIPPED: Final = tuple(room for room in ROOMS if room not in NOT_SHIPPED)
"""Those in the wheel."""
FILES: Final = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD_TIMEOUT_S: Final = 120.0


def known_files(*folders: str) -> list[str]:
    """Return the files below some folders that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def copy_tree(target: Path) -> Path:
    """Copy the sources of a distribution, and files it must leave out, to an empty folder."""
    for name in known_files(*FILES, *ROOMS, "tests/packaging"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    return target


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel without the compiled kernels and without a network."""
    program = f"from setuptools import build_meta as b; b.build_wheel({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        capture_output=True,
        text=True,
        # Without a compiler the installation leaves the kernels out.
        env=os.environ | {"CC": "false"},
        check=False,
        timeout=BUILD_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("triolet-*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel like an installer; return the folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
