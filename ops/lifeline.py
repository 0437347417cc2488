"""The end of a role process: it may not outlive the supervisor that started it, nor linger.

Two ropes. On Linux the kernel kills the process at the moment its parent dies; everywhere, a pipe
from the supervisor that reaches its end says the same. Knows nothing of what the role does.
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


def hold_on_to(supervisor_pid: int) -> None:
    """Make this process end when the supervisor does. Takes over stdin, the pipe from it."""
    if sys.platform == "linux":
        # SIGKILL, because a drain without workers and without anybody to report to helps nobody.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
        _prctl(PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def _prctl(option: int, argument: int | ctypes.Array[ctypes.c_char]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _die_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
