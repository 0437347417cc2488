"""Test helper that starts Python programs by forking a process that has already imported Triolet
and torch.

Tests start hundreds of fleets, and most of each one's time would go into imports. The result is the
same: a separate process and session with the given command line, environment and descriptors. As
`python -m tests.forked` this module is the template process.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
from setproctitle import setproctitle

from ops.template import reseed

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).parents[1]
TRIOLET: Final = str(Path(sys.executable).with_name("triolet"))
PARENT_PID: Final = "@parent"
"""In an argument, replaced by the pid of the process's parent, which is not the test."""
MAX_REQUEST_BYTES: Final = 256 * 1024
MAX_DESCRIPTORS: Final = 64
FREE_DESCRIPTORS: Final = 512
MAX_ANSWER_BYTES: Final = 64


class Request(msgspec.Struct):
    """A process to start; its descriptors and one that reports its end come with it."""

    args: list[str]
    env: dict[str, str]
    cwd: str
    numbers: list[int]


class Popen(subprocess.Popen[bytes]):
    """`subprocess.Popen` for a Python command line: `[sys.executable, "-c"|"-m"|FILE, …]`, or the
    installed command `triolet`. Always in its own session.

    Its parent is another process, which reaps it: use `send_signal` for signals, and watch `ended`
    instead of the pid.

    Attributes:
      ended: a descriptor that becomes readable when it exits; closed once `returncode` is set.
    """

    def _execute_child(
        self,
        args: Sequence[str],
        executable: None,
        preexec_fn: None,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str | Path | None,
        env: dict[str, str] | None,
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *rest: object,
    ) -> None:
        """Have the template fork it. The base class calls this once it has made the pipes."""
        fds = {
            number: number if fd == -1 else fd
            for number, fd in enumerate((p2cread, c2pwrite, errwrite))
        } | {number: number for number in pass_fds}
        wanted = Request(
            list(args), dict(os.environ if env is None else env), str(cwd or Path.cwd()), list(fds)
        )
        self.ended, ends = os.pipe()
        asked = template()
        socket.send_fds(asked, [msgspec.msgpack.encode(wanted)], [ends, *fds.values()])
        os.close(ends)
        self.pid = int(asked.recv(MAX_ANSWER_BYTES))
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def poll(self) -> int | None:
        """See the base class; the parent reports how it ended."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """See the base class."""
        code = self._look(timeout)
        if code is None:
            assert timeout is not None, "without one it waits"
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:  # noqa: ANN401
        """See the base class, which after an error would wait for a hanging process."""
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self.ended], [], [], timeout)[0]:
            self.returncode = int(os.read(self.ended, MAX_ANSWER_BYTES))
            os.close(self.ended)
        return self.returncode


@cache
def template() -> socket.socket:
    """Return a socket to this process's template, started on first use."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked"], cwd=ROOT, stdin=its, start_new_session=True
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def run_template() -> NoReturn:
    """Import Triolet's modules, then fork one process per request on stdin."""
    from ops.own_process import spin_briefly
    from ops.template import SERVER_MODULES, WORKER_MODULES

    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    spin_briefly()
    # Its first call finds where titles can be written, before the environment is replaced.
    setproctitle("tests.forked template")
    for module in (*SERVER_MODULES, *WORKER_MODULES, "ops.cli", "ops.supervisor.serve"):
        import_module(module)
    gc.collect()
    gc.freeze()
    # The kernel reaps the keepers, each of which exits after its process.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            message, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
            if not message:
                os._exit(0)
            if os.fork() == 0:
                _keep(msgspec.msgpack.decode(message, type=Request), fds, requests)
            for fd in fds:
                os.close(fd)


def _keep(wanted: Request, fds: list[int], requests: socket.socket) -> NoReturn:
    """Fork the process, report its pid, and later how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ends, *its = fds
    pid = os.fork()
    if pid == 0:
        os.close(ends)
        requests.close()
        code = 1
        try:
            code = _run(wanted, its)
        except Exception:  # noqa: BLE001 (as the interpreter shows it)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    requests.send(str(pid).encode())
    os.close(0)
    for fd in its:
        os.close(fd)
    _, status = os.waitpid(pid, 0)
    os.write(ends, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(wanted: Request, fds: list[int]) -> int:
    """Run the command line as the interpreter would; return its exit code."""
    os.setsid()
    high = [os.dup2(fd, FREE_DESCRIPTORS + n) for n, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, wanted.numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(wanted.cwd)
    os.environ.clear()
    os.environ.update(wanted.env)
    setproctitle(" ".join(wanted.args))
    reseed()
    how, *rest = (word.replace(PARENT_PID, str(os.getppid())) for word in wanted.args[1:])
    if wanted.args[0] != sys.executable:
        from triolet.entry import main

        sys.argv = ["triolet", how, *rest]
        return main()
    try:
        if how == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif how == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [how, *rest]
            runpy.run_path(how, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return end.code or 0
    return 0


if __name__ == "__main__":
    run_template()
