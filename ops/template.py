"""Template process: imports the modules of a role once, then forks processes of it on request, for
fast starts. Linux only.

A worker's imports take two seconds of CPU, a fork about ten milliseconds. A request is a datagram
on a Unix socket with the descriptors of the new process; the answer is a datagram too. The template
forks twice, so that the supervisor, as the nearest subreaper, adopts the orphaned process.
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
    """Runs `triolet` with these arguments and returns its exit code."""

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
"""Modules that processes of a role import. Each process must import modules missing here itself."""

MAX_REQUEST_BYTES: Final = 64 * 1024
"""Limit of a request: arguments and environment. Settings go through standard input."""
MAX_DESCRIPTORS: Final = 64
"""Limit of standard streams and listening sockets of one process; the kernel allows 253."""
STANDARD_STREAMS: Final = (0, 1, 2)
ADOPTION_POLL_S: Final = 0.0005
"""Interval of checking whether the intermediate process has ended, which it does at once."""
ADOPTION_DEADLINE_S: Final = 10.0
"""Longest wait for its end, on a stalled machine."""


class ForkRequest(msgspec.Struct, frozen=True):
    """A process to fork.

    Attributes:
      title: command line shown in process lists.
      arguments: arguments of `triolet`.
      env: variables added to the template's environment.
      cores: CPU cores that it may use; empty for all of the template's.
      pass_fds: numbers of the descriptors after standard input, output and error.
      has_input: settings follow on its standard input; it exits if that is closed before.
    """

    title: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    cores: tuple[int, ...]
    pass_fds: tuple[int, ...]
    has_input: bool


class ForkAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to a request.

    Attributes:
      pid: process id of the new process, or None.
      error: why no process was forked.
    """

    pid: int | None = None
    error: str = ""


def run_template(requests: socket.socket, modules: Sequence[str], run: Run) -> NoReturn:
    """Import modules, then fork a process for each request until the other end is closed.

    The calling process must have only one thread, and only the socket and stderr open.

    Args:
      requests: one end of a pair of SOCK_SEQPACKET sockets.
      modules: modules to import before the first request.
      run: entry point of each forked process.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Set both before libraries are loaded, which read them once. NumPy's threads would have to end
    # before each fork, and no step multiplies matrices with NumPy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    spin_briefly()
    setproctitle(f"triolet template {' '.join(modules[:1])}")
    # What imports make stays: to look for garbage among it takes an eighth of their time.
    gc.disable()
    for module in modules:
        import_module(module)
    # Exclude present objects from collection: collecting them in a child would copy their pages.
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
    """Fork a process through an intermediate one, and return its pid.

    Raises:
      OSError: the kernel refuses another process.
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
        raise OSError("the template's second fork failed: too many processes")
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
    # An error must not return this process into the template's frames.
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
    except Exception:  # noqa: BLE001 (logged, as in a process that was started normally)
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Exit here: the template's frames must not run in this process.
            os._exit(code)


def become(request: ForkRequest, fds: Sequence[int], middle: int, run: Run) -> int:
    """Set up a forked process as requested, run its command, and return its exit code.

    Args:
      request: the process.
      fds: standard input, output and error, then those of `request.pass_fds`; they are moved.
      middle: process id of the intermediate process, which is awaited.
      run: entry point of `triolet`.
    """
    give_up = time.monotonic() + ADOPTION_DEADLINE_S
    while os.getppid() == middle and time.monotonic() < give_up:
        time.sleep(ADOPTION_POLL_S)
    os.setsid()
    numbers = (*STANDARD_STREAMS, *request.pass_fds)
    # First move the descriptors above all target numbers, which may be occupied.
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
        return 0  # the supervisor has cancelled this start
    return run(request.arguments)


def _has_input() -> bool:
    """Wait for standard input. Return whether data arrives before EOF."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    return any(events & select.POLLIN for _, events in waiting.poll())


def reseed() -> None:
    """Reseed the random generators of a forked process. Python's `random` does so by itself."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int.from_bytes(os.urandom(7)))
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(int.from_bytes(os.urandom(4)))
