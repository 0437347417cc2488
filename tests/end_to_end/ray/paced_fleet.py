"""Runs `triolet …`; what it starts on Ray has slowed device steps (paced.py)."""

from __future__ import annotations

import sys

from ops.cli import main
from ops.targets import ray_target
from tests.end_to_end import paced

if __name__ == "__main__":
    setattr(ray_target, "COMMAND", paced.COMMAND)  # noqa: B010
    sys.exit(main(sys.argv[1:]))
