"""`triolet …` whose device steps take as long as those of a model of some size on a GPU.

The demo model says hundreds of tokens a second on all cores that there are: a stream that is to
last until a process has been restarted needs a thousand of them, and keeps the new process from a
core. On a device that takes its time it needs few. Everything else is the product, templates
included.
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
"""What means `triolet`; the last word is for lists of processes."""
STEP: Final = StepCost(50 * MILLISECONDS, 0.0, 0.0)
"""Twenty tokens a second of each stream, of which the demo model computes a tenth of the time."""


def run() -> int:
    """Become a supervisor that starts paced workers, or one of its processes."""
    from ops.cli import main
    from ops.supervisor import serve

    arguments = sys.argv[2:]
    setattr(serve, "command_line", lambda: COMMAND)  # noqa: B010
    if arguments[0] != Role.SERVER and SERVER_MODULES[0] not in arguments:
        # A worker, its template, or the supervisor, which forks the first one. They load torch,
        # which a server and its template never do.
        from simulation.timed import TimedEngine
        from worker import entry

        engine = partial(TimedEngine, cost=STEP)
        setattr(entry, "LocalEngine", engine)  # noqa: B010
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())
