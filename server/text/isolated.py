"""Runs work of unknown cost in a child process with CPU and memory limits set by the kernel.

Only for single-threaded helper processes, never for the server: a fork copies locks held by other
threads, but not the threads that would release them.
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
    """Return the result of `work` from a child process; None if it raised or exceeded a limit.

    Waits for the child without a deadline, because a child that gets no CPU uses none of its limit.
    The server terminates a helper process that does not answer in time.

    Args:
      work: must encode the errors that it expects.
      cpu_s: CPU time limit; the work may set a new one with `limit_cpu`.
      memory_bytes: address space beyond what this process has.
      max_bytes: maximum size of the result.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Must never return into the parent's code, whatever happens.
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
    """Make the kernel kill this process after this much more CPU time."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _limit(memory_bytes: int) -> None:
    """Set the memory limit, and silence stderr."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Do not log the message of a library that runs out of memory.
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
