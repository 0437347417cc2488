"""Start servers and fleets as processes, wait until they are ready, read /proc and their logs, and
stop them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence


ROOT = Path(__file__).parents[2]
# Not the script `triolet`, which does not exist if dependencies come from PYTHONPATH.
TRIOLET = (sys.executable, "-m", "ops.cli")
TAKES_ALL = (
    *("--set", "server.overload.admission.is_on=false"),
    *("--set", "server.overload.brownout.is_on=false"),
    *("--set", "server.overload.guard.is_on=false"),
)
"""For benchmarked servers: on a slow machine, overload control would refuse requests."""
START_DEADLINE_S = 300.0
"""Loading a large checkpoint takes a while, and vLLM compiles for a minute and a half."""
STOP_DEADLINE_S = 30.0
READY_POLL_S = 0.05
READY_TIMEOUT_S = 2.0
"""Timeout of one check."""
LAST_LINES = 15
"""Number of log lines to show for a server that did not start."""
SCHEDULER_CLOCK = 2
"""CPUCLOCK_SCHED: CPU time as counted by the scheduler, in nanoseconds."""
POLL_S = 0.02
KIB = 1024
WORKER_TEMPLATE = "triolet template decode.worker"
"""Process title of the worker template."""


class ServerDidNotStartError(Exception):
    """The server exited before it was ready, or was not ready in time."""


class ServerProcess:
    """A server or a whole fleet as one process with its children, restartable on the same port.

    Args:
      command: program and arguments, without the port.
      log: file for the output of all processes.
      environment: environment variables; None for those of this process.
      ready_path: URL path with a status below 500 once requests are accepted.
      port_words: arguments for the port, with `{}` as its place.
      popen: starts a process.

    Attributes:
      port: port on loopback; reserved until `close`, also while no process listens.
      url: address of the server.
      log: reader of the log.
      command: the command with its port.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        ready_path: str = "/health/ready",
        port_words: Sequence[str] = ("--port", "{}"),
        popen: type[subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        # Reserves the port without listening. Servers that share a port need both options.
        self._kept = socket.socket()
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self._kept.setsockopt(socket.SOL_SOCKET, option, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port: int = self._kept.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = FleetLog(log)
        self.command = [*command, *(word.format(self.port) for word in port_words)]
        self._environment = environment
        self._ready_path = ready_path
        self._popen = popen
        self._process: subprocess.Popen[bytes] | None = None
        log.write_bytes(b"")

    @property
    def pid(self) -> int:
        """The pid of the newest process."""
        assert self._process is not None, "start it first"
        return self._process.pid

    def start(self, core: int | None = None) -> None:
        """Start the process, on one core or on all; does not wait until it is ready."""
        with on_core(core), self.log.path.open("ab") as output:
            self._process = self._popen(
                self.command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self) -> None:
        """Wait until requests are accepted.

        Raises:
          ServerDidNotStartError: the process exited or timed out; has the end of the log.
        """
        assert self._process is not None, "start it first"
        give_up = time.monotonic() + START_DEADLINE_S
        # One client for all polls: creating one takes longer than the pause between two polls.
        with httpx2.Client(base_url=self.url, timeout=READY_TIMEOUT_S, trust_env=False) as client:
            while not self._is_ready(client):
                if self._process.poll() is not None:
                    what = f"the server exited with code {self._process.returncode}"
                elif time.monotonic() > give_up:
                    what = f"the server was not ready within {START_DEADLINE_S:.0f} s"
                else:
                    time.sleep(READY_POLL_S)
                    continue
                lines = self.log.path.read_text(errors="replace").splitlines()[-LAST_LINES:]
                raise ServerDidNotStartError("\n".join([f"{what}; {self.log.path} ends:", *lines]))

    def kill(self) -> None:
        """SIGKILL the process and wait for it, but not for its children."""
        assert self._process is not None, "start it first"
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Stop it with SIGINT, or kill it if that takes too long, and release the port."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._kept.close()

    def _is_ready(self, client: httpx2.Client) -> bool:
        try:
            answer = client.get(self._ready_path)
        except httpx2.TransportError:
            return False
        return answer.status_code < httpx2.codes.INTERNAL_SERVER_ERROR


@contextmanager
def running(server: ServerProcess, core: int | None = None) -> Iterator[ServerProcess]:
    """Run a server while the context is active.

    Raises:
      ServerDidNotStartError: it did not start; has the end of its log.
    """
    with closing(server):
        server.start(core)
        server.wait_ready()
        yield server


@contextmanager
def running_server(options: Sequence[str], log: Path) -> Iterator[str]:
    """Run `triolet serve` with these options and yield its URL.

    Raises:
      ServerDidNotStartError: it did not start; has the end of its log.
    """
    with running(ServerProcess([*TRIOLET, "serve", *options], log)) as server:
        yield server.url


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Bind processes started in this block to one core; None for no binding."""
    own = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of a process, including threads that have ended.

    Raises:
      OSError: there is no such process.
    """
    # Linux's clock id for the CPU time of a process.
    return time.clock_gettime(~pid << 3 | SCHEDULER_CLOCK)


@dataclass(frozen=True, slots=True)
class Cost:
    """Resources of a process.

    Attributes:
      rss_bytes: resident memory.
      num_fds: open files.
      num_threads: threads.
    """

    rss_bytes: int
    num_fds: int
    num_threads: int


def state_of(pid: int) -> str | None:
    """Return the letter of a process's state, or None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[0]


def is_gone(pid: int) -> bool:
    """Return whether a process has exited; zombies count as exited."""
    return state_of(pid) in {None, "Z", "X"}


def cost_of(pid: int) -> Cost | None:
    """Return the resources of a process, or None if it has exited."""
    folder = Path(f"/proc/{pid}")
    try:
        status = (folder / "status").read_text()
        num_fds = sum(1 for _ in (folder / "fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    return Cost(int(fields["VmRSS"]) * KIB, num_fds, int(fields["Threads"]))


class Pages(NamedTuple):
    """Memory of a process [bytes].

    Attributes:
      resident_bytes: resident memory (RSS).
      share_bytes: proportional set size (PSS), which divides shared pages.
    """

    resident_bytes: int
    share_bytes: int


def pages_of(pid: int) -> Pages:
    """Return the memory of a process; zeros if it has exited."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Pages(0, 0)
    found = dict(re.findall(r"^(Rss|Pss):\s+(\d+)", text, re.MULTILINE))
    return Pages(int(found.get("Rss", 0)) * KIB, int(found.get("Pss", 0)) * KIB)


def bytes_beside_templates(workers: Collection[int]) -> int:
    """Return the memory of worker processes in addition to that of their templates. Shared pages
    count once."""
    supervisors = {parent for pid in workers if (parent := _parent_of(pid)) is not None}
    templates = [pages_of(pid) for pid in _pids_titled(WORKER_TEMPLATE, supervisors)]
    share_bytes = sum(one.share_bytes for one in (*map(pages_of, workers), *templates))
    return max(0, share_bytes - sum(one.resident_bytes for one in templates))


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _pids_titled(title: str, parents: Collection[int]) -> Iterator[int]:
    for parent in parents:
        for listed in Path(f"/proc/{parent}/task").glob("*/children"):
            for pid in map(int, listed.read_text().split()):
                with suppress(FileNotFoundError, ProcessLookupError):
                    if Path(f"/proc/{pid}/cmdline").read_text().startswith(title):
                        yield pid


def seconds_of(entry: Mapping[str, Any]) -> float:
    """Return the time of a log line, in seconds since the epoch."""
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


class FleetLog:
    """Reader of the log of a `triolet serve` and its children.

    Args:
      path: file of their output.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_bytes = 0
        self._entries: list[dict[str, Any]] = []
        self._by_event: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def entries(self) -> list[dict[str, Any]]:
        """Return all JSON lines so far."""
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            # A killed process may leave half a line, with another process's line after it.
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    self._entries.append(entry)
                    self._by_event[str(entry.get("event"))].append(entry)
        return self._entries

    def of(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """Return the lines of an event with these fields."""
        self.entries()
        return [entry for entry in self._by_event[event] if fields.items() <= entry.items()]

    def pids(self) -> dict[str, int]:
        """Return the newest pid by process name, of servers and workers."""
        return {entry["name"]: entry["pid"] for entry in self.of("process_started")}

    def names(self, role: str) -> list[str]:
        """Return the names of the workers of a role."""
        return sorted(name for name in self.pids() if name.startswith(f"{role}-"))

    def costs(self) -> dict[str, Cost]:
        """Return the resources of each live process."""
        held = {name: cost_of(pid) for name, pid in self.pids().items()}
        return {name: cost for name, cost in held.items() if cost is not None}


class HasNotHappenedError(Exception):
    """An expected event did not happen in time."""


async def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait until a condition holds.

    Raises:
      HasNotHappenedError: it did not hold in time.
    """
    with trio.move_on_after(timeout_s):
        while not condition():  # noqa: ASYNC110 (other processes set no events)
            await trio.sleep(POLL_S)
        return
    raise HasNotHappenedError(f"not within {timeout_s:.0f} s: {what}")


def attempts_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of attempts of each request, by the client's request id.

    Uses the server's log line at the end of each request. A request on a server that crashed has
    no such line and is left out.
    """
    client_ids: dict[str, str] = {}
    highest: dict[str, int] = {}
    for entry in entries:
        if entry.get("event") == "request_ended":
            client_ids[entry["request_id"]] = entry["client_request_id"]
        elif entry.get("event") == "attempt_ended":
            request_id, attempt = entry["attempt"].split("/")
            highest[request_id] = max(highest.get(request_id, 0), int(attempt))
    return {client_ids[i]: n + 1 for i, n in highest.items() if i in client_ids}
