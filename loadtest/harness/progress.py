"""Print progress lines of benchmarks and campaigns unbuffered: stdout may be a pipe."""

from __future__ import annotations

import sys


def progress(line: str) -> None:
    """Print a line without waiting for a full buffer."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def announce(description: str | None) -> None:
    """Print the first paragraph of a program's description, before it measures anything."""
    assert description is not None, "python -OO removes docstrings"
    progress(" ".join(description.partition("\n\n")[0].split()))
