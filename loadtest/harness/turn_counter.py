"""`triolet …` whose server counts the turns of its event loop; everything else is the product.

A turn is what the loop does between two looks for input and output: nobody else is heard meanwhile.
The product does not count its turns: two reads of a clock for each cost streams a percent.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

COMMAND: Final = (sys.executable, "-m", "loadtest.harness.turn_counter", "triolet")
"""What means `triolet`; the last word is for lists of processes."""
VARIABLE: Final = "LOADTEST_TURNS"
"""Names the file of the counts in the environment."""
_COUNTS: Final = struct.Struct("<Qddd")


class TurnCounts(NamedTuple):
    """What the loop of one server did since the last reset.

    Attributes:
      turns: of the loop.
      cpu_s: of its thread in the turn that took most of it.
      wall_s: that this turn lasted.
      longest_wall_s: that the longest turn lasted, other processes on its core included.
    """

    turns: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    longest_wall_s: float = 0.0


class TurnFile:
    """Counts of turns in memory that two processes share.

    Args:
      path: made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.touch()
        os.truncate(path, _COUNTS.size)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _COUNTS.size)

    def read(self) -> TurnCounts:
        """Return what was counted since the last reset."""
        return TurnCounts(*_COUNTS.unpack_from(self._memory))

    def write(self, counts: TurnCounts = TurnCounts()) -> None:  # noqa: B008 (it is a constant)
        """Note counts; none to begin again."""
        _COUNTS.pack_into(self._memory, 0, *counts)


class TurnCounter(trio.abc.Instrument):
    """Counts the turns of the loop that it is added to.

    Args:
      file: takes the counts.
    """

    def __init__(self, file: TurnFile) -> None:
        self._file = file
        self._cpu_s = self._wall_s = 0.0

    def after_io_wait(self, timeout: float) -> None:
        """Note that a turn begins."""
        del timeout
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        """Note that a turn ends."""
        del timeout
        cpu_s, wall_s = time.thread_time() - self._cpu_s, time.perf_counter() - self._wall_s
        seen = self._file.read()
        worst = (cpu_s, wall_s) if cpu_s > seen.cpu_s else (seen.cpu_s, seen.wall_s)
        longest_s = max(wall_s, seen.longest_wall_s)
        self._file.write(TurnCounts(seen.turns + 1, *worst, longest_s))


def run() -> int:
    """Become a supervisor, or one of its processes; the servers among them get a counter."""
    from ops.cli import main
    from ops.supervisor import serve

    run_loop = trio.run

    def run_counted(process: Callable[..., Any], *arguments: object) -> object:
        is_server = process.__module__ == "server.main"
        path = Path(os.environ[VARIABLE])
        counters = [TurnCounter(TurnFile(path))] if is_server else []
        return run_loop(process, *arguments, instruments=counters)

    # Templates are forked from here.
    setattr(trio, "run", run_counted)  # noqa: B010
    setattr(serve, "command_line", lambda: COMMAND)  # noqa: B010
    return main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(run())
