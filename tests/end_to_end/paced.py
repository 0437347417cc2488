"""Runs `triolet …` with slowed device steps for tests, as for a larger model on a GPU.

The demo model generates hundreds of tokens per second on all cores, so a stream that must last
until a process has restarted would be long and would take the cores from the new process. With slow
steps, few tokens suffice. Everything else is the product, including templates.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from ops.template import SERVER_MODULES
from simulation.modelled import StepCost
from triolet.ids import Role
from triolet.units import MILLISECONDS

COMMAND: Final = (sys.executable, "-m", "tests.end_to_end.paced", "triolet")
"""Command that runs `triolet`; the last word is for process lists."""
STEP: Final = StepCost(50 * MILLISECONDS, 0.0, 0.0)
"""20 tokens/s per stream; the demo model computes for a tenth of this time."""


HOLD: Final = "TRIOLET_TEST_HOLD"
"""Environment variable with the path of a file. While the file exists, a server that has computed
and charged a batch line appends its pid and a newline to it instead of storing the line."""
HOLD_POLL_S: Final = 0.01


def hold_lines(path: Path) -> None:
    """Hold batch lines; see `HOLD`."""
    from server.jobs.batches import Batches

    finish_line = Batches.finish_line

    def held(*arguments: Any, **named: Any) -> bool:  # noqa: ANN401
        if path.exists():
            with path.open("a") as file:
                file.write(f"{os.getpid()}\n")
        while path.exists():
            time.sleep(HOLD_POLL_S)
        return finish_line(*arguments, **named)

    setattr(Batches, "finish_line", held)  # noqa: B010


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
    if HOLD in os.environ:
        hold_lines(Path(os.environ[HOLD]))
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())
