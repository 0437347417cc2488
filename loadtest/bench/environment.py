"""Environments of peers: made once, with pip, where that is possible; never part of our own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ENVIRONMENTS: Final = Path(__file__).parents[2] / "build" / "bench" / "peers"
STEP_TIMEOUT_S: Final = 600.0
_PIP: Final = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def python_of(name: str) -> Path:
    """Return the interpreter of an environment, which may not be there."""
    return ENVIRONMENTS / name / "bin" / "python"


def why_not(name: str) -> str | None:
    """Return why an environment is not there, or None if it is."""
    if (ENVIRONMENTS / name / "complete").exists():
        return None
    failed = ENVIRONMENTS / name / "failed"
    if failed.exists():
        return failed.read_text()
    return f"not installed: make bench-peers (no {ENVIRONMENTS.name}/{name})"


def install(
    name: str,
    packages: Sequence[str],
    *,
    unwanted: Sequence[str] = (),
    timeout_s: float = STEP_TIMEOUT_S,
) -> str | None:
    """Make an environment unless it is complete already.

    Args:
      name: of its folder.
      packages: what pip is to install, its options included.
      unwanted: packages that come along and are taken out again.
      timeout_s: of each step.

    Returns:
      Why it cannot be had; None if it is there.
    """
    complete, failed = (ENVIRONMENTS / name / file for file in ("complete", "failed"))
    wanted = "\n".join(packages)
    if complete.exists() and complete.read_text() == wanted:
        return None
    python = str(python_of(name))
    commands = [
        [sys.executable, "-m", "venv", str(ENVIRONMENTS / name)],
        [python, *_PIP, "install", *packages],
        *([[python, *_PIP, "uninstall", "--yes", *unwanted]] if unwanted else []),
    ]
    for command in commands:
        reason = _run(command, timeout_s)
        if reason is not None:
            if failed.parent.is_dir():
                failed.write_text(reason)
            return reason
    failed.unlink(missing_ok=True)
    complete.write_text(wanted)
    return None


def _run(command: list[str], timeout_s: float) -> str | None:
    try:
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its environment cannot be made: {error}"
    if done.returncode == 0:
        return None
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return f"its environment cannot be made: {' '.join(errors[-1:])}"
