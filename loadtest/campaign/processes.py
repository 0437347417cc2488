"""The processes of a running fleet: which there are, in which state, and what they cost.

Knows `/proc` and the supervisor's log lines; sends signals only to processes that those lines name.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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
