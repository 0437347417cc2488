"""What a process sets for itself: its end with its supervisor's, its name, how its threads wait.

Imports the standard library alone: templates, and each process that holds on to another, import it.
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
    """Make this process end when the supervisor does. Takes over stdin, the pipe from it."""
    if sys.platform == "linux":
        # SIGKILL, because a drain without workers and without anybody to report to helps nobody.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:
        # It died before we asked to be told.
        os._exit(1)
    threading.Thread(target=_die_at_end_of_stdin, name="lifeline", daemon=True).start()


def leave() -> NoReturn:
    """End the process at once, as one that has done everything it had to do.

    Python takes itself apart before it ends, and with torch loaded that takes two to three seconds
    in which the worker is gone for its servers and still there for whoever waits for its end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def show_name(name: str) -> None:
    """Let `top` and `ps -o comm` show this name instead of `python`; 15 bytes are shown."""
    if sys.platform == "linux":
        prctl(PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def prctl(option: int, argument: int | ctypes.Array[ctypes.c_char]) -> None:
    """Call prctl(2).

    Raises:
      OSError: as the call does.
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
"""Looks, some tens of microseconds in all. By default a thread looks for milliseconds before it
gives its core away, also where the one that it waits for needs that very core: beside one busy
neighbour on two cores a step of 8 ms, which has a hundred such meetings, then took 390 ms, and
takes 12. The price: with cores to itself a short step of two threads takes about a tenth longer."""


def spin_briefly() -> None:
    """Let threads sleep soon. To be called before anything loads the library, which reads it then
    and never again."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
