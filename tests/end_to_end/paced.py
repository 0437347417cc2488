"""Runs `triolet …` with slowed device steps for tests, as for a larger model on a GPU.

The demo model generates hundreds of tokens per second on all cores, so a stream that must last
until a process has restarted would be long and would take the cores from the new process. With slow
steps, few tokens suffice. Everything else is the product, including templates.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Final

from ops.template import SERVER_MODULES
from simulation.modelled import StepCost
from triolet.ids import Role
from triolet.units import MILLISECONDS

COMMAND: Final = (sys.executable, "-m", "tests.end_to_end.paced", "triolet")
"""Command that runs `triolet`; the last word is for process lists."""
STEP: Final = StepCost(50 * MILLISECONDS, 0.0, 0.0)
"""20 tokens/s per stream; the demo model computes for a tenth of this time."""


def run() -> int:
    """Run as a supervisor that starts paced workers, or as one of its processes."""
    from ops.cli import main
    from ops.supervisor import serve

    arguments = sys.argv[2:]
    setattr(serve, "command_line", lambda: COMMAND)  # noqa: B010
    if arguments[0] != Role.SERVER and SERVER_MODULES[0] not in arguments:
        # A worker, its template, or the supervisor, which forks the first template. Servers and
        # their template never load torch.
        from simulation.timed import TimedEngine
        from worker import entry

        engine = partial(TimedEngine, cost=STEP)
        setattr(entry, "LocalEngine", engine)  # noqa: B010
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())
