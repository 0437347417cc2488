"""Settings of the current process: exit with its supervisor, its name, and how its threads wait.

Imports only the standard library, because every process of a fleet imports it first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import Final, NoReturn

PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36


def hold_on_to(supervisor_pid: int) -> None:
    """Make this process exit when the supervisor does. Takes over stdin, a pipe from it."""
    if sys.platform == "linux":
        # SIGKILL, because draining is useless without the other processes.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:
        # The supervisor ended before the call above.
        os._exit(1)
    threading.Thread(target=_die_at_end_of_stdin, name="lifeline", daemon=True).start()


def leave() -> NoReturn:
    """Exit at once with code 0, skipping Python's teardown.

    With torch loaded, the teardown takes two to three seconds, in which the worker no longer serves
    but its supervisor still waits for it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def show_name(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show instead of `python` (at most 15 bytes)."""
    if sys.platform == "linux":
        prctl(PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def prctl(option: int, argument: int | ctypes.Array[ctypes.c_char]) -> None:
    """Call prctl(2).

    Raises:
      OSError: the call failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _die_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


SPIN_COUNT: Final = "1000"
"""Spin iterations of OpenMP threads at a barrier: some tens of microseconds. By default they spin
for milliseconds, even if the thread that they wait for needs their core. With one busy neighbour on
two cores, a step of 8 ms, which has a hundred barriers, took 390 ms with the default and takes 12
ms with this. On free cores, a short step of two threads takes about 10 % longer."""


def spin_briefly() -> None:
    """Limit spinning of OpenMP threads. Call it before libgomp is loaded, which reads the variable
    once."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
