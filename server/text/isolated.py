"""Work of unknown cost in a child process that the kernel ends when it takes too much.

Only for helper processes with one thread, never for the server: a fork copies the locks that other
threads hold, but not the threads that would release them.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


_STDERR: Final = 2


def run_isolated(
    work: Callable[[], bytes], *, cpu_s: float, memory_bytes: int, max_bytes: int
) -> bytes | None:
    """Return what `work` returns in a child process; None if it raised or took too much.

    Waits until the child has ended, without a deadline: a child that gets no processor uses up none
    of its time. So the server ends a helper process that does not answer in time.

    Args:
      work: encodes the errors that it expects.
      cpu_s: processor time; the work may set a new limit with `limit_cpu`.
      memory_bytes: address space on top of what this process has.
      max_bytes: of the result.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Never returns into the code of its parent, whatever happens.
        status = 1
        try:
            os.close(reading)
            _limit(memory_bytes)
            limit_cpu(cpu_s)
            with open(writing, "wb") as pipe:
                pipe.write(work())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        result = pipe.read(max_bytes + 1)
    if len(result) > max_bytes:
        os.kill(child, signal.SIGKILL)
    _, wait_status = os.waitpid(child, 0)
    return result if wait_status == 0 and len(result) <= max_bytes else None


def limit_cpu(cpu_s: float) -> None:
    """Have the kernel end this process after so much more of processor time."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _limit(memory_bytes: int) -> None:
    """Have the kernel refuse this process memory, and keep it quiet."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a library that runs out of memory says on its way out is not logged.
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
