"""Summarizes log lines about a worker that is lost and comes back as one line for the terminal.

A worker that pauses on a busy machine is declared lost, resumes, drops its leases, is refused until
a server greets it again, and joins: a dozen warnings of several processes within a second. They are
held back until the worker is back, or for `hold_s`. Log files contain every line. No I/O, no clock.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SILENT: Final = "silent"
HELLO: Final = "send HELLO"
"""In the reason of a refusal that ends by itself: the server greets the worker again."""
MAX_REFUSALS: Final = 64
"""Maximum pairs of worker and reason to count repetitions of; others are shown each time."""


@dataclass(slots=True)
class _Episode:
    """The events around one lost worker.

    Attributes:
      began: time of day of the first line.
      due_at: when its line is printed if it has not ended; an ended one is forgotten then.
      cause: why servers declared it lost; empty if none has.
      lost_by: servers that declared it lost and have not greeted it again.
      num_requests: requests that used it at that moment.
      stood_still_s: total pauses that the worker reported [s].
      is_new_life: it fenced itself: it dropped all leases and took a new epoch.
      num_refusals: frames that were refused with "send HELLO".
      is_over: it is back.
      is_told: a line about it has been printed.
    """

    began: str
    due_at: float
    cause: str = ""
    lost_by: set[str] = field(default_factory=set)
    num_requests: int = 0
    stood_still_s: float = 0.0
    is_new_life: bool = False
    num_refusals: int = 0
    is_over: bool = False
    is_told: bool = False

    def disturbed(self) -> str:
        noun = "request was" if self.num_requests == 1 else "requests were"
        return f"{self.num_requests} {noun} affected"

    def back(self, worker: str, away_s: float) -> str:
        if self.is_told:
            return f"{worker} is back after {away_s:.1f} s; {self.disturbed()}"
        if self.cause not in (SILENT, ""):
            again = f"{worker} accepts requests again after {away_s:.1f} s ({self.cause})"
            return f"{again}; {self.disturbed()}"
        return f"{worker} was silent for {away_s:.1f} s and is back; {self.disturbed()}"

    def not_back(self, worker: str) -> str:
        asked = f"; it refused {self.num_refusals} frames" if self.num_refusals else ""
        if self.cause:
            state = "silent" if self.cause == SILENT else f"lost ({self.cause})"
            return f"{worker} has been {state} since {self.began}; {self.disturbed()}{asked}"
        still = f"paused for {self.stood_still_s:.1f} s" if self.stood_still_s else ""
        fenced = "dropped its leases" if self.is_new_life else ""
        seen = " and ".join(filter(None, (still, fenced))) or "did not know a server"
        return f"{worker} {seen} at {self.began}; no server declared it lost{asked}"


@dataclass(slots=True)
class _Refusal:
    """A repeated refusal.

    Attributes:
      due_at: when to report repetitions.
      wait_s: interval of reports; doubles each time.
      num_more: repetitions since the last report.
    """

    due_at: float
    wait_s: float
    num_more: int = 0


class Episodes:
    """The episodes of all workers.

    Args:
      hold_s: how long to hold lines back.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._episodes: dict[str, _Episode] = {}
        self._refusals: dict[tuple[str, str], _Refusal] = {}

    @property
    def due_at(self) -> float:
        """When to call `due` next, if no line arrives before."""
        episodes = (one.due_at for one in self._episodes.values())
        refusals = (one.due_at for one in self._refusals.values())
        return min((*episodes, *refusals), default=math.inf)

    def take(
        self, process: str, entry: Mapping[str, Any], at: str, now: float
    ) -> tuple[bool, str | None]:
        """Process a log line.

        Args:
          process: name of the process that wrote it.
          entry: the line.
          at: its time of day.
          now: current time.

        Returns:
          Whether to hide the line because it belongs to an episode, and a line to show now or None.
        """
        event, reason = entry.get("event"), str(entry.get("reason", ""))
        worker = str(entry.get("worker", process)).partition("@")[0]
        match event:
            case "worker_refused" if HELLO not in reason:
                return self._refused(worker, reason, now), None
            case "worker_joined" if "away_s" in entry:
                return True, self._joined(process, worker, _number(entry, "away_s"), now)
            case "worker_lost" if entry.get("level") == "warning":
                one = self._of(worker, at, now)
                one.cause = one.cause or str(entry.get("cause", ""))
                one.lost_by.add(process)
                one.num_requests += int(_number(entry, "requests"))
            case "worker_refused":
                self._of(worker, at, now, is_late=True).num_refusals += 1
            case "fenced":
                self._of(worker, at, now, is_late=True).is_new_life = True
            case "process_paused":
                one = self._of(worker, at, now, is_late=True)
                one.stood_still_s += _number(entry, "seconds")
            case "server_gone" if process in self._episodes:
                pass  # part of the episode of this worker
            case _:
                return False, None
        return True, None

    def due(self, now: float) -> list[str]:
        """Return the lines that are due."""
        lines = []
        for worker, one in tuple(self._episodes.items()):
            if one.due_at > now:
                continue
            if not (one.is_over or one.is_told):
                lines.append(one.not_back(worker))
            one.is_told = True
            one.due_at = math.inf
            if one.is_over or not one.lost_by:
                del self._episodes[worker]
        for (worker, reason), refusal in tuple(self._refusals.items()):
            if refusal.due_at > now:
                continue
            if not refusal.num_more:
                del self._refusals[worker, reason]
                continue
            lines.append(f"{worker} was refused {refusal.num_more} more times: {reason}")
            refusal.num_more = 0
            refusal.wait_s *= 2.0
            refusal.due_at = now + refusal.wait_s
        return lines

    def ended(self, process: str) -> None:
        """Forget episodes known only to a process that ended: its successor will not report
        them."""
        for worker, one in tuple(self._episodes.items()):
            if one.lost_by == {process}:
                del self._episodes[worker]
            one.lost_by.discard(process)

    def _of(self, worker: str, at: str, now: float, *, is_late: bool = False) -> _Episode:
        """Return the current episode of a worker. `is_late` also accepts one that is over, because
        lines of several processes may arrive late."""
        one = self._episodes.get(worker)
        if one is None or (one.is_over and not is_late):
            one = self._episodes[worker] = _Episode(at, now + self._hold_s)
        return one

    def _joined(self, process: str, worker: str, away_s: float, now: float) -> str | None:
        one = self._episodes.get(worker)
        if one is None:
            one = self._episodes[worker] = _Episode("", now)
        one.lost_by.discard(process)
        if one.lost_by or one.is_over:
            return None
        line = one.back(worker, away_s)
        one.is_over, one.due_at = True, now + self._hold_s
        return line

    def _refused(self, worker: str, reason: str, now: float) -> bool:
        known = self._refusals.get((worker, reason))
        if known is not None:
            known.num_more += 1
        elif len(self._refusals) < MAX_REFUSALS:
            self._refusals[worker, reason] = _Refusal(now + self._hold_s, self._hold_s)
        return known is not None


def _number(entry: Mapping[str, Any], name: str) -> float:
    """Return a number in a log line, or 0: the line may come from any program."""
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(number := float(entry.get(name, 0))):
            return number
    return 0.0
