"""Template processes: each has imported what a role needs and forks processes of it on request.

A worker's imports take two seconds of a core, a fork takes some ten milliseconds. A request is one
datagram on a Unix socket with the descriptors that the new process gets, its answer one datagram.
The new process belongs to the supervisor, not to the template: it is forked twice, and what is left
without a parent goes to the nearest subreaper, which the supervisor is. Linux only.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
from setproctitle import setproctitle

from .own_process import PR_SET_PDEATHSIG, prctl, spin_briefly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Run = Callable[[Sequence[str]], int]
    """Runs the command `triolet` with these arguments and returns its exit code."""

SERVER_MODULES: Final = (
    "server.main",
    "engine.preflight.check",
    "ops.cli.commands",
    "ops.models.model_directory",
    "ops.models.stored",
    "ops.role_process",
    "ops.settings.sources",
)
WORKER_MODULES: Final = (
    "decode.worker",
    "prefill.worker",
    "ops.cli.commands",
    "ops.models.model_directory",
    "ops.models.stored",
    "ops.role_process",
    "ops.settings.sources",
)
"""What processes of a role import; a module that is missing here costs each of them its import."""

MAX_REQUEST_BYTES: Final = 64 * 1024
"""Arguments and environment of a process; settings go through its standard input."""
MAX_DESCRIPTORS: Final = 64
"""Standard streams and listening sockets of one process; the kernel admits 253."""
STANDARD_STREAMS: Final = (0, 1, 2)
ADOPTION_POLL_S: Final = 0.0005
"""Between two looks whether the process between template and child is gone; it ends at once."""
ADOPTION_DEADLINE_S: Final = 10.0
"""Longest wait for it, on a machine that stands still."""


class ForkRequest(msgspec.Struct, frozen=True):
    """What to start.

    Attributes:
      title: what lists of processes show as its command line.
      arguments: of the command `triolet`.
      env: added to the template's environment.
      cores: CPU cores that it may use; none for all of the template's.
      pass_fds: numbers of the descriptors that follow standard input, output and error.
      has_input: settings follow on its standard input; it ends at once if that is closed first.
    """

    title: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    cores: tuple[int, ...]
    pass_fds: tuple[int, ...]
    has_input: bool


class ForkAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of a request.

    Attributes:
      pid: of the new process; None if there is none.
      error: why there is none.
    """

    pid: int | None = None
    error: str = ""


def run_template(requests: socket.socket, modules: Sequence[str], run: Run) -> NoReturn:
    """Import modules, then fork a process for each request until the other end is closed.

    The calling process may have one thread only, and keeps nothing but the socket and stderr.

    Args:
      requests: one end of a pair of SOCK_SEQPACKET sockets.
      modules: to import before the first request.
      run: what each forked process does.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Before the libraries are loaded, which read both then. NumPy's own threads would have to be
    # ended before each fork, and no step multiplies matrices with NumPy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    spin_briefly()
    setproctitle(f"triolet template {' '.join(modules[:1])}")
    # What imports make stays: to look for garbage among it takes an eighth of their time.
    gc.disable()
    for module in modules:
        import_module(module)
    # Objects of now are never looked at again: a collection in a child would copy their pages.
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        message, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        request = msgspec.json.decode(message, type=ForkRequest)
        try:
            answer = ForkAnswer(_fork(request, fds, requests, run))
        except OSError as error:
            answer = ForkAnswer(error=str(error))
        for fd in fds:
            os.close(fd)
        requests.send(msgspec.json.encode(answer))


def _fork(request: ForkRequest, fds: Sequence[int], requests: socket.socket, run: Run) -> int:
    """Fork a process that has no parent here, and return its pid.

    Raises:
      OSError: the kernel makes no more processes.
    """
    reads, writes = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reads)
        _fork_again(request, fds, requests, writes, run)
    os.close(writes)
    with open(reads, "rb", buffering=0) as pipe:
        pid = pipe.read()
    os.waitpid(middle, 0)
    if not pid:
        raise OSError("the template could fork once, and not again: too many processes")
    return int(pid)


def _fork_again(
    request: ForkRequest,
    fds: Sequence[int],
    requests: socket.socket,
    writes: int,
    run: Run,
) -> NoReturn:
    middle = os.getpid()
    pid = None
    # Neither the kernel's refusal nor the template's end may bring this process into its frames.
    with suppress(OSError):
        pid = os.fork()
        if pid:
            os.write(writes, str(pid).encode())
    if pid != 0:
        os._exit(0)
    code = 1
    try:
        os.close(writes)
        requests.close()
        code = become(request, fds, middle, run)
    except Exception:  # noqa: BLE001 (ends as in a process of its own: with a line in its log)
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Frames below are the template's: nothing of them may run in this process.
            os._exit(code)


def become(request: ForkRequest, fds: Sequence[int], middle: int, run: Run) -> int:
    """Make a forked process the one that was asked for, run its command, and return its exit code.

    Args:
      request: the process.
      fds: standard input, output and error, then those of `request.pass_fds`; they are moved.
      middle: process between the template and this one, whose end is waited for.
      run: the command `triolet`.
    """
    give_up = time.monotonic() + ADOPTION_DEADLINE_S
    while os.getppid() == middle and time.monotonic() < give_up:
        time.sleep(ADOPTION_POLL_S)
    os.setsid()
    numbers = (*STANDARD_STREAMS, *request.pass_fds)
    # Above every number asked for, until those are free.
    waiting = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(waiting, numbers, strict=True):
        os.dup2(fd, number, inheritable=number in STANDARD_STREAMS)
        os.close(fd)
    os.environ.update(request.env)
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    setproctitle(request.title)
    reseed()
    if request.has_input and not _has_input():
        return 0  # the supervisor has given this start up
    return run(request.arguments)


def _has_input() -> bool:
    """Wait for standard input; return whether anything came before its end, which comes with the
    supervisor's at the latest."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    return any(events & select.POLLIN for _, events in waiting.poll())


def reseed() -> None:
    """Give a forked process random numbers of its own; Python's `random` does so by itself."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int.from_bytes(os.urandom(7)))
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(int.from_bytes(os.urandom(4)))
