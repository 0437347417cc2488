"""Tests of forking processes from templates: they behave like spawned ones, and starts still work
if a template is lost.

The templates run `PROGRAM` in place of Triolet's command line, in real processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ops.own_process import PR_SET_CHILD_SUBREAPER, prctl
from ops.settings.form import Settings
from ops.supervisor.process_spec import ProcessSpec
from ops.supervisor.slot import Slot
from ops.supervisor.starter import Starter, Template, listed_gpus, roles_of_templates
from ops.supervisor.supervisor import Supervisor
from ops.template import reseed
from triolet.config import EngineConfig, SupervisorConfig, WorkerConfig
from triolet.ids import Role

from .recording import Recorder
from .test_supervisor import is_gone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ops.supervisor.starter import Process

PROGRAM = """
import json, os, random, socket, subprocess, sys, time
from ops.template import run_template
from triolet.ids import new_epoch

def main(arguments):
    what, *rest = arguments
    if what == "tell":
        listed = {number: os.readlink(f"/proc/self/fd/{number}") for number in map(int, rest)}
        print(json.dumps({
            "parent": os.getppid(), "session": os.getsid(0) == os.getpid(),
            "mark": os.environ.get("MARK"), "cores": sorted(os.sched_getaffinity(0)),
            "title": open("/proc/self/cmdline").read().rstrip("\\0"), "fds": listed,
            "random": random.random(), "epoch": new_epoch(), "text": sys.stdin.readline(),
        }), flush=True)
        sys.stderr.write("logged\\n")
        return 7
    if what == "orphan":
        print(subprocess.Popen(["sleep", rest[0]]).pid, flush=True)
        return 0
    if what == "fail":
        raise ZeroDivisionError
    if what == "list":
        print(json.dumps(sorted(map(int, os.listdir("/proc/self/fd")))), flush=True)
        return 0
    if what == "serve":
        open(rest[0]).close()
        print('{"event": "server_ready", "url": "here"}', flush=True)
    time.sleep(60)

run_template(socket.socket(fileno=os.dup(0)), sys.argv[2:], main)
"""
COMMAND = (sys.executable, "-c", PROGRAM)
SEVERAL_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
"""
BLOCKED = """
open({begun!r}, "w").close()
open({never!r})
"""
OWN_LOGS = """
import sys, structlog, trio
from ops.logs import configure_logs
from ops.own_process import PR_SET_CHILD_SUBREAPER, prctl
from ops.supervisor.process_spec import ProcessSpec
from ops.supervisor.starter import Starter, Template
from triolet.ids import Role

def main(arguments):
    configure_logs("info", "forked")
    structlog.get_logger().info("heard")
    return 0

async def run(starter):
    process = await starter.start(spec, reads_log=False)
    await trio.to_thread.run_sync(process.wait)

spec = ProcessSpec("decode-0", Role.DECODE, (sys.executable, "-c", ""), arguments=("x",))
configure_logs("info", "supervisor")
prctl(PR_SET_CHILD_SUBREAPER, 1)
template = Template.fork(sys.argv[1:], main)
trio.run(run, Starter({Role.DECODE: template}, (sys.executable, "-c", ""), 30.0))
"""
NO_PIDFDS = """
import ctypes, struct
from ops.own_process import prctl
from ops.supervisor.starter import has_pidfds

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
PIDFD_OPEN, ENOSYS = 434, 38
LOAD_NUMBER, SKIP_UNLESS_EQUAL, RETURN, ALLOW, FAIL = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
steps = b"".join(struct.pack("=HBBI", *step) for step in (
    (LOAD_NUMBER, 0, 0, 0), (SKIP_UNLESS_EQUAL, 0, 1, PIDFD_OPEN),
    (RETURN, 0, 0, FAIL | ENOSYS), (RETURN, 0, 0, ALLOW)))
held = ctypes.create_string_buffer(steps)
program = struct.pack("@HP", 4, ctypes.addressof(held))
print(has_pidfds())
prctl(PR_SET_NO_NEW_PRIVS, 1)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(PR_SET_SECCOMP, FILTER, program, 0, 0) == 0, ctypes.get_errno()
print(has_pidfds())
"""
PATIENCE_S = 30.0
POLL_S = 0.01
TITLE = "triolet template random"


@pytest.fixture(autouse=True)
def parent_of_strays() -> Iterator[None]:
    """Make this process a subreaper, as the supervisor is."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0)


@asynccontextmanager
async def starting(*modules: str, command: tuple[str, ...] = COMMAND) -> AsyncIterator[Starter]:
    """Run a starter with a template for decode workers."""
    template = Template.spawn(command, modules or ("random",))
    with closing(Starter({Role.DECODE: template}, command, PATIENCE_S)) as starter:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(starter.reap_strays)
                yield starter
                nursery.cancel_scope.cancel()


def of_command(*arguments: str, **changes: Any) -> ProcessSpec:  # noqa: ANN401
    """Return a process for a template to fork; if spawned instead, it prints only `spawned`."""
    argv = (sys.executable, "-c", "print('spawned')", *arguments)
    return ProcessSpec("decode-0", Role.DECODE, argv, arguments=arguments, **changes)


def children_named(title: str) -> list[int]:
    """Return the pids of this process's children with a word in their command line."""
    tasks = Path("/proc/self/task").glob("*/children")
    pids = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [pid for pid in pids if title in Path(f"/proc/{pid}/cmdline").read_text()]


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def gone(pid: int) -> None:
    """Wait until a process has ended and was reaped."""
    while not is_gone(pid):  # noqa: ASYNC110 (the kernel knows)
        await trio.sleep(POLL_S)


async def output_of(process: Process, starter: Starter, said: bytes = b"") -> tuple[str, str, int]:
    """Return the stdout, stderr and exit code of a process."""
    streams = (process.stdin, process.stdout, process.stderr)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(said)
    code = await trio.to_thread.run_sync(process.wait)
    starter.ended(process.pid)
    out = process.stdout.read().decode()
    log = "" if process.stderr is None else process.stderr.read().decode()
    for stream in streams:
        if stream is not None:
            stream.close()
    return out, log, code


async def test_a_forked_process_has_all_that_a_spawned_one_would_have(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with (tmp_path / "file").open("w") as file:
        number = file.fileno()
        spec = of_command(
            "tell", str(number), env={"MARK": "its own"}, cores=(core,), pass_fds=(number,)
        )
        async with starting() as starter:
            process = await starter.start(spec, reads_log=True)
            out, log, code = await output_of(process, starter, b"settings\n")
    answer = json.loads(out)
    assert (log, code) == ("logged\n", 7)
    assert (answer["parent"], answer["session"]) == (os.getpid(), True)
    assert (answer["mark"], answer["cores"]) == ("its own", [core])
    assert answer["title"] == " ".join(spec.argv)
    assert answer["fds"] == {str(number): str(tmp_path / "file")}
    assert answer["text"] == "settings\n"


async def test_no_two_forked_processes_draw_the_same_numbers() -> None:
    answers = []
    async with starting("random", "numpy.random") as starter:
        for _ in range(2):
            process = await starter.start(of_command("tell"), reads_log=True)
            out, _, _ = await output_of(process, starter, b"\n")
            answers.append(json.loads(out))
    first, second = answers
    assert first["random"] != second["random"]
    assert first["epoch"] != second["epoch"]


def test_the_generators_of_libraries_are_seeded_again() -> None:
    import numpy as np
    import torch

    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        np.random.seed(1)
        reseed()
        drawn.append((torch.rand(1).item(), np.random.rand()))
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


async def test_a_program_that_fails_ends_with_its_traceback() -> None:
    async with starting() as starter:
        process = await starter.start(of_command("fail"), reads_log=True)
        out, log, code = await output_of(process, starter)
    assert (out, code) == ("", 1)
    assert "ZeroDivisionError" in log


@pytest.mark.parametrize(("settings", "code"), [(b"settings\n", 7), (b"", 0)])
async def test_a_process_that_gets_no_settings_ends_without_a_word(
    settings: bytes, code: int
) -> None:
    async with starting() as starter:
        process = await starter.start(of_command("tell", settings=b"settings\n"), reads_log=True)
        assert process.stdin is not None
        process.stdin.write(settings)
        process.stdin.close()
        ended = await trio.to_thread.run_sync(process.wait)
        starter.ended(process.pid)
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout as said, process.stderr as logged:
            assert (ended, bool(said.read()), bool(logged.read())) == (code, bool(code), bool(code))


@pytest.mark.slow
async def test_a_template_that_dies_is_replaced_and_costs_no_start() -> None:
    async with starting() as starter:
        first = await starter.start(of_command("tell"), reads_log=True)
        await output_of(first, starter, b"\n")
        [template] = children_named(TITLE)
        os.kill(template, signal.SIGKILL)
        await gone(template)
        spawned = await starter.start(of_command("tell"), reads_log=True)
        assert (await output_of(spawned, starter))[0] == "spawned\n"
        forked = await starter.start(of_command("tell"), reads_log=True)
        assert json.loads((await output_of(forked, starter, b"\n"))[0])["parent"] == os.getpid()


async def test_a_start_that_is_given_up_costs_no_template() -> None:
    async with starting() as starter, trio.open_nursery() as nursery:
        first = await starter.start(of_command("tell"), reads_log=True)
        await output_of(first, starter, b"\n")
        [template] = children_named(TITLE)
        os.kill(template, signal.SIGSTOP)
        given_up = of_command("wait")

        async def start() -> None:
            await starter.start(given_up, reads_log=True)

        async with trio.open_nursery() as starts:
            starts.start_soon(start)
            await trio.testing.wait_all_tasks_blocked()
            starts.cancel_scope.cancel()
            nursery.start_soon(trio.to_thread.run_sync, os.kill, template, signal.SIGCONT)
        # A forked process first has the template's title.
        title = " ".join(given_up.argv)
        while children_named(title) or children_named(TITLE) != [template]:  # noqa: ASYNC110
            await trio.sleep(POLL_S)
        second = await starter.start(of_command("tell"), reads_log=True)
        assert json.loads((await output_of(second, starter, b"\n"))[0])["parent"] == os.getpid()


async def test_a_template_that_cannot_import_leaves_the_start_to_the_program_itself() -> None:
    async with starting("no_such_module") as starter:
        process = await starter.start(of_command("tell"), reads_log=True)
        assert (await output_of(process, starter))[0] == "spawned\n"


async def test_starts_that_lose_the_same_template_are_all_spawned() -> None:
    async with starting("no_such_module") as starter, trio.open_nursery() as nursery:

        async def start() -> None:
            process = await starter.start(of_command("tell"), reads_log=True)
            assert (await output_of(process, starter))[0] == "spawned\n"

        for _ in range(3):
            nursery.start_soon(start)


class Blocked:
    """A module that never finishes its import."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun, never = folder / "begun", folder / "never"
        for fifo in (self._begun, never):
            os.mkfifo(fifo)
        code = BLOCKED.format(begun=str(self._begun), never=str(never))
        (folder / "blocked_module.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(folder))

    async def wait_begun(self) -> None:
        """Wait until a template imports it."""
        await trio.to_thread.run_sync(self._begun.read_bytes, abandon_on_cancel=True)


async def test_a_start_does_not_wait_for_a_template_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = Blocked(tmp_path, monkeypatch)
    async with starting("blocked_module") as starter, trio.open_nursery() as nursery:
        outputs = []

        async def start() -> None:
            process = await starter.start(of_command("tell"), reads_log=True)
            outputs.append((await output_of(process, starter))[0])

        nursery.start_soon(start)
        await blocked.wait_begun()
        began_at = trio.current_time()
        starter.renew([Role.DECODE])
    assert outputs == ["spawned\n"]
    assert trio.current_time() - began_at < PATIENCE_S / 2


async def test_the_end_of_a_fleet_does_not_wait_for_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = Blocked(tmp_path, monkeypatch)
    recorder = Recorder()
    async with starting("blocked_module") as starter, trio.open_nursery() as nursery:
        supervisor = Supervisor(
            [of_command("wait")], SupervisorConfig(), PATIENCE_S, recorder, starter=starter
        )
        nursery.start_soon(supervisor.run)
        await blocked.wait_begun()
        began_at = trio.current_time()
        supervisor.stop()
    assert recorder.pids == {}
    assert trio.current_time() - began_at < PATIENCE_S / 2


async def test_a_successor_stays_though_a_start_that_began_before_ends_later(
    tmp_path: Path,
) -> None:
    may_serve = tmp_path / "may_serve"
    os.mkfifo(may_serve)
    config = SupervisorConfig(restart_delay_s=0.0)
    recorder = Recorder()
    async with starting() as starter, trio.open_nursery() as nursery:
        spec = of_command("serve", str(may_serve))
        slot = Slot(spec, starter, config, recorder, None, nursery)
        nursery.start_soon(slot.keep)
        await trio.to_thread.run_sync(may_serve.write_bytes, b"")
        await slot.wait_ready()
        [template] = children_named(TITLE)
        replaced = trio.Event()

        async def replace() -> None:
            await slot.replace(PATIENCE_S)
            replaced.set()

        nursery.start_soon(replace)
        while len(slot.lives) < 2:  # noqa: ASYNC110 (a slot tells of nothing but ready)
            await trio.sleep(POLL_S)
        old, new = slot.lives
        os.kill(template, signal.SIGSTOP)
        os.kill(old.child.pid, signal.SIGKILL)
        while not starter._num_pending:  # noqa: ASYNC110
            await trio.sleep(POLL_S)
        await trio.to_thread.run_sync(may_serve.write_bytes, b"")
        await replaced.wait()
        os.kill(template, signal.SIGCONT)
        while len(recorder.endings) < 2:  # noqa: ASYNC110
            await trio.sleep(POLL_S)
        assert slot.current is new
        assert slot.lives == [new]
        slot.end()
        new.ask_to_leave(signal.SIGKILL)


async def test_a_forked_process_has_no_descriptors_but_its_own(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        number = file.fileno()
        spec = of_command("list", pass_fds=(number,))
        async with starting() as starter:
            process = await starter.start(spec, reads_log=True)
            listed = set(json.loads((await output_of(process, starter))[0]))
    assert len(listed - {0, 1, 2, number}) == 1  # reading the list itself needs one


async def test_a_process_may_have_few_descriptors() -> None:
    command = (sys.executable, "-c", SEVERAL_DESCRIPTORS + PROGRAM)
    async with starting(command=command) as starter:
        process = await starter.start(of_command("list"), reads_log=True)
        assert json.loads((await output_of(process, starter))[0])[:3] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "line"), [("random", '"event": "heard"'), ("no_such_module", "ModuleNotFoundError")]
)
def test_lines_of_templates_and_forked_processes_reach_a_socket(module: str, line: str) -> None:
    ours, its = socket.socketpair()
    with ours, its:
        process = subprocess.Popen([sys.executable, "-c", OWN_LOGS, module], stderr=its.fileno())
        its.close()
        with ours.makefile() as lines:
            assert line in lines.read()
        process.wait()


def test_without_descriptors_of_processes_there_are_no_templates() -> None:
    run = subprocess.run([sys.executable, "-c", NO_PIDFDS], capture_output=True, check=True)
    assert run.stdout.split() == [b"True", b"False"]


@pytest.mark.slow
async def test_templates_are_renewed_and_what_they_forked_runs_on() -> None:
    async with starting() as starter:
        waiting = await starter.start(of_command("wait"), reads_log=False)
        while waiting.pid in children_named(TITLE):  # noqa: ASYNC110 (it has no title of its own yet)
            await trio.sleep(POLL_S)
        before = children_named(TITLE)
        starter.renew([Role.SERVER, Role.CONTROL])
        assert children_named(TITLE) == before, "no process of its role is restarted"
        starter.renew([Role.SERVER, Role.DECODE])
        after = children_named(TITLE)
        assert before != after
        told = await starter.start(of_command("tell"), reads_log=True)
        assert (await output_of(told, starter, b"\n"))[2] == 7
        assert not is_gone(waiting.pid)
        waiting.kill()
        assert (await output_of(waiting, starter))[2] == -signal.SIGKILL
        waiting.kill()  # does nothing


async def test_what_a_process_leaves_behind_is_waited_for() -> None:
    async with starting() as starter:
        process = await starter.start(of_command("orphan", "0.2"), reads_log=True)
        out, _, _ = await output_of(process, starter)
        orphan = int(out)
        assert parent_of(orphan) == os.getpid()
        await gone(orphan)


async def test_a_wait_for_a_forked_process_may_have_an_end() -> None:
    async with starting() as starter:
        process = await starter.start(of_command("wait"), reads_log=False)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.0)
        process.kill()
        assert (await output_of(process, starter))[2] == -signal.SIGKILL


async def test_a_program_that_is_not_triolet_is_spawned() -> None:
    other = ProcessSpec("decode-0", Role.DECODE, (sys.executable, "-c", "print('other')"))
    async with starting() as starter:
        process = await starter.start(other, reads_log=True)
        assert (await output_of(process, starter))[0] == "other\n"


@pytest.mark.parametrize(
    ("device", "gpus", "roles"),
    [
        ("auto", (), ["server", "prefill", "decode"]),
        ("cpu", ("0",), ["server", "prefill", "decode"]),
        ("auto", ("0",), ["server"]),
        ("cuda", ("0",), ["server"]),
    ],
)
def test_workers_on_gpus_are_not_forked(
    device: str, gpus: tuple[str, ...], roles: list[str]
) -> None:
    worker = WorkerConfig(engine=EngineConfig(device=device))
    settings = Settings(prefill=worker, decode=worker)
    assert roles_of_templates(settings, gpus) == roles


@pytest.mark.parametrize(
    ("program", "listing"),
    [
        ("echo 'GPU 0: A (UUID: GPU-a)'", "GPU 0: A (UUID: GPU-a)\n"),
        ("exit 9", ""),
        ("exec sleep 60", ""),
    ],
)
def test_gpus_are_listed_by_nvidia_smi_or_remain_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, listing: str
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{program}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if "sleep" in program:
        monkeypatch.setattr("ops.supervisor.starter.LISTING_S", 0.1)
    with capture_logs() as logs:
        assert listed_gpus() == listing
    assert [line["event"] for line in logs] == ["gpus_not_listed"] * (not listing)
    assert all("CUDA_VISIBLE_DEVICES" in line["remedy"] for line in logs)
