"""Starts the supervisor's processes: forks them from a template process with the modules already
imported, or spawns them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from triolet.config import AUTO_DEVICE
from triolet.errors import TrioletError, said_by
from triolet.ids import Role

from ..logs import forget_logs
from ..models.several import each_model
from ..own_process import PR_SET_CHILD_SUBREAPER, prctl
from ..template import SERVER_MODULES, WORKER_MODULES, ForkAnswer, ForkRequest, run_template
from .placement import VISIBLE_GPUS, gpu_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import IO, TypeAlias

    from ..settings.form import Settings
    from ..template import Run
    from .process_spec import ProcessSpec

log = structlog.get_logger(__name__)

MODULES: Final = {
    Role.SERVER: SERVER_MODULES,
    Role.CONTROL: SERVER_MODULES,
    Role.PREFILL: WORKER_MODULES,
    Role.DECODE: WORKER_MODULES,
}
REAP_POLL_S: Final = 0.05
"""Interval of checking whether the task that watches an ended child has waited for it."""
MAX_ANSWER_BYTES: Final = 4096
KILLED_S: Final = 1.0
"""Longest wait for a killed template, during which the supervisor is blocked. Only a process stuck
in the kernel, for example on a hanging file system, takes this long."""
LISTING_S: Final = 10.0
"""Longest wait for `nvidia-smi -L`, which wakes the driver and may take seconds with many GPUs."""
GIVEN_UP_S: Final = 1.0
"""Longest wait for the answer to a cancelled start. A template forks within tens of milliseconds,
unless it is still importing. Killing it earlier would cost new workers the pages that they share
with the present ones."""


class ForkedProcess:
    """A child process forked by a template, with the part of `subprocess.Popen`'s interface that is
    used here.

    Args:
      pid: process id; a child of this process.
      stdin: our end of its standard input.
      stdout: our end of its standard output.
      stderr: our end of its standard error; None if it inherits this process's.
    """

    def __init__(
        self,
        pid: int,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        # Unlike the pid, it refers to this process even after the number is reused.
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None
        self._waiting = threading.Lock()

    def send_signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, or the negative number of the signal that killed it.

        Raises:
          subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        with self._waiting:
            if timeout is not None and not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            if self._code is None:
                ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
                assert ended is not None, "without WNOHANG it waits"
                has_exited = ended.si_code == os.CLD_EXITED
                self._code = ended.si_status if has_exited else -ended.si_status
            return self._code

    def _has_ended(self, within_s: float) -> bool:
        ends = select.poll()
        ends.register(self._pidfd, select.POLLIN)
        return bool(ends.poll(1000 * within_s))

    def __del__(self) -> None:
        os.close(self._pidfd)


Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"


class TemplateLost(TrioletError):
    """A template process does not answer."""


class Template:
    """Client of a template process, which forks processes on request.

    Args:
      process: the template.
      requests: our end of its socket.
    """

    def __init__(self, process: Process, requests: socket.socket) -> None:
        self._process = process
        self._requests = requests
        self._turn = trio.Lock()
        self._is_in_step = True
        self._is_closed = False

    @classmethod
    def fork(cls, modules: Sequence[str], run: Run) -> Template:
        """Fork a template from this process, which must have only one thread.

        Args:
          modules: modules for it to import.
          run: entry point of `triolet` for the processes that it forks.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                forget_logs()
                _keep_only(its)
                run_template(its, modules, run)
            except Exception:  # noqa: BLE001 (must not return into the supervisor's frames)
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        its.close()
        return cls(ForkedProcess(pid), ours)

    @classmethod
    def spawn(cls, command: Sequence[str], modules: Sequence[str]) -> Template:
        """Start a template with the code that is installed now.

        Raises:
          OSError: the program cannot be started.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = subprocess.Popen(
                [*command, "template", *modules],
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        return cls(process, ours)

    async def start(self, request: ForkRequest, fds: Sequence[int], within_s: float) -> int:
        """Fork a process and return its pid.

        Args:
          request: the process.
          fds: its standard input, output and error, then those of `request.pass_fds`.
          within_s: timeout; the first request also waits for imports.

        Raises:
          TemplateLost: the template did not answer, or could not fork.
        """
        async with self._turn:
            try:
                if self._is_closed:
                    raise TemplateLost("it was replaced")
                return await self._ask(request, fds, within_s)
            finally:
                if self._is_closed:
                    self._requests.close()

    async def _ask(self, request: ForkRequest, fds: Sequence[int], within_s: float) -> int:
        if not self._is_in_step:
            raise TemplateLost("its last answer was not waited for")
        self._is_in_step = False
        reply = b""
        try:
            with trio.move_on_after(within_s) as scope, suppress(OSError):
                # One datagram on a private socket does not block.
                socket.send_fds(self._requests, [msgspec.json.encode(request)], list(fds))
                reply = await self._reply()
        except trio.Cancelled:
            with trio.move_on_after(GIVEN_UP_S, shield=True), suppress(OSError):
                reply = await self._reply()
                _end_forked(reply)
            raise
        finally:
            self._is_in_step = bool(reply)
            if not reply:
                # If it forked the process later, nothing here would read its pipes.
                self._process.kill()
        if scope.cancelled_caught:
            raise TemplateLost(f"no answer within {within_s:g} s")
        if not reply:
            raise TemplateLost("it has ended; see its lines on stderr")
        answer = msgspec.json.decode(reply, type=ForkAnswer)
        if answer.pid is None:
            raise TemplateLost(answer.error)
        return answer.pid

    async def _reply(self) -> bytes:
        await trio.lowlevel.wait_readable(self._requests)
        return self._requests.recv(MAX_ANSWER_BYTES)

    def close(self) -> None:
        """Kill the template. Processes that it forked keep running."""
        self._is_closed = True
        self._process.kill()
        # Keep the socket open for a task that waits for an answer: EOF wakes it, closing does not.
        if not self._turn.locked():
            self._requests.close()
        # `reap_strays` may have reaped it, or will do so later if it is stuck in the kernel.
        with suppress(ChildProcessError, subprocess.TimeoutExpired):
            self._process.wait(KILLED_S)


def _end_forked(reply: bytes) -> None:
    """Kill the process in a template's answer, if any. `Starter.reap_strays` reaps it."""
    pid = msgspec.json.decode(reply, type=ForkAnswer).pid if reply else None
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _keep_only(kept: socket.socket) -> None:
    """Close all inherited file descriptors in a template except stderr and one socket."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.closerange(3, kept.fileno())
    os.closerange(kept.fileno() + 1, os.sysconf("SC_OPEN_MAX"))


def available_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get(VISIBLE_GPUS)
    files = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()]
    listing = listed_gpus() if visible is None and files else ""
    return gpu_names(visible, len(files), listing)


def listed_gpus() -> str:
    """Return what `nvidia-smi -L` prints; empty if it cannot tell, so that MIG instances remain
    unknown."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LISTING_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("gpus_not_listed", reason=said_by(error), remedy=f"set {VISIBLE_GPUS}")
        return ""
    return done.stdout


def roles_of_templates(settings: Settings, gpus: Sequence[str]) -> list[Role]:
    """Return the roles with forked processes. Workers on a GPU are not forked: each needs to
    initialize its own driver.

    Args:
      settings: settings of the fleet, before its models are checked.
      gpus: GPUs of this machine.
    """
    if not (settings.supervisor.templates and sys.platform == "linux" and has_pidfds()):
        return []
    fleets = [own.fleet for own in each_model(settings)]
    roles = (Role.PREFILL,) * any(one.prefill for one in fleets) + (Role.DECODE,)
    devices = {role: settings.worker(role).engine.device for role in roles}
    on_cpu = "cpu" if gpus else AUTO_DEVICE
    control = [Role.CONTROL] * bool(settings.models)
    return [
        Role.SERVER,
        *control,
        *(role for role, one in devices.items() if one in ("cpu", on_cpu)),
    ]


def has_pidfds() -> bool:
    """Return whether the kernel supports pidfds: Linux 5.4 or newer, but not gVisor or strict
    seccomp filters."""
    try:
        own = os.pidfd_open(os.getpid())
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(own, 0)
        os.waitid(os.P_PIDFD, own, os.WEXITED | os.WNOHANG)
    except ChildProcessError:  # no process is a child of its own
        return True
    except OSError:
        return False
    finally:
        os.close(own)
    return True


def fork_templates(roles: Sequence[Role], run: Run) -> dict[Role, Template]:
    """Fork a template for each role; roles with the same modules share one. Must be called before
    this process starts a second thread. Templates inherit the modules imported so far.

    Args:
      roles: roles of the processes to fork.
      run: entry point of `triolet` for these processes.
    """
    return templates_of(roles, partial(Template.fork, run=run))


def templates_of(
    roles: Collection[Role], begin: Callable[[Sequence[str]], Template]
) -> dict[Role, Template]:
    """Start a template for each role; roles with the same modules share one.

    Args:
      roles: roles of the processes to fork.
      begin: starts a template that imports these modules.
    """
    if roles:
        # Adopt the processes that templates fork, and their orphans.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    of_modules = {modules: begin(modules) for modules in {MODULES[role] for role in roles}}
    return {role: of_modules[MODULES[role]] for role in roles}


class Starter:
    """Starts processes.

    Args:
      templates: templates by role; processes of other roles are spawned.
      command: program and arguments that run `triolet`.
      answer_within_s: timeout of a template's answer.
    """

    def __init__(
        self,
        templates: Mapping[Role, Template] | None = None,
        command: Sequence[str] = (),
        answer_within_s: float = 0.0,
    ) -> None:
        self._templates = dict(templates or {})
        self._command = command
        self._answer_within_s = answer_within_s
        self._num_pending = 0
        self._running: set[int] = set()

    @property
    def has_templates(self) -> bool:
        """Whether any role has a template."""
        return bool(self._templates)

    async def start(self, spec: ProcessSpec, *, reads_log: bool) -> Process:
        """Start a process; its standard input and output are pipes.

        Args:
          spec: the process.
          reads_log: make its stderr a pipe too; otherwise it inherits this process's.

        Raises:
          OSError: the program cannot be started.
        """
        template = self._templates.get(spec.role)
        self._num_pending += 1
        try:
            if template is not None and spec.arguments is not None:
                try:
                    process = await self._fork(template, spec, reads_log=reads_log)
                except TemplateLost as error:
                    # A concurrent start or `renew` may have replaced it already.
                    if template in self._templates.values():
                        log.warning("template_lost", role=spec.role.value, reason=str(error))
                        self._replace(template)
                else:
                    self._running.add(process.pid)
                    return process
            spawned = _spawn(spec, reads_log=reads_log)
            self._running.add(spawned.pid)
            return spawned
        finally:
            self._num_pending -= 1

    def ended(self, pid: int) -> None:
        """Record that a process was reaped."""
        self._running.discard(pid)

    def renew(self, roles: Collection[Role]) -> None:
        """Replace the templates of some roles, so that they import the code that is installed now.

        Args:
          roles: roles being restarted. Other templates stay, so that a process that crashes
            restarts with the code of its peers.

        Raises:
          OSError: the program cannot be started.
        """
        for template in {self._templates[role] for role in roles if role in self._templates}:
            self._replace(template)

    def close(self) -> None:
        """Kill the templates."""
        for template in set(self._templates.values()):
            template.close()
        self._templates.clear()

    async def reap_strays(self) -> None:
        """Reap orphans of child processes, which this process inherits as a subreaper. Required
        when templates are used."""
        with trio.open_signal_receiver(signal.SIGCHLD) as signals:
            async for _ in signals:
                await self.reap_ended()

    async def reap_ended(self) -> None:
        """Reap the orphans that have ended."""
        while (pid := _ended_child()) is not None:
            if self._num_pending or pid in self._running:
                await trio.sleep(REAP_POLL_S)
            else:
                _reap(pid)

    def _replace(self, old: Template) -> None:
        roles = [role for role, template in self._templates.items() if template is old]
        old.close()
        for role in roles:
            del self._templates[role]
        new = Template.spawn(self._command, MODULES[roles[0]])
        self._templates |= dict.fromkeys(roles, new)

    async def _fork(
        self, template: Template, spec: ProcessSpec, *, reads_log: bool
    ) -> ForkedProcess:
        assert spec.arguments is not None, "checked by the caller"
        request = ForkRequest(
            " ".join(spec.argv),
            spec.arguments,
            dict(spec.env),
            spec.cores,
            spec.pass_fds,
            bool(spec.settings),
        )
        streams = _Streams(reads_log=reads_log)
        try:
            fds = [*streams.its, *spec.pass_fds]
            pid = await template.start(request, fds, self._answer_within_s)
        except BaseException:
            streams.close()
            raise
        return ForkedProcess(pid, *streams.ours_alone())


class _Streams:
    """The pipes of a process that is about to start.

    Args:
      reads_log: make its standard error a pipe too; otherwise it inherits this process's.

    Attributes:
      its: descriptors of its standard input, output and error.
    """

    def __init__(self, *, reads_log: bool) -> None:
        stdin, its_stdin = reversed(os.pipe())
        stdout, its_stdout = os.pipe()
        stderr, its_stderr = os.pipe() if reads_log else (None, os.dup(2))
        self.its = (its_stdin, its_stdout, its_stderr)
        self._ours = (
            FileIO(stdin, "wb"),
            FileIO(stdout, "rb"),
            None if stderr is None else FileIO(stderr, "rb"),
        )

    def ours_alone(self) -> tuple[IO[bytes], IO[bytes], IO[bytes] | None]:
        """Close the process's ends, which it has inherited by now, and return ours."""
        for fd in self.its:
            os.close(fd)
        return self._ours

    def close(self) -> None:
        """Close both ends after a failed start."""
        for end in self.ours_alone():
            if end is not None:
                end.close()


def _spawn(spec: ProcessSpec, *, reads_log: bool) -> subprocess.Popen[bytes]:
    # Fork in this thread, not in one of Trio's: Linux sends the parent-death signal when the
    # forking thread ends, and Trio's threads end after some idle seconds.
    process = subprocess.Popen(
        spec.argv,
        env={**os.environ, **spec.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if reads_log else None,
        start_new_session=True,
        pass_fds=spec.pass_fds,
    )
    if spec.cores:
        # Its future threads inherit this. If it has ended already, the task that waits for it
        # notices.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, spec.cores)
    return process


def _ended_child() -> int | None:
    """Return the pid of an ended child that was not reaped, or None."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
