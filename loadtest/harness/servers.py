"""A server of one's own, `triolet serve` or another's: started, waited for, stopped by its pid."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


START_DEADLINE_S = 120.0
"""Loading a large checkpoint takes a while; the demo model takes seconds."""
STOP_DEADLINE_S = 30.0
READY_POLL_S = 0.1


class ServerDidNotStartError(Exception):
    """It ended before it was ready, or was not ready in time."""


@contextmanager
def running_server(options: Sequence[str], log: Path) -> Iterator[str]:
    """Run `triolet serve` with these options and yield its URL.

    Raises:
      ServerDidNotStartError: with the end of its log.
    """
    # Not the script `triolet`: where dependencies come from PYTHONPATH there is none.
    command = [sys.executable, "-m", "ops.cli", "serve", *options]
    with socket.socket() as kept, log.open("wb") as output:
        # Bound and never listening: nobody else gets the port, while the server is away either.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port: int = kept.getsockname()[1]
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_ready(process, f"{url}/health/ready", log, START_DEADLINE_S)
            yield url
        finally:
            stop(process)


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, deadline_s: float) -> None:
    """Return once a server says 200 at a URL.

    Args:
      process: of the server.
      url: what to ask.
      log: what the server writes.
      deadline_s: from now.

    Raises:
      ServerDidNotStartError: it ended, or took longer; with the end of its log.
    """
    give_up_s = time.monotonic() + deadline_s
    while not _is_ready(url):
        if process.poll() is not None:
            what = f"the server ended with exit code {process.returncode}"
        elif time.monotonic() > give_up_s:
            what = f"the server was not ready within {deadline_s:.0f} s"
        else:
            time.sleep(READY_POLL_S)
            continue
        last_lines = log.read_text(errors="replace").splitlines()[-15:]
        raise ServerDidNotStartError("\n".join([f"{what}; its log {log} ends:", *last_lines]))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server as its user would, and by force if that takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


POLL_S = 0.02
KIB = 1024


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process holds.

    Attributes:
      rss_bytes: memory.
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
    """Whether it runs no more; a process that nobody has waited for yet is gone too."""
    return state_of(pid) in {None, "Z", "X"}


def cost_of(pid: int) -> Cost | None:
    """Return what a process holds, or None if it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        status = (folder / "status").read_text()
        num_fds = sum(1 for _ in (folder / "fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    return Cost(int(fields["VmRSS"]) * KIB, num_fds, int(fields["Threads"]))


def seconds_of(entry: Mapping[str, Any]) -> float:
    """Return when a log line was written, in seconds since the epoch."""
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


class FleetLog:
    """What a `triolet serve` and its children have logged so far.

    Args:
      path: where their output goes.
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
            # A process that is killed may leave half a line, which the next one's follows.
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    self._entries.append(entry)
                    self._by_event[str(entry.get("event"))].append(entry)
        return self._entries

    def of(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """Return the lines of one event that carry these fields."""
        self.entries()
        return [entry for entry in self._by_event[event] if fields.items() <= entry.items()]

    def pids(self) -> dict[str, int]:
        """Return the newest process of each name, the server's and the workers'."""
        return {entry["name"]: entry["pid"] for entry in self.of("process_started")}

    def names(self, role: str) -> list[str]:
        """Return the workers of a role."""
        return sorted(name for name in self.pids() if name.startswith(f"{role}-"))

    def costs(self) -> dict[str, Cost]:
        """Return what each living process holds."""
        held = {name: cost_of(pid) for name, pid in self.pids().items()}
        return {name: cost for name, cost in held.items() if cost is not None}


class HasNotHappenedError(Exception):
    """Something that had to happen did not, in time."""


async def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait until something holds.

    Raises:
      HasNotHappenedError: it does not.
    """
    with trio.move_on_after(timeout_s):
        while not condition():  # noqa: ASYNC110 (other processes set no events)
            await trio.sleep(POLL_S)
        return
    raise HasNotHappenedError(f"not within {timeout_s:.0f} s: {what}")


def attempts_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many attempts each request had, by the id that its client gave it.

    Requests are told from one another by the server's line about their end; a request whose server
    died has none and is left out.
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
