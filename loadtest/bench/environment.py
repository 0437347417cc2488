"""Environments of peers: made once, with pip, where that is possible; never part of our own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ENVIRONMENTS: Final = Path(__file__).parents[2] / "build" / "bench" / "peers"
INSTALL_TIMEOUT_S: Final = 600.0


def python_of(name: str) -> Path:
    """Return the interpreter of an environment, which may not be there."""
    return ENVIRONMENTS / name / "bin" / "python"


def install(name: str, packages: Sequence[str]) -> str | None:
    """Make an environment unless it is complete already.

    Returns:
      Why it cannot be had; None if it is there.
    """
    complete = ENVIRONMENTS / name / "complete"
    wanted = "\n".join(packages)
    if complete.exists() and complete.read_text() == wanted:
        return None
    python = str(python_of(name))
    for command in (
        [sys.executable, "-m", "venv", str(ENVIRONMENTS / name)],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
    ):
        try:
            ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"its environment cannot be made: {error}"
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            return f"its environment cannot be made: {' '.join(last)}"
    complete.write_text(wanted)
    return None
